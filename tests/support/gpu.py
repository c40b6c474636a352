"""Several ranks on one GPU, over gloo or nccl. In a dry run (``benchmarks/no_gpu.py``) CPU and interpreter
stand for it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.no_gpu import DRY, stand_in

from .processes import run

stand_in()
#: The device of the tests; in a dry run by a name that is not that of the CPU, whose bits are expected.
DEVICE = "cpu:0" if DRY else "cuda"
NEEDS_GPU = pytest.mark.skipif(DRY, reason="nothing stands for the GPU here, or it takes too long")


def nccl_version() -> int:
    """Return the version of the nccl that is loaded, as 23004 for 2.30.4; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


#: nccl takes several ranks on one GPU from version 2.30 on.
NCCL = pytest.param(
    "nccl",
    marks=pytest.mark.skipif(
        nccl_version() < 23000, reason="needs nccl 2.30, which takes several ranks on one GPU"
    ),
)


def run_on_gpu(backend: str, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(rank, world_size, *arguments)`` in processes that share device 0; their results.

    Args:
        backend: ``gloo`` or ``nccl``, of the default process group.
    """
    return run(ranks, _on_device, backend, function, arguments, NCCL_MULTI_RANK_GPU_ENABLE="1")


def _on_device(rank: int, world_size: int, backend: str, function: Any, arguments: Any) -> Any:
    torch.cuda.set_device(0)
    os.environ["LOCAL_RANK"] = "0"
    if backend != "gloo":
        store = dist.PrefixStore(backend, dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        limit = timedelta(seconds=60)  # that of a test, whose ranks would be killed without a text
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size)
    return function(rank, world_size, *arguments)
