"""Makes Triton's interpreter faster: it patches its language anew at every call of a device function."""

from __future__ import annotations

import inspect
import sys
from typing import Any


def patch_language_once() -> None:
    """Let the interpreter patch the language when it first runs a kernel, and leave it so.

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
