"""Patches of modules, classes and instances, put on and taken off; versions and signatures."""

from __future__ import annotations

import inspect
import math
import sys
from types import ModuleType
from typing import Any

import pytest

from dct_plugin import VersionError
from dct_plugin.integrations.host import lost_peers, versions
from dct_plugin.integrations.host.patching import Patches, given
from dct_plugin.integrations.host.versions import Target


class Base:
    def step(self, size: int = 1) -> int:
        """One step."""
        return size

    @staticmethod
    def fixed() -> str:
        return "fixed"


class Derived(Base):
    pass


def double(original: Any, *arguments: Any, **keywords: Any) -> Any:
    return 2 * original(*arguments, **keywords)


def test_arguments_are_read_by_position_and_by_name() -> None:
    for arguments, keywords, size in (((5,), {}, 5), ((), {"size": 5}, 5), ((), {}, 1)):
        assert given(Base().step, "size", arguments, keywords) == size
    assert given(Base.step, "size", (Base(), 5), {}) == 5
    assert given(Base.step, "colour", (Base(), 5), {}) is None


@pytest.mark.parametrize("make", [lambda: Base, lambda: Derived, Base, Derived])
def test_classes_and_instances_are_as_before(make: Any) -> None:
    owner = make()
    before = dict(vars(owner))
    call = owner().step if isinstance(owner, type) else lambda size: owner.step(size)
    patches = Patches()
    patches.intercept(owner, "step", double)
    patches.intercept(owner, "step", double)
    call = owner().step if isinstance(owner, type) else owner.step
    assert call(3) == 12
    assert call.__doc__ == "One step."
    assert list(inspect.signature(call).parameters) == ["size"]
    patches.undo()
    assert dict(vars(owner)) == before
    assert (owner().step if isinstance(owner, type) else owner.step)(3) == 3


def test_static_methods_stay_static() -> None:
    patches = Patches()
    patches.replace(Base, "fixed", staticmethod(lambda: "other"))
    assert Base().fixed() == "other"
    patches.undo()
    assert Base().fixed() == "fixed"
    assert isinstance(Base.__dict__["fixed"], staticmethod)


def test_names_that_others_imported_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = ModuleType("pack.user"), ModuleType("packet")
    for module in (inside, outside):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.sqrt = math.sqrt  # type: ignore[attr-defined]
    patches = Patches()
    patches.rebind("pack", "sqrt", math.sqrt, "new")
    assert (inside.sqrt, outside.sqrt) == ("new", math.sqrt)  # type: ignore[attr-defined]
    patches.undo()
    assert inside.sqrt is math.sqrt  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.19.0", True), ("0.19", True), ("0.19.8.1", True), ("0.19.4+cu12", True), ("0.20.0", False),
        ("0.20", False), ("0.18.9", False), ("1.0", False), ("unknown", False), ("0.19.0rc1", True),
    ],
)  # fmt: skip
def test_version_ranges(version: str, supported: bool) -> None:
    assert (version in versions.VersionRange("0.19.0", "0.20.0")) == supported


def target(name: str, parameters: str = "", module: str = __name__) -> Target:
    return Target(module, name, parameters, "steps")


def test_what_fits_passes() -> None:
    fitting = [target("Base.step", "self"), target("double", "original")]
    versions.require(fitting, "Host 1.0", "any", "nothing")


def test_every_target_that_does_not_fit_is_named() -> None:
    targets = [
        target("Base.step", "self count"),
        target("Base.stop", "self"),
        target("anything", module="dct_no_such_module"),
    ]
    with pytest.raises(VersionError) as caught:
        versions.require(targets, "Host 1.0", versions.VersionRange("1.1", "2"), "update it")
    text = str(caught.value)
    assert text.startswith("Host 1.0 is not what dct-plugin was made for; nothing was patched\n")
    assert f"{__name__}.Base.step (steps)" in text
    assert "expected: (self, count, ...)" in text
    assert "found:    (self, size): does not start with (self, count)" in text
    assert f"missing: {__name__} has no Base.stop" in text
    assert "no such module" in text
    assert text.endswith("  supported: 1.1 up to, not including, 2\n  what to do: update it")


def test_the_excepthook_is_replaced_as_long_as_jobs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dct_plugin.transport.lost_ranks.register_process", lambda: None)
    # Jobs of other tests in this process may have left theirs behind another hook.
    monkeypatch.setattr(lost_peers, "_excepthook", type(lost_peers._excepthook)())
    before = sys.excepthook
    jobs = [Base(), Base()]
    for job in jobs:
        lost_peers.watch(job, lambda job: 3)
    assert sys.excepthook is not before
    jobs.pop()
    assert sys.excepthook is not before
    del job
    jobs.pop()
    assert sys.excepthook is before
