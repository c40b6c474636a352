"""Residuals in the form of ``torch.distributed.checkpoint``: DTensors, which it spreads over another mesh.

What a checkpoint has under the name of the compression:

``residuals.NAME``
    fp32, a DTensor like the parameter: the mean of the replicas' residuals, for a run with another mesh.
``states.LABEL``
    The reducers' states of one rank, for a run that goes on with the same mesh.
``counters``
    Step, and the factor that the host had multiplied into the gradients.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.checkpoint import mean_residuals
from dct_plugin.compression.stream import fresh_state
from dct_plugin.console import listed, logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.errors import ConfigError
from dct_plugin.transport import lost_ranks

from .parameter_groups import ShardedParameter


def state_of(groups: Sequence[Any], step: int, others: Sequence[Any] = ()) -> dict[str, Any]:
    """Return what is saved, also of ``others`` that have a ``state_dict``; a collective of the replicas."""
    residuals, states = {}, []
    for reducer, replicas in _reducers(groups).items():
        states.append(reducer.state_dict())
        parameters = _compressed(groups, reducer)
        sizes = {name: each.shape.numel() for name, each in parameters.items()}
        for name, mean in mean_residuals(states[-1], sizes, replicas).items():
            residuals[name] = as_dtensor(parameters[name], mean)
    states += [each.state_dict() for each in others]
    buffer = io.BytesIO()  # one object for torch.distributed.checkpoint, which would take a container apart
    torch.save(states, buffer)
    return {
        "counters": json.dumps({"step": step, "loss_scale": groups[0].reducer.group.loss_scale}),
        "residuals": residuals,
        "states": {_label(groups): buffer.getvalue()},
    }


def restore(groups: Sequence[Any], state: dict[str, Any], others: Sequence[Any] = ()) -> None:
    """Restore what :func:`state_of` returned, or what :func:`load` read from a checkpoint of another mesh."""
    own = state["states"].get(_label(groups))
    if own is not None:
        states = torch.load(io.BytesIO(own), weights_only=True)
        # Copies of the weights come last. They may have been switched on or off since the save.
        for each, saved in zip([*_reducers(groups), *others], states, strict=False):
            each.load_state_dict(saved)
        return
    counters, residuals = json.loads(state["counters"]), state["residuals"]
    for reducer in _reducers(groups):
        streams = {
            name: fresh_state(residuals[name].to_local().reshape(-1).cpu())
            for name, each in _compressed(groups, reducer).items()
            if name in residuals and each.shape.numel() >= reducer.config.min_numel
        }
        reducer.load_state_dict({**counters, "streams": streams})


def load(folder: str | os.PathLike[str], key: str, groups: Sequence[Any], others: Sequence[Any] = ()) -> bool:
    """Restore the residuals of a checkpoint, whatever mesh it is of; see :meth:`.ReplicaCompression.load`."""
    import torch.distributed.checkpoint as dcp

    saved: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if f"{key}.counters" not in saved:
        if dist.get_rank() == 0:
            logger.warning("dct: %s has no residuals under '%s'; they start from zero", folder, key)
        return False
    prefix, label = f"{key}.residuals.", _label(groups)
    sizes = {name[len(prefix) :]: each.size for name, each in saved.items() if name.startswith(prefix)}
    residuals = {}
    for reducer in _reducers(groups):
        for name, each in _compressed(groups, reducer).items():
            if name not in sizes:
                continue
            if sizes[name] != each.sharded.shape:
                raise ConfigError(
                    f"{folder}: the residual of {name} is of shape {tuple(sizes[name])}, the model's "
                    f"parameter has {tuple(each.sharded.shape)}"
                )
            residuals[name] = as_dtensor(each, torch.zeros(each.shape, dtype=torch.float32, device="cpu"))
    rest = [name for name in sizes if name not in residuals]
    if rest and dist.get_rank() == 0:
        why = "which this model does not have or now sends dense"
        logger.warning(f"dct: residuals of {len(rest)} parameters are left, {why}: {listed(rest)}")
    states = {label: b""} if f"{key}.states.{label}" in saved else {}
    state = {"counters": "", "residuals": residuals, "states": states}
    with lost_ranks.reported("load of residuals"):
        dcp.load({key: state}, storage_reader=dcp.FileSystemReader(folder))
    restore(groups, state, others)
    return True


def _reducers(groups: Sequence[Any]) -> dict[GradientReducer, dist.ProcessGroup]:
    """Return the reducers with their replicas."""
    return {group.reducer: group.replicas for group in groups}


def _compressed(groups: Sequence[Any], reducer: GradientReducer) -> dict[str, ShardedParameter]:
    """Return the parameters that have residuals, on all ranks the same: the last shard may be smaller."""
    if not reducer.config.feedback.keeps_residual:
        return {}
    own = (each for group in groups if group.reducer is reducer for each in group.parameters)
    return {each.name: each for each in own if each.padded_numel >= reducer.config.min_numel}


def as_dtensor(parameter: ShardedParameter, local: Tensor) -> Any:
    """Return a tensor that is sharded like the parameter, of this rank's part."""
    from torch.distributed.tensor import DTensor

    sharded = parameter.sharded
    return DTensor.from_local(
        local.view(parameter.shape).to(sharded.device_mesh.device_type),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def _label(groups: Sequence[Any]) -> str:
    """Return the name of this rank's own state: of this rank in this mesh."""
    replicas = "_".join(str(reducer.group.world_size) for reducer in _reducers(groups))
    return f"rank_{dist.get_rank()}_of_{dist.get_world_size()}_in_{replicas}_replicas"
