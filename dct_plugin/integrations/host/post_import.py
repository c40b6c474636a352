"""Run a function right after a module has been imported, whoever imports it and when.

Imports the standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


def when_imported(name: str, function: Callback) -> Callable[[], None]:
    """Call ``function(module)`` once, as soon as the module has run; at once if it already has.

    Several functions may wait for one module; they are called in the order in which they came. The same
    function is not called twice. What it raises reaches the import statement, which may then be tried again:
    the function waits until it has returned once.

    Returns:
        A function that ends the waiting, and with it the reference to ``function``.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        function(module)
    elif not _waiting(name, function):
        sys.meta_path.insert(0, _Finder(name, function))

    def cancel() -> None:
        for finder in _waiting(name, function):
            sys.meta_path.remove(finder)

    return cancel


def _waiting(name: str, function: Callback) -> list[_Finder]:
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    return [finder for finder in finders if (finder.name, finder.function) == (name, function)]


class _Finder(MetaPathFinder):
    """Finds one module through the finders behind it, and has its loader call back."""

    def __init__(self, name: str, function: Callback) -> None:
        self.name = name
        self.function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def call(self, module: ModuleType) -> None:
        """Call the function, unless that was done; another finder may have wrapped the loader twice."""
        if self in sys.meta_path:
            self.function(module)
            sys.meta_path.remove(self)


class _Loader(Loader):
    """Loads the module with its own loader, and then calls the function."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Nothing of ours stays behind in the module.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.call(module)
