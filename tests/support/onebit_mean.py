"""A backend for DeepSpeed's 1-bit optimizers that loses nothing: torch's all-reduce of the whole momentum.

What they train with it is what they train with ``"comm_backend_name": "dct"`` at sparsity 0.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor


class MeanBackend:
    """What the optimizers take for DeepSpeed's own ``compressed`` backend."""

    def __init__(self, mpu: Any = None) -> None:
        self.size = dist.get_world_size()

    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int
    ) -> Tensor:
        dist.all_reduce(buffer_m)
        return buffer_m.mul_(1.0 / self.size)


def install() -> None:
    """To be called before the engine is made; its optimizer is then :func:`started`."""
    module = ModuleType("deepspeed.runtime.comm.compressed")
    module.CompressedBackend = MeanBackend  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def started(optimizer: Any) -> None:
    """Take the first step for a step: DeepSpeed would try its backend out in it."""
    getattr(optimizer, "optimizer", optimizer).initialize = True
