"""Makes Triton's interpreter faster, by what it does again and again for nothing."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any


def spare() -> None:
    """Let the interpreter rewrite the kernels here instead of in every process that is forked later, patch
    its language when it first runs a kernel and leave it so, and know the types of numpy and of tensors.
    Leave out the checks for overflow, whose findings it drops unless it debugs.

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
    interpreter._validate_np_data_size = _fits
    if semantic := getattr(interpreter, "interpreter_semantic", None):
        core = sys.modules["triton.language.core"]
        _remember_types(core, type(semantic))
        _remember_operands(core, type(semantic))
        if hasattr(interpreter, "_LangPatchScope"):
            interpreter._patch_attr = _call_directly(semantic)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    for name, module in list(sys.modules.items()):
        if name.startswith("dct_plugin.kernels.triton"):
            for function in list(vars(module).values()):
                if isinstance(function, interpreter.InterpretedFunction):
                    function.rewrite()


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


def _fits(array: Any, kind: Any) -> bool:
    """Return whether the entries of an array have no more bits than a type; a pointer has 64."""
    return array.itemsize <= 1 or 8 * array.itemsize <= getattr(kind, "primitive_bitwidth", 64)


def _remember_operands(core: Any, semantic: Any) -> None:
    """Let operands of two types become of the types that the first ones became, and numbers beside a type of
    tensors become tensors once.
    """
    convert, cast = semantic.binary_op_type_checking_impl, semantic.cast
    tensor, unwrap = core.tensor, core._unwrap_if_constexpr
    #: What becomes of both operands: None, itself; a type; or, of a number, a tensor.
    known: dict[Any, tuple[Any, Any]] = {}

    def operands(
        self: Any, lhs: Any, rhs: Any, lhs_pointer: Any = False, rhs_pointer: Any = False,
        arithmetic: Any = True, division: Any = False,
    ) -> Any:  # fmt: skip
        left = lhs.type.name if type(lhs) is tensor else (type(lhs), lhs)
        right = rhs.type.name if type(rhs) is tensor else (type(rhs), rhs)
        key = (left, right, lhs_pointer, rhs_pointer, arithmetic, division)
        if key not in known:
            found = convert(self, lhs, rhs, lhs_pointer, rhs_pointer, arithmetic, division)
            known[key] = becomes(lhs, found[0]), becomes(rhs, found[1])
            return found
        one, other = known[key]
        if one is not None:
            lhs = one if type(one) is tensor else cast(self, lhs, one)
        if other is not None:
            rhs = other if type(other) is tensor else cast(self, rhs, other)
        return self.broadcast_impl_value(lhs, rhs)

    def becomes(operand: Any, result: Any) -> Any:
        if type(operand) is not tensor:
            return result
        return None if operand.dtype == result.dtype else result.dtype

    def cast_others(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        return value if value.dtype is kind else cast(self, value, kind, rounding)

    semantic.binary_op_type_checking_impl, semantic.cast = operands, cast_others
    core._unwrap_if_constexpr = lambda value: value if type(value) is tensor else unwrap(value)


def _call_directly(semantic: Any) -> Callable[..., None]:
    """Return what patches a builtin of the language, to be called without the wrapper that looks for its
    argument *_semantic*.
    """

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, call)

    return patch
