"""Imports in the fork server, once for all processes, what tests do not import but need."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch

from support import interpreter

#: Packages, and the modules that a first training step with them imports, also those of the plugin.
LATE = {
    "torch": (
        "encodings.idna",  # of host names
        "torch._dynamo",
        "torch.profiler._cupti_monitor",
        "torch.utils.serialization",
    ),
    "dct_plugin": (
        "dct_plugin.kernels.cpu",
        "dct_plugin.data_parallel.nodes.sums",
        "dct_plugin.integrations.attach",
        "dct_plugin.integrations.ddp",
        "dct_plugin.integrations.host.activation_streams",
    ),
    "triton": ("triton.experimental.gluon", "triton.language.extra.libdevice"),
    "deepspeed": (
        "deepspeed.pipe",
        "deepspeed.moe.layer",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "dct_plugin.integrations.deepspeed.attachment",
    ),
    "megatron": (
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
        "megatron.core.dist_checkpointing.strategies.torch",
        "dct_plugin.integrations.megatron.checkpoint",
        *(
            f"dct_plugin.integrations.megatron.{name}"
            for name in ("hooks", "parameters", "pipeline", "reductions", "step_ahead", "tensor")
        ),
    ),
    "transformers": ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama"),
}


def preload() -> None:
    """Import what the packages that are imported need later."""
    torch.set_num_threads(1)
    if "deepspeed" in sys.modules:
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sys.modules.keys() & LATE.keys():
            for module in LATE[name]:
                with contextlib.suppress(ImportError):  # of other releases
                    importlib.import_module(module)
    interpreter.spare()
    if "deepspeed" in sys.modules:
        _load_deepspeed_op()
    # DeepSpeed collects garbage by the dozen: that passes over what is imported here.
    gc.collect()
    gc.freeze()
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Gather this process's memory into huge pages, so that a fork copies page tables of a few entries. Where
    the kernel does not do that (before Linux 6.1) nothing changes.
    """
    size, collapse = 1 << 21, 25  # MADV_COLLAPSE
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        bounds, mode, _, _, _, *name = line.split()
        if mode == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(each, 16) for each in bounds.split("-"))
            begin, end = -(-begin // size) * size, end // size * size
            if begin < end:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), collapse)


def _load_deepspeed_op() -> None:
    """Load the operator that DeepSpeed compiles on first use, and look for those that could be compiled."""
    import deepspeed
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if shutil.which("ninja") is None:
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with contextlib.suppress(Exception):
        ShareMemCommBuilder().load(verbose=False)
        deepspeed.ops.__compatible_ops__  # noqa: B018 - asks the compiler when it is first read
