"""What the fork server of the tests imports once for all processes: the modules named in DCT_TEST_PRELOAD."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
import warnings
from pathlib import Path

from support import interpreter

PREFIXES = ("dct_plugin", "torch.distributed.")
#: Frameworks, and the modules that a first training step with them imports.
FRAMEWORKS = {
    "torch": ("torch._dynamo",),
    "hypothesis": (),
    "deepspeed": ("deepspeed.pipe", "deepspeed.moe.layer", "deepspeed.runtime.zero.muon.muon_optimizer"),
    "megatron": (
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
        "megatron.core.dist_checkpointing",
    ),
    "transformers": ("accelerate",),
}


def preload(names: list[str]) -> None:
    """Import the modules, and those that frameworks among them import late."""
    import pytest  # noqa: F401
    import torch.distributed
    import torch.multiprocessing

    torch.set_num_threads(1)
    if "deepspeed" in names:
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            for module in (name, *FRAMEWORKS.get(name, ())):
                importlib.import_module(module)
    interpreter.spare()
    if "deepspeed" in names:
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


if "DCT_TEST_PRELOAD" in os.environ:
    preload(os.environ.pop("DCT_TEST_PRELOAD").split())
