"""The one place where kernels are launched, with the options that they are checked with."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

#: Products and sums are rounded one by one, as in plain torch.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}

#: Compiled kernels, and their constants in order, by all that makes Triton compile another one. Triton finds
#: that out, and compares all constants of the module, in every launch: that takes four times as long.
_compiled: dict[Any, tuple[Any, list[Any]]] = {}
#: In older versions a compiled kernel takes other arguments.
_KEPT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
_INT32 = 1 << 31


def launch(kernel: Any, programs: int | tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Queue so many programs of a kernel on the current device.

    Args:
        kernel: A kernel that is not specialised for the values of its numbers, with constants behind all
            other parameters.
        arguments: Tensors of that device, of which the first is one; numbers; None.
        constants: The constants, and Triton's options.
    """
    grid = (*programs, 1) if isinstance(programs, tuple) else (programs, 1, 1)
    key = (kernel.fn, arguments[0].get_device(), *map(_form, arguments), *constants.items())
    if known := _compiled.get(key):
        compiled, values = known
        compiled[grid](*arguments, *values)
        return
    compiled = kernel[grid](*arguments, **constants, **OPTIONS)
    if compiled is not None and _KEPT:  # the interpreter compiles nothing
        values = [constants[each.name] for each in kernel.params if each.is_constexpr]
        _compiled[key] = compiled, values


def _form(argument: Tensor | int | float | None) -> tuple[Any, bool]:
    """Return what a kernel is compiled for: a type, and if an address is aligned, or a number fits int32."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return type(argument), argument is None or -_INT32 <= argument < _INT32
