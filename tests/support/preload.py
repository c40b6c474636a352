"""What the fork server of the tests imports once for all processes, beside the tests themselves."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch
from support import interpreter

#: Frameworks, and the modules that a first training step with them imports.
FRAMEWORKS = {
    "torch": ("torch._dynamo",),
    "deepspeed": ("deepspeed.pipe", "deepspeed.moe.layer", "deepspeed.runtime.zero.muon.muon_optimizer"),
    "megatron": (
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
        "megatron.core.dist_checkpointing",
    ),
    "transformers": ("accelerate",),
}


def preload() -> None:
    """Import what the frameworks that are imported import late."""
    torch.set_num_threads(1)
    if "deepspeed" in sys.modules:
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sys.modules.keys() & FRAMEWORKS.keys():
            for module in FRAMEWORKS[name]:
                importlib.import_module(module)
    interpreter.spare()
    if "deepspeed" in sys.modules:
        _load_deepspeed_op()
    # DeepSpeed collects garbage by the dozen: that passes over what is imported here.
    gc.collect()
    gc.freeze()


def _load_deepspeed_op() -> None:
    """The operator that DeepSpeed compiles on first use, where there is a compiler."""
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if shutil.which("ninja") is None:
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with contextlib.suppress(Exception):
        ShareMemCommBuilder().load(verbose=False)
