"""Replaced attributes of classes, modules and instances, and functions that run after an import.

Imports the standard library only.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

Function = Callable[..., Any]

_INHERITED = object()


def given(function: Function, name: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return an argument of a call, by position or by name, or its default; None without such a parameter."""
    call = inspect.signature(function).bind(*arguments, **keywords)
    call.apply_defaults()
    return call.arguments.get(name)


class Patches:
    """Attributes that were replaced, to be put back in reverse order; also a context manager, which does."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` and remember what was there.

        Args:
            owner: A module, class or instance; an instance's (or subclass's) inherited attribute is found
                again once its own is gone.
            name: The name of the attribute.
            value: A function that replaces a method of an *instance* is called without ``self``.
        """
        self._originals.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def intercept(self, owner: Any, name: str, function: Function) -> None:
        """Replace a function by ``function(original, *arguments, **keywords)``; its name, docstring and
        signature stay. The first argument of a method of a *class* is the instance.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*arguments: Any, **keywords: Any) -> Any:
            return function(original, *arguments, **keywords)

        self.replace(owner, name, replacement)

    def rebind(self, package: str, name: str, old: Any, new: Any) -> None:
        """Replace ``old`` where modules of ``package`` (and the script) have imported it by name."""
        for key, module in list(sys.modules.items()):
            inside = key in ("__main__", package) or key.startswith(f"{package}.")
            if inside and getattr(module, "__dict__", {}).get(name) is old:
                self.replace(module, name, new)

    def undo(self) -> None:
        """Put everything back."""
        while self._originals:
            owner, name, value = self._originals.pop()
            if value is not _INHERITED:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


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
    """Finds one module through the finders behind it, and calls a function once it is loaded."""

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
                    patches = Patches()
                    patches.intercept(spec.loader, "exec_module", functools.partial(self._execute, patches))
                return spec
        return None

    def _execute(self, patches: Patches, original: Function, module: ModuleType) -> None:
        """Load a module, and call the function after that of the name; a loader may serve several modules."""
        is_awaited = module.__name__ == self.name
        if is_awaited:  # nothing of ours stays behind in the module
            patches.undo()
        original(module)
        if is_awaited and self in sys.meta_path:  # else the finder was asked twice, and the call is made
            self.function(module)
            sys.meta_path.remove(self)
