"""One call for every framework that has no configuration file: :func:`attach`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from numbers import Real
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dct_plugin.config import DCTConfig
from dct_plugin.errors import ConfigError

from .ddp import DCTState
from .fsdp import compress_replicas, compress_shards
from .fsdp.parameter_groups import has_replicas, parameter_groups
from .host.attachment import PlainTraining, attached_to, switched_off, take_off
from .host.measured_job import VARIABLE
from .host.optimizer_attachment import OptimizerAttachment
from .host.settings import optimizers_of

#: The result of :func:`attach`, alike for every framework.
Attachment = OptimizerAttachment | PlainTraining


def attach(
    model: torch.nn.Module,
    optimizer: Any,
    section: DCTConfig | Mapping[str, Any] | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    total_steps: int | None = None,
) -> Attachment:
    """Compress the gradients of a wrapped model; call it on every rank, between two steps.

    A second call, for the same model or a wrapper around the same modules, removes the hooks of the first.
    Residuals then start at zero. A call that fails leaves nothing behind.

    Args:
        model: A ``DistributedDataParallel``, or the result of ``fully_shard`` for a mesh of two dimensions
            (:func:`.fsdp.compress_replicas`) or one (:func:`.fsdp.compress_shards`).
        optimizer: The optimizer of its parameters, a wrapper such as Accelerate's, or a list of optimizers.
        section: The keys of the ``dct`` section; without it the settings that suit the optimizer and the
            ranks.
        scaler: The gradient scaler, in fp16.
        total_steps: Optimizer steps of the run, if known: the dense start becomes a share of it.

    Returns:
        The attachment, with ``config`` as it is applied, ``metrics``, ``detach``, ``state_dict``,
        ``load_state_dict``, and the collectives ``save(folder)`` and ``load(folder)``. If there is one
        process, or ``"enabled"`` is false, nothing is attached, and its methods do nothing.

    Raises:
        ConfigError: The section, the optimizer or the number of steps is wrong, or ``model`` is not wrapped.
    """
    optimizers_of(optimizer, "dct_plugin.attach")
    if total_steps is not None and not (isinstance(total_steps, Real) and 0 <= total_steps < math.inf):
        raise ConfigError(
            f"dct_plugin.attach: total_steps = {total_steps!r}: must be the number of optimizer steps of the "
            "run, or None if that is not known"
        )
    config = DCTConfig.given(section)
    model = getattr(model, "_forward_module", model)  # of Lightning's Fabric
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    measured = attached_to(getattr(model, "module", model)) if VARIABLE in os.environ else None
    if isinstance(measured, OptimizerAttachment):  # by `dct advise`, when the model was wrapped
        return measured
    if reason := switched_off(config):
        take_off(model)
        return PlainTraining(config, reason)
    if isinstance(model, DistributedDataParallel):
        state = DCTState(config, optimizer=optimizer, scaler=scaler, total_steps=total_steps)
        return state.register(model)
    if isinstance(model, FSDPModule):  # a class beside that of the model
        module = cast(torch.nn.Module, model)
        compress = compress_replicas if any(map(has_replicas, parameter_groups(module))) else compress_shards
        return compress(module, config, optimizer=optimizer, scaler=scaler, total_steps=total_steps)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return PlainTraining(config, "the training has one process")
    raise ConfigError(f"dct_plugin.attach: {_what_instead(model)}")


def detach(attached: Any) -> None:
    """Let the host exchange gradients again; call it on every rank, between two steps.

    The next step sends all residuals. Then all hooks are removed from the model and its optimizer, and rank 0
    prints the summary.

    Args:
        attached: The result of :func:`attach`, an engine of DeepSpeed, or its ``engine.dct``. Megatron has
            ``dct_plugin.integrations.megatron.detach()``.

    Raises:
        ConfigError: Nothing is attached to it.
    """
    found = vars(attached).get("dct") if isinstance(attached, torch.nn.Module) else attached
    if found is None or not hasattr(found, "detach"):
        raise ConfigError(
            f"dct_plugin.detach: nothing is attached to this {type(attached).__name__}; it takes what "
            'dct_plugin.attach returned, or an engine of DeepSpeed whose JSON has a "dct" section'
        )
    found.detach()


def _what_instead(model: Any) -> str:
    """Return why a model cannot be attached to, and what can."""
    kinds = {cls.__name__: cls.__module__ for cls in type(model).__mro__}
    if "FullyShardedDataParallel" in kinds:
        return (
            "FullyShardedDataParallel (FSDP1) reduces gradients itself, and takes no hook that sees which "
            "parameter they belong to; use fully_shard (FSDP2) or DistributedDataParallel"
        )
    if kinds.get("DDP", "").endswith("_composable.replicate"):
        return (
            "replicate() makes its DistributedDataParallel in the first forward pass, of parameters without "
            "names; call this with DistributedDataParallel(model) instead"
        )
    if "DeepSpeedEngine" in kinds:
        return 'a DeepSpeed engine needs no call: give its JSON a "dct" section'
    return (
        f"{type(model).__name__} is not wrapped, so nothing reduces its gradients; call it with "
        "DistributedDataParallel(model), or after the framework has wrapped the model"
    )
