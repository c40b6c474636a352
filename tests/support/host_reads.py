"""Counts how often the library looks at a tensor from the host: on CUDA it waits for the device there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import dct_plugin

_READS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, Tensor.masked_select),
    *(Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__),
    *(torch.nonzero, torch.masked_select, torch.unique, torch.equal, torch.bincount),
    # Those that look whether they succeeded; qr and cholesky_ex do not.
    *(torch.linalg.eigh, torch.linalg.svd, torch.linalg.solve, torch.linalg.inv, torch.linalg.cholesky),
}
_LIBRARY = str(Path(dct_plugin.__file__).parent)


class HostReads(TorchFunctionMode):
    """Reads of tensors by code of the library while the context is open, as ``file:function`` each.

    What Triton's interpreter does in place of a device is not counted, nor what is on the host by nature.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        moved = func is Tensor.to and result is not args[0]
        reads = func in _READS or (moved and "cpu" in map(str, args))
        # A mask as an index has a result whose size only the device knows.
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            reads = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in index)
        if reads:
            frame = sys._getframe(1)
            while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame.f_code.co_filename.startswith(_LIBRARY):
                file = frame.f_code.co_filename.removeprefix(_LIBRARY + "/")
                self.places.append(f"{file}:{func.__name__}")
        return result
