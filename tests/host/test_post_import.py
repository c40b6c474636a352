"""Functions that wait for an import: in order, once, whatever else looks for the module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dct_plugin.integrations.host.patching import when_imported

NAME = "dct_test_late_module"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that is not imported yet; the import machinery is as before afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    file = tmp_path / f"{NAME}.py"
    file.write_text("value = 1\n")
    yield file
    sys.modules.pop(NAME, None)


def waiting() -> int:
    return sum(type(finder).__module__.startswith("dct_plugin") for finder in sys.meta_path)


def test_functions_are_called_once_and_in_order(module: Path) -> None:
    called: list[Any] = []
    before = waiting()
    when_imported(NAME, lambda found: called.append(("first", found.value)))
    when_imported(NAME, lambda found: called.append(("second", found.value)))
    found = importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert called == [("first", 1), ("second", 1)]
    assert waiting() == before
    assert type(found.__spec__.loader).__name__ == type(found.__loader__).__name__ == "SourceFileLoader"  # type: ignore[union-attr]
    when_imported(NAME, lambda found: called.append(("at once", found.value)))
    assert called[2:] == [("at once", 1)]


def test_the_same_function_waits_once(module: Path) -> None:
    called: list[ModuleType] = []
    before = waiting()
    when_imported(NAME, called.append)
    when_imported(NAME, called.append)
    assert waiting() == before + 1
    importlib.import_module(NAME)
    assert len(called) == 1


def test_looking_for_the_module_is_not_importing_it(module: Path) -> None:
    called: list[ModuleType] = []
    when_imported(NAME, called.append)
    assert importlib.util.find_spec(NAME) is not None
    assert not called
    importlib.import_module(NAME)
    assert len(called) == 1


def test_finders_of_others_that_ask_all_finders_again(module: Path) -> None:
    """As wrapt's: it calls ``find_spec`` from the top, so that our finder is asked twice."""

    class Asking:
        busy = False

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != NAME or self.busy:
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    called: list[ModuleType] = []
    sys.meta_path.insert(0, Asking())  # type: ignore[arg-type]
    when_imported(NAME, called.append)
    sys.meta_path.insert(0, Asking())  # type: ignore[arg-type]
    importlib.import_module(NAME)
    assert len(called) == 1


def test_a_failed_import_is_waited_for_again(module: Path) -> None:
    called: list[ModuleType] = []
    when_imported(NAME, called.append)
    module.write_text("raise ImportError('not now')\n")
    with pytest.raises(ImportError, match="not now"):
        importlib.import_module(NAME)
    assert not called
    module.write_text("value = 'later, and longer'\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert len(called) == 1


def test_a_function_that_raises_stops_every_attempt(module: Path) -> None:
    """A host that was refused is not trained with in silence because the script tries its import twice."""

    def refuse(found: ModuleType) -> None:
        raise RuntimeError("not supported")

    when_imported(NAME, refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not supported"):
            importlib.import_module(NAME)
        assert NAME not in sys.modules


def test_what_no_longer_waits_is_let_go() -> None:
    called: list[ModuleType] = []
    cancel = when_imported("dct_test_never_imported", called.append)
    finders = list(sys.meta_path)
    cancel()
    assert len(sys.meta_path) == len(finders) - 1
    cancel()
    assert len(sys.meta_path) == len(finders) - 1
