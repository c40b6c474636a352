"""A stand-in for a GPU, with which the programs for one run anywhere, to see that they work.

Tensors lie on the CPU, Triton's interpreter runs the kernels, and times are those of the host. The variable
``DCT_DRY_RUN`` asks for it, and needs ``TRITON_INTERPRET=1``. No figure of such a run means anything.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import torch

from dct_plugin.kernels import register_backend

#: Whether programs run without a GPU; the device of their tensors, and what DDP is told of it.
DRY = bool(os.environ.get("DCT_DRY_RUN"))
DEVICE = "cpu" if DRY else "cuda"


class _Event:
    """Times of the host."""

    def __init__(self, **_: Any) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other._at - self._at)


def device_ids() -> list[int] | None:
    """Return the argument of this name of ``DistributedDataParallel``."""
    return None if DRY else [torch.cuda.current_device()]


def stand_in() -> None:
    """Let ``torch.cuda`` do nothing, if this is a dry run, and CPU tensors take the kernels of a GPU."""
    if not DRY:
        return
    from dct_plugin.kernels.triton.backend import TritonBackend

    register_backend("interpreted", TritonBackend)
    os.environ["DCT_KERNELS"] = "interpreted"
    cuda: Any = torch.cuda
    cuda.Event = _Event
    for name in (
        "synchronize",
        "reset_peak_memory_stats",
        "set_sync_debug_mode",
        "empty_cache",
        "set_device",
    ):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("max_memory_allocated", "memory_allocated", "current_device"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.device_count = lambda: 1
    cuda.get_device_name = lambda *_: "none"
    cuda.get_device_properties = lambda *_: SimpleNamespace(name="none", total_memory=0, major=0, minor=0)
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_: self  # type: ignore[method-assign,attr-defined]
