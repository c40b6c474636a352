"""Residuals in the form of ``torch.distributed.checkpoint``: DTensors, which it spreads over another mesh.

What a checkpoint has under the name of the compression:

``residuals.NAME``
    fp32, the shape of the parameter with the number of replicas in front: each replica's residual.
``held_back.NAME``
    fp32, the shape of the parameter: what owners (two-phase exchange) have not sent of the replicas' sum.
``ranks.LABEL``
    Thresholds, second moments and the like of one rank, for a run that goes on with the same mesh.
``counters``
    Step, and the factor that the host had multiplied into the gradients.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.compression.feedback import unpacked
from dct_plugin.compression.stream import fresh_state
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.two_phase import TwoPhase
from dct_plugin.errors import ConfigError
from dct_plugin.transport import lost_ranks

from .parameter_groups import ShardedParameter
from .replica_group import ReplicaGroup

logger = logging.getLogger("dct_plugin")


def state_of(groups: Sequence[ReplicaGroup], step: int) -> dict[str, Any]:
    """Return what is saved; a collective of the replicas."""
    residuals, held_back, own = {}, {}, []
    for reducer in _reducers(groups):
        state = reducer.state_dict()
        streams = state["streams"]
        for group, parameter in _compressed(groups, reducer):
            residual = _saved_residual(streams, parameter.name, parameter.shape.numel())
            residuals[parameter.name] = _as_dtensor(group, parameter, residual, replicas=group.size())
            if len(reducer.topologies.all_reduce.phases) > 1:  # owners keep what they do not send back
                held_back[parameter.name] = _as_dtensor(
                    group, parameter, _held_back(group, parameter, streams)
                )
        kept = {name: {**s, "residual": s["residual"] is not None} for name, s in streams.items()}
        own.append({**state, "streams": kept})
    counters = {"step": step, "loss_scale": groups[0].reducer.loss_scale}
    return {
        "counters": json.dumps(counters),
        "residuals": residuals,
        "held_back": held_back,
        "ranks": {_label(groups): _to_bytes(own)},
    }


def restore(groups: Sequence[ReplicaGroup], state: dict[str, Any]) -> None:
    """Restore what :func:`state_of` returned, or what :func:`load` read from a checkpoint of another mesh."""
    counters = json.loads(state["counters"])
    own = state["ranks"].get(_label(groups))
    kept = None if own is None else _from_bytes(own)
    for number, reducer in enumerate(_reducers(groups)):
        residuals = {name: t.to_local() for name, t in state["residuals"].items()}
        held_back = {name: t.to_local() for name, t in state["held_back"].items()}
        restored = {**counters, "streams": {}} if kept is None else kept[number]
        streams = restored["streams"]
        for _, parameter in _compressed(groups, reducer):
            name, numel = parameter.name, parameter.shape.numel()
            if name not in residuals or numel < reducer.config.min_numel:
                continue
            own_residual = residuals[name]
            if kept is None:
                mean = own_residual.mean(0)
                if name in held_back:  # parts of the sum
                    mean += held_back[name] / len(own_residual)
                streams[name] = fresh_state(mean.reshape(-1).cpu())
                continue
            _put(streams, name, own_residual.reshape(-1))
            # The saved topology may be another one than that in use.
            for shard, stream in TwoPhase(reducer).owner_residuals(name, numel) if name in held_back else ():
                _put(streams, stream, held_back[name].reshape(-1)[shard.start : shard.stop])
        reducer.load_state_dict(restored)


def load(folder: str | os.PathLike[str], key: str, groups: Sequence[ReplicaGroup]) -> bool:
    """Restore the residuals of a checkpoint, whatever mesh it is of; see :meth:`.ReplicaCompression.load`."""
    import torch.distributed.checkpoint as dcp

    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if f"{key}.counters" not in saved:
        if dist.get_rank() == 0:
            logger.warning("dct: %s has no residuals under '%s'; they start from zero", folder, key)
        return False
    sizes = {name: tuple(each.size) for name, each in saved.items() if hasattr(each, "size")}
    same = f"{key}.ranks.{_label(groups)}" in saved
    state: dict[str, Any] = {"counters": "", "residuals": {}, "held_back": {}, "ranks": {}}
    if same:
        state["ranks"][_label(groups)] = b""
    for reducer in _reducers(groups):
        for group, parameter in _compressed(groups, reducer):
            shape, name = tuple(parameter.sharded.shape), parameter.name
            found = sizes.get(f"{key}.residuals.{name}")
            if found is None:
                continue
            if found[1:] != shape:
                raise ConfigError(
                    f"{folder}: the residual of {name} is of shape {found[1:]}, the model's parameter has "
                    f"{shape}"
                )
            local = torch.zeros(1 if same else found[0], *parameter.shape)
            state["residuals"][name] = _as_dtensor(
                group, parameter, local, replicas=found[0], all_replicas=not same
            )
            if f"{key}.held_back.{name}" in sizes:
                state["held_back"][name] = _as_dtensor(group, parameter, torch.zeros(parameter.shape))
    _report_rest(sizes, key, state)
    with lost_ranks.reported("load of residuals"):
        dcp.load({key: state}, storage_reader=dcp.FileSystemReader(folder))
    restore(groups, state)
    return True


def _report_rest(sizes: dict[str, Any], key: str, state: dict[str, Any]) -> None:
    prefix = f"{key}.residuals."
    rest = [
        n[len(prefix) :] for n in sizes if n.startswith(prefix) and n[len(prefix) :] not in state["residuals"]
    ]
    if rest and dist.get_rank() == 0:
        logger.warning(
            "dct: residuals of %d parameters are left, which this model does not have or now sends dense: %s",
            len(rest),
            ", ".join(rest[:5]),
        )


# -- which parameters, and their residuals ---


def _reducers(groups: Sequence[ReplicaGroup]) -> list[GradientReducer]:
    return list(dict.fromkeys(group.reducer for group in groups))


def _compressed(
    groups: Sequence[ReplicaGroup], reducer: GradientReducer
) -> Iterator[tuple[ReplicaGroup, ShardedParameter]]:
    """Yield the parameters that have residuals, the same on all ranks: a rank's last shard may be smaller."""
    if not reducer.config.feedback.keeps_residual:
        return
    for group in groups:
        if group.reducer is reducer:
            for each in group.parameters:
                if each.padded_numel >= reducer.config.min_numel:
                    yield group, each


