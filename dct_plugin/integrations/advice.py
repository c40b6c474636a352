"""The part of ``dct advise`` in the ranks of the user's job: it measures dense steps, and writes figures.

The script is not changed. Every ``DistributedDataParallel`` gets the hook when it is made, every DeepSpeed
engine gets a section, Megatron's launch wrapper reads the section from a file, and FSDP's model is found in
the first forward pass.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dct_plugin.data_parallel.autotune.add_on import AutomaticSparsity
from dct_plugin.data_parallel.autotune.cost_model import CostModel
from dct_plugin.errors import ConfigError
from dct_plugin.policy import Training

from .host.measured_job import FACTS, SECTION, VARIABLE
from .host.patching import Function, Patches
from .host.settings import training_of

#: Optimizer steps after which a job of one rank is stopped.
_MOST_STEPS = 20
_steps = itertools.count()
#: Names of the script's communication hooks.
_left_out: list[str] = []


def observe() -> None:
    """Measure the training of this process from its first step on; at most once."""
    if AutomaticSparsity.observer is not None:
        return
    AutomaticSparsity.observer = staticmethod(_write)
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_note_optimizer)

    def search(model: torch.nn.Module, _: Any) -> None:
        if _compress_sharded(model):
            handle.remove()

    handle = register_module_forward_pre_hook(search)
    Patches().intercept(torch.nn.parallel.DistributedDataParallel, "__init__", _make_attached)


def _make_attached(original: Function, model: Any, *arguments: Any, **keywords: Any) -> None:
    original(model, *arguments, **keywords)
    from .ddp import DCTState

    DCTState(SECTION).register(model)
    # The script's own hook would be a second one; DDP refuses that.
    model.register_comm_hook = functools.partial(_leave_out, model)


def _leave_out(model: Any, state: object, hook: Callable[..., Any]) -> None:
    """Leave out a communication hook of the script; the plugin's own takes the place of the first one."""
    from .ddp import DCTState

    if isinstance(state, DCTState):
        torch.nn.parallel.DistributedDataParallel.register_comm_hook(model, state, hook)
    else:
        _left_out.append(getattr(hook, "__name__", type(hook).__name__))


def _compress_sharded(model: torch.nn.Module) -> bool:
    """Compress a model if FSDP shards it; return whether the search for one is over."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or FACTS["optimizer"]:
        return bool(FACTS["optimizer"])  # the first step is made: the job trains without FSDP
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    if not any(isinstance(module, kinds) for module in model.modules()):
        return False
    from .fsdp.compression import compress_replicas, is_compressed
    from .fsdp.parameter_groups import has_replicas, parameter_groups

    if not any(map(has_replicas, parameter_groups(model))):
        raise ConfigError(
            f"rank {dist.get_rank()}: dct advise: FSDP2 shards one copy of the model over all ranks (one "
            "mesh), and no gradients cross between replicas, which are what is measured. dct config suggest "
            "--one-mesh says what nothing written becomes; to have HSDP measured, pass fully_shard a mesh "
            "of two dimensions (nodes, ranks in a node)"
        )
    if not is_compressed(model):
        compress_replicas(model)
    return True


def _note_optimizer(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    if next(_steps) == _MOST_STEPS and not (dist.is_initialized() and dist.get_world_size() > 1):
        sys.exit("dct advise: the job trains on one rank, which sends nothing")
    training = training_of(optimizer, Training())
    FACTS.update(optimizer=list(training.optimizer), momentum=training.momentum, lr=training.lr)


def _write(model: CostModel) -> None:
    if dist.get_rank():
        return
    if FACTS["stage"] == 3:  # in the forward and in the backward pass
        model = model._replace(weight_gathers=2)
    figures = model._asdict() | {
        "codings": [[*setting[:2], *coding] for setting, coding in model.codings.items()],
        "link": list(model.link),
    }
    path = Path(os.environ[VARIABLE])
    part = path.with_suffix(".part")
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    content = {"facts": FACTS, "model": figures, "left_out": _left_out, "device": device}
    part.write_text(json.dumps(content), encoding="utf-8")
    part.replace(path)  # the command waits for the whole file
