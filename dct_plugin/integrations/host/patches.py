"""Replaced attributes of classes, modules and instances, which can be put back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

Function = Callable[..., Any]

_INHERITED = object()


class Patches:
    """Attributes that were replaced, to be put back in reverse order; also a context manager, which does."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
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
