"""Calls of the compiled library (csrc/): tensors go by their address, statuses become exceptions."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ..codecs.payload import Payload
from ..codecs.stats import KERNEL_ERRORS
from ..errors import PayloadError
from . import build

#: Types of arguments, with the letters of :mod:`struct`; ``P``: the address of entries or of a structure.
TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "Q": ctypes.c_uint64,
    "q": ctypes.c_int64,
    "I": ctypes.c_uint32,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
#: The status of a payload whose header is wrong.
WRONG_HEADER = -9
_ERRORS = {
    **{-1 - number: text for number, text in KERNEL_ERRORS.items()},
    -8: "index section has trailing bits or bytes",
    WRONG_HEADER: "payload header is wrong",
}


def fields(letter: str, names: str) -> list[tuple[str, Any]]:
    """Return fields of a structure that have one type, given by its letter in :data:`TYPES`."""
    return [(name, TYPES[letter]) for name in names.split()]


class PayloadStructure(ctypes.Structure):
    """A payload, whose header has been checked."""

    _fields_ = [
        *fields("P", "data"),
        *fields("Q", "nbytes numel nnz index_nbytes"),
        *fields("i", "value_dtype"),
        *fields("I", "check1 check2"),
    ]


class Library:
    """The functions of the compiled library.

    Args:
        signatures: The types of every function's arguments, a letter of :data:`TYPES` each.

    Attributes:
        path: The library's file.

    Raises:
        OSError: It can be neither loaded nor built.
    """

    def __init__(self, signatures: Mapping[str, str]) -> None:
        self.functions, self.path = build.load()
        for name, types in signatures.items():
            function = getattr(self.functions, name)
            function.argtypes, function.restype = [TYPES[each] for each in types], ctypes.c_int32

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function with numbers, structures, arrays and tensors on the host.

        Raises:
            ValueError: A tensor is on another device.
            PayloadError, MemoryError: What the function found.
        """
        if status := self.status(name, *arguments):
            check(status)

    def status(self, name: str, *arguments: Any) -> int:
        """Do what :meth:`call` does, but return the status: 0, or what is wrong."""
        taken: list[Any] = []
        for each in arguments:  # every call counts: a model has hundreds of tensors
            if isinstance(each, Tensor) and each.is_cpu:
                taken.append(each.data_ptr())
            else:
                taken.append(passed(each) if isinstance(each, _CONVERTED) else each)
        status: int = getattr(self.functions, name)(*taken)
        return status


def check(status: int) -> None:
    """Raise what a status stands for; 0 is success."""
    if status == 0:
        return
    if status == -1:
        raise MemoryError("compiled kernels: out of memory")
    raise PayloadError(_ERRORS[status])


#: Types of arguments that :func:`passed` converts; the library takes others as they are.
_CONVERTED = (Tensor, np.ndarray, Payload)


def passed(argument: Tensor | np.ndarray[Any, Any] | Payload) -> Any:
    """Return an argument as a function of the library takes it."""
    if isinstance(argument, Tensor):
        if argument.device.type != "cpu":
            raise ValueError(f"a tensor is on {argument.device}, these kernels serve cpu tensors")
        return argument.data_ptr()
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    numbers = [getattr(argument.header, field[0]) for field in PayloadStructure._fields_[1:]]
    return ctypes.byref(PayloadStructure(passed(argument.data), *numbers))
