"""Makes Triton's interpreter faster, by what it does again and again for nothing."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any


def spare() -> None:
    """Let the interpreter patch its language when it first runs a kernel and leave it so, know the types of
    numpy, and leave out the checks for overflow, whose findings it drops unless it debugs.

    Where Triton has not been imported, or does otherwise, nothing is changed.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or patch.__module__ == __name__:
        return
    unchanged = getattr(interpreter, "_LangPatchScope", lambda: None)
    patched: set[frozenset[str]] = set()
    seen: dict[int, frozenset[str]] = {}

    def patch_first(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in seen:
            modules = [value.__name__ for value in names.values() if inspect.ismodule(value)]
            seen[id(names)] = frozenset(name for name in modules if name.startswith("triton.language"))
        if seen[id(names)] not in patched:
            patch(function)
            patched.add(seen[id(names)])
        return unchanged()

    interpreter._patch_lang = patch_first
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remembered(found: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a function of types, which are found by name since not all of them have a hash."""
    known: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = found(kind)
        return known[name]

    return remembered
