"""Bodies of a host's functions: the installed ones are known, and another one is a warning that names it."""

from __future__ import annotations

import logging
import pkgutil

import pytest

from dct_plugin.integrations.host import versions
from dct_plugin.integrations.host.versions import TESTED, installed


@pytest.mark.parametrize("distribution", versions.BODIES)
def test_every_tested_version_has_a_body_and_the_installed_one_is_known(
    distribution: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, known in versions.BODIES[distribution].items():
        found = {version for several in known.values() for version in several.split(", ")}
        assert found == set(TESTED[distribution]), name
        if (version := installed(distribution)) in found:
            pytest.importorskip(name.partition(".")[0])
            assert version in known[versions.fingerprint(pkgutil.resolve_name(name))].split(", "), name
    if installed(distribution) is not None:
        versions.warn_of_unknown_bodies(distribution)
    assert not caplog.messages


def test_an_unknown_body_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    own = f"{__name__}:{test_an_unknown_body_is_named.__name__}"
    monkeypatch.setitem(versions.BODIES, "deepspeed", {own: {"0123456789ab": "0.19.0"}})
    with caplog.at_level(logging.WARNING):
        versions.warn_of_unknown_bodies("deepspeed", "another part")
        versions.warn_of_unknown_bodies("deepspeed", "unknown_body")
    (line,) = caplog.messages
    assert own in line
    assert "0.19.0, 0.19.6, 0.19.8" in line


def test_comments_docstrings_and_blanks_do_not_count() -> None:
    def plain(x: int) -> int:
        return x + 1

    def documented(x: int) -> int:
        """Return the next."""
        # why

        return x + 1

    def other(x: int) -> int:
        return x + 2

    assert versions.fingerprint(plain) == versions.fingerprint(documented) != versions.fingerprint(other)