def _saved_residual(streams: dict[str, Any], name: str, numel: int) -> Tensor:
    saved = streams[name]["residual"] if name in streams else None
    return torch.zeros(numel) if saved is None else unpacked(saved)


def _held_back(group: ReplicaGroup, parameter: ShardedParameter, streams: dict[str, Any]) -> Tensor:
    """Return what all owners of this rank's shard have not sent; a collective."""
    reducer, numel = group.reducer, parameter.shape.numel()
    total = torch.zeros(numel, device=reducer.device)
    if numel >= reducer.config.min_numel:
        for shard, stream in reducer.topologies.all_reduce.owner_residuals(parameter.name, numel):
            part = _saved_residual(streams, stream, shard.stop - shard.start)
            total[shard.start : shard.stop] = part.to(total.device)
        dist.all_reduce(total, group=group.replicas)
    return total


def _put(streams: dict[str, Any], name: str, residual: Tensor) -> None:
    if name in streams:
        streams[name]["residual"] = residual.cpu().clone() if streams[name]["residual"] else None


# -- as DTensors, as bytes ---


def _as_dtensor(
    group: ReplicaGroup,
    parameter: ShardedParameter,
    local: Tensor,
    *,
    replicas: int | None = None,
    all_replicas: bool = False,
) -> Any:
    """Return a tensor that is sharded like the parameter.

    Args:
        group: The parameter's group.
        parameter: The parameter.
        local: This rank's part.
        replicas: Number of replicas in front of the parameter's shape; None for none.
        all_replicas: Whether ``local`` holds those of all replicas.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    sharded = parameter.sharded
    mesh, placements = sharded.device_mesh, list(sharded.placements)
    shape = tuple(sharded.shape)
    held = [] if replicas is None else [replicas if all_replicas else 1]
    local = local.view(*held, *parameter.shape)  # of a rank without rows, too
    if replicas is not None:
        for i, placement in enumerate(placements):
            if isinstance(placement, _StridedShard):
                placements[i] = _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
            elif isinstance(placement, Shard):
                placements[i] = Shard(placement.dim + 1)
        shape = (replicas, *shape)
        if not all_replicas:
            placements[_replica_dimension(group, sharded)] = Shard(0)
    local = local.to(mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _replica_dimension(group: ReplicaGroup, sharded: Any) -> int:
    """Return the dimension of the parameter's mesh that counts the replicas."""
    ranks = dist.get_process_group_ranks(group.replicas)
    mesh = sharded.device_mesh
    for i, placement in enumerate(sharded.placements):
        if placement.is_replicate() and dist.get_process_group_ranks(mesh.get_group(i)) == ranks:
            return i
    raise ConfigError(f"the mesh {mesh} of FSDP's parameters has no dimension for the replicas {ranks}")


def _label(groups: Sequence[ReplicaGroup]) -> str:
    """Return the name of this rank's own state: of this rank in this mesh."""
    replicas = "_".join(str(reducer.world_size) for reducer in _reducers(groups))
    return f"rank_{dist.get_rank()}_of_{dist.get_world_size()}_in_{replicas}_replicas"


def _to_bytes(value: Any) -> bytes:
    # One object for torch.distributed.checkpoint, which would take a container apart.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=True)
