from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_Moved = tuple[torch.Tensor, "dist.Work | None"]


class CudaRNGStatesTracker:
    """Empty."""


def activation_recompute_forward(*_: Any, **__: Any) -> None:
    """Empty."""


def checkpoint(*_: Any, **__: Any) -> None:
    """Empty."""


def reduce_scatter_along_first_dim(inp: torch.Tensor, tp_group: Any, async_op: bool = False) -> _Moved:
    output = inp.new_empty((inp.shape[0] // tp_group.size(), *inp.shape[1:]))
    work = dist.reduce_scatter_tensor(output, inp.contiguous(), group=tp_group, async_op=async_op)
    return output, work


def gather_along_first_dim(
    inp: torch.Tensor, process_group: Any, async_op: bool = False, quantizer: Any = None
) -> _Moved:
    output = inp.new_empty((inp.shape[0] * process_group.size(), *inp.shape[1:]))
    work = dist.all_gather_into_tensor(output, inp.contiguous(), group=process_group, async_op=async_op)
    return output, work


def allreduce(inp: torch.Tensor, tp_group: Any = None, async_op: bool = False) -> _Moved:
    return inp, dist.all_reduce(inp, group=tp_group, async_op=async_op)
