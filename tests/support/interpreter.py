"""Makes Triton's interpreter faster, by what it does again and again for nothing."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any


def spare() -> None:
    """Let the interpreter patch its language when it first runs a kernel and leave it so, know the types of
    numpy and of tensors, and leave out the checks for overflow, whose findings it drops unless it debugs.

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
    if semantic := getattr(interpreter, "interpreter_semantic", None):
        _remember_types(sys.modules["triton.language.core"], type(semantic))
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


def _remember_types(core: Any, semantic: Any) -> None:
    """Let equal blocks have one type, and tensors of one type share what follows from it: the interpreter
    makes both anew for every result. Blocks of the same sizes are not broadcast.
    """
    slow, slow_block, slow_eq = core.tensor.__init__, core.block_type.__init__, core.dtype.__eq__
    broadcast = semantic.broadcast_impl_value
    if vars(core.tensor(None, core.block_type(core.int32, [4]))).keys() != {
        "handle", "shape", "numel", "type", "dtype",
    }:  # fmt: skip
        return  # another release
    blocks: dict[Any, Any] = {}

    def init(tensor: Any, handle: Any, type: Any) -> None:
        known = vars(type)
        if "of_tensors" not in known:
            slow(tensor, handle, type)
            known["of_tensors"] = (tensor.shape, tensor.numel, tensor.dtype)
        tensor.handle, tensor.type = handle, type
        tensor.shape, tensor.numel, tensor.dtype = known["of_tensors"]

    def new_block(cls: Any, element: Any, shape: Any) -> Any:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = (sizes, element.name, getattr(element, "address_space", None), getattr(element, "const", None))
        if key not in blocks:
            blocks[key] = object.__new__(cls)
        return blocks[key]

    def init_block(block: Any, element: Any, shape: Any) -> None:
        if not vars(block):
            slow_block(block, element, shape)
            block.sizes = list(block.shape)

    def broadcast_others(self: Any, one: Any, other: Any) -> Any:
        sizes = vars(one.type).get("sizes")
        if one.type is other.type or (sizes is not None and sizes == vars(other.type).get("sizes")):
            return one, other
        return broadcast(self, one, other)

    core.tensor.__init__, semantic.broadcast_impl_value = init, broadcast_others
    core.block_type.__new__, core.block_type.__init__ = new_block, init_block
    core.dtype.__eq__ = lambda one, other: one is other or slow_eq(one, other)
