"""``compress_shards``: FSDP2 on one mesh, whose ranks shard one copy of the model.

torch lets a module have gathers and reduce-scatters of its own (``set_custom_all_gather``,
``set_custom_reduce_scatter``, torch 2.9). Gradients are summed inside the node in FSDP's type, and cross in
few bits, straight to the owner, who sums them in fp32 in the order of the nodes. Weights are gathered from
copies in the nodes (:mod:`..host.node_copies`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dct_plugin.codecs.values import VALUE_GROUP
from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.passes import calls_of
from dct_plugin.errors import ConfigError
from dct_plugin.metrics.summary import format_bytes
from dct_plugin.policy import Training
from dct_plugin.policy.memory import FROZEN, TRAINED, node_memory, replicas_in_words
from dct_plugin.transport.nodes import ranks_of_machines
from dct_plugin.transport.tcp_connect import time_limit

from ..host.attachment import PlainTraining
from ..host.gradient_use import parameters_of
from ..host.measured_job import VARIABLE
from ..host.node_copies import COPIES, Int8Copies, NodeCopies
from ..host.replica_checksums import ReplicaChecksums, not_trained
from ..host.startup import nodes_of
from .attachment import FSDPAttachment, Groups
from .parameter_groups import (
    ShardedParameter,
    late_module,
    parameter_groups,
    sharded_groups,
    unsharded_parameters,
)

_HALVES = (torch.bfloat16, torch.float16)


class ShardGroup:
    """One of FSDP's parameter groups; FSDP calls it in place of its reduce-scatter.

    Args:
        group: FSDP's parameter group.
        parameters: Its parameters.
        owner: The attachment.
        reducer: Sums over the ranks of the mesh.
    """

    def __init__(
        self,
        group: Any,
        parameters: Sequence[ShardedParameter],
        owner: ShardCompression,
        reducer: GradientReducer,
    ) -> None:
        self.fsdp, self.parameters, self.reducer = group, list(parameters), reducer
        self.replicas: dist.ProcessGroup = group.mesh_info.shard_process_group
        self.name = parameters[0].name
        self._owner = owner
        layout = reducer.group.layout or [[rank] for rank in range(reducer.group.group_size)]
        self._order = [rank for ranks in zip(*layout, strict=True) for rank in ranks]
        """The ranks, by position in their nodes, then by node: a position reduces what is adjoined."""
        self._place = self._order.index(reducer.group.group_rank)
        self._together: dict[tuple[str, ...], dict[str, list[int]]] = {}
        """What crosses together, by the names of the trained parameters."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the result of a collective, or its input, as torch's own does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` [n] with the sum, or what ``op`` says, of row ``rank`` of ``input_tensor``
        [ranks * n] over the ranks; a collective of all ranks.
        """
        output, table = output_tensor, input_tensor.view(group.size(), -1)
        scale = _factor(op, group.size())
        named = [each for each in self.parameters if each.sharded.requires_grad]
        numels = [each.padded_numel for each in named]
        if sum(numels) == output.numel():
            trained = tuple([each.name for each in named])
            if trained not in self._together:
                self._together[trained] = self._sent_together(named)
            parts = self._together[trained]
        else:  # some have no gradient, and FSDP does not say which
            numels, parts = [output.numel()], {f"{self.name} and others, {output.numel()} entries": [0]}
        self._owner._begin_exchange(self, named)
        columns, outputs, entries = table.split(numels, dim=1), output.split(numels), []
        for name, numbers in parts.items():
            n = sum(numels[at] for at in numbers)
            shards = [Shard(rank, i * n, (i + 1) * n) for i, rank in enumerate(self._order)]
            flat = torch.cat([columns[at][rank] for rank in self._order for at in numbers])
            entries.append((name, flat, shards))
        self.reducer.begin_scatter(entries, scale=scale).finish()
        for (_, flat, shards), numbers in zip(entries, parts.values(), strict=True):
            own = flat[slice(*shards[self._place][1:])].split([numels[at] for at in numbers])
            torch._foreach_copy_([outputs[at] for at in numbers], list(own))

    def _sent_together(self, named: Sequence[ShardedParameter]) -> dict[str, list[int]]:
        """Return the numbers of the parameters that cross as one tensor, with one header, by its name.

        Vectors (norms, biases) are sent dense. Matrices share a header if no scale is of two of them.
        """
        group = self.reducer.group
        most, least = group.backend.message_entries / group.world_size, group.settings.min_numel
        dense: list[int] = []
        together: list[list[int]] = []
        whole: list[int] = []
        size = 0
        for at, each in enumerate(named):
            n = each.padded_numel
            if each.sharded.dim() < 2 or n * group.group_size < least:
                dense.append(at)
            elif n % VALUE_GROUP:
                together.append([at])
            elif not whole or size + n > most:
                whole, size = [at], n
                together.append(whole)
            else:
                whole.append(at)
                size += n
        found = {", ".join(named[at].name for at in numbers): numbers for numbers in [dense, *together]}
        found.pop("", None)
        if dense:
            group.dense_names.add(next(iter(found)))
        return found


def _factor(operation: Any, ranks: int) -> float:
    """Return what an operation of a reduce-scatter multiplies the sum by.

    Raises:
        ConfigError: It is another one than a sum, an average, or a sum of what is multiplied before.
    """
    if operation == dist.ReduceOp.SUM:
        return 1.0
    if operation == dist.ReduceOp.AVG:
        return 1.0 / ranks
    state, kinds = operation.__getstate__(), dist.ReduceOp.RedOpType.__members__
    if not isinstance(state, tuple) or state[0] != kinds["PREMUL_SUM"]:  # which is equal to no other one
        raise ConfigError(
            f"rank {dist.get_rank()}: compress_shards: FSDP asks for {operation} of the gradients; sum, "
            "average, and a divide factor are supported"
        )
    return float(state[1])


class _AllGather:
    """The gather that FSDP calls in place of its own, from copies of the weights."""

    def __init__(self, group: ShardGroup, copies: NodeCopies) -> None:
        self._group, self.allocate = group, group.allocate
        self._copies, self._native = copies, group.fsdp._all_gather_comm
        self._parameters = copies.add(group.parameters)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if group.size() != self._group.reducer.group.group_size:  # reshard_after_forward is a number
            return self._native(output_tensor, input_tensor, group, async_op)
        self._copies.gather(self._group.name, [self._parameters], [output_tensor])
        return None


class ShardCompression(FSDPAttachment):
    """Few bits for the gradients, and copies in the nodes for the weights, of an FSDP2 model whose ranks
    shard one copy of it.

    Make it with :func:`compress_shards`. Arguments are those of :class:`.FSDPAttachment`; modules were passed
    to ``fully_shard`` with a mesh of one dimension.
    """

    framework = "FSDP2 on one mesh"
    hint = "its model was not passed to compress_shards, or it is far behind"
    call = "compress_shards"
    find_groups = staticmethod(sharded_groups)
    _with_gradients: bool | None = None
    """True if the last pass of the model had gradients; None before the first one."""

    def _decide(self, groups: Groups, training: Training) -> None:
        settings = self.config.data_parallel
        self._mesh: dist.ProcessGroup = groups[0][0].mesh_info.shard_process_group
        self._nodes = nodes_of(settings, self._mesh)
        types = [_gathered_type(group) for group, _ in groups]
        self._dtype = next((dtype for dtype in types if dtype in _HALVES), torch.float32)
        ranks = self._mesh.size()
        # On one machine each rank would hold all weights once more, without being asked.
        apart = settings.nodes == 1 or (self._nodes is None and len(self._machines()) == ranks)
        self._crosses = apart or self._nodes is not None
        training = replace(training, ranks=ranks).sharing_copy(
            in_halves=self._dtype in _HALVES, has_nodes=self._nodes is not None, is_apart=apart
        )
        self.training = training
        self.resolve(self._optimizers, training, self._nodes)
        if self.config.data_parallel.parameters == "exact" and self._dtype not in _HALVES:
            raise ConfigError(
                f"rank {dist.get_rank()}: dct.data_parallel.parameters = 'exact': FSDP gathers fp32, and "
                f"{training.exact_unavailable}; gather bf16, write 'int8', or leave it out"
            )

    @property
    def lines(self) -> list[str]:
        """The reasons of the settings, and whether replicas would fit into the nodes."""
        if not self._crosses:
            return super().lines
        parameters = list(self._model.parameters())
        needed = sum(p.numel() * (TRAINED if p.requires_grad else FROZEN) for p in parameters)
        inside = 1 if self._nodes is None else len(self._nodes.inside)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", inside))
        return [
            *super().lines,
            replicas_in_words(needed, node_memory(inside, local, parameters[0].device.type)),
        ]

    def _machines(self) -> Any:
        return ranks_of_machines(
            dist.get_process_group_ranks(self._mesh), limit=self.time_limit or time_limit(self._mesh)
        )

    def _connect_all(self, groups: Groups) -> None:
        names = [each.name for _, parameters in groups for each in parameters]
        known = {name for name, _ in unsharded_parameters(self._model)}
        reducer = self._make_reducer(
            self._mesh,
            self._nodes,
            groups[0][0].device,
            lambda: ((n, p.detach()) for n, p in unsharded_parameters(self._model) if p.requires_grad),
            lambda: not_trained(self._model, {*names, *known}),
        )
        if self._nodes is not None:
            self.make_process_groups(lambda: reducer.group, topic="fsdp", group=self._mesh)
        self.copies = None if self.config.data_parallel.parameters is None else self._make_copies(reducer)
        self.groups = [ShardGroup(group, parameters, self, reducer) for group, parameters in groups]
        for each in self.groups:
            module: Any = next(m for m in each.fsdp.modules if hasattr(m, "set_custom_all_gather"))
            self.ends.callback(module.set_custom_reduce_scatter, each.fsdp._reduce_scatter_comm)
            module.set_custom_reduce_scatter(each)
            is_copied = isinstance(self.copies, Int8Copies) or _gathered_type(each.fsdp) is self._dtype
            if self.copies is not None and is_copied:
                self.ends.callback(module.set_custom_all_gather, each.fsdp._all_gather_comm)
                module.set_custom_all_gather(_AllGather(each, self.copies))

    def _make_copies(self, reducer: GradientReducer) -> NodeCopies:
        settings = self.config.data_parallel
        copies = COPIES[settings.parameters](settings, reducer, self._dtype)
        group = copies.updates.group
        self.ends.callback(register_optimizer_step_post_hook(self._note_step).remove)
        rail = group.exchange.peers.group  # the first use makes it; a collective
        self.steps.replicas.append(ReplicaChecksums(settings, copies.weights, rail, agree=group.agree))
        return copies

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note a step of an optimizer of the model; a single rank may step an optimizer of something else."""
        own = {id(each.sharded) for each in self.parameters}
        if self.copies is not None and not own.isdisjoint(map(id, parameters_of(optimizer))):
            self.copies.note_change()

    def _saved_parts(self) -> Sequence[Any]:
        return [] if self.copies is None else [self.copies]

    def _change_passes(self) -> None:
        """Look for changed weights where passes turn to training or evaluation, and whether the first pass
        has read the copies.
        """
        if self.copies is not None:
            self.ends.callback(calls_of(self._model).follow(self._begin_pass, self._check_pass).remove)

    def _begin_pass(self, with_gradients: bool) -> None:
        # An average of the weights that was evaluated may have been replaced through ``parameter.data``,
        # which has a version of its own.
        if self.copies is not None and with_gradients is not self._with_gradients:
            self.copies.note_change()
        self._with_gradients = with_gradients

    def _check_pass(self, failed: bool) -> None:
        if not failed and self.copies is not None and not self.copies.gathers:
            raise ConfigError(
                f"rank {dist.get_rank()}: compress_shards: the weights were gathered without "
                "set_custom_all_gather (torch.compile with its own collectives?); set "
                "dct.data_parallel.enabled to false"
            )

    def _active(self, group: ShardGroup) -> str:
        known = {id(each.fsdp) for each in self.groups}
        for each in parameter_groups(self._model):
            if id(each) not in known:
                raise late_module(each, self.call)
        nodes = "every rank a node" if self._nodes is None else str(self._nodes)
        copies = "weights gathered by FSDP"
        if self.copies is not None:
            copies = f"a copy of the weights in each node, {format_bytes(self.copies.nbytes())} a rank"
        return (
            f"FSDP2, {group.reducer.group.group_size} ranks share one copy of the states, {nodes}, {copies}"
        )


def _gathered_type(group: Any) -> torch.dtype:
    """Return the type in which FSDP gathers a parameter group."""
    first = group.fsdp_params[0]
    dtype: torch.dtype = first.mp_policy.param_dtype or first.sharded_param.dtype
    return dtype


def compress_shards(
    model: nn.Module, config: DCTConfig | Mapping[str, Any] | None = None, **options: Any
) -> ShardCompression | PlainTraining:
    """Return a :class:`ShardCompression` with these arguments. If the section is switched off, there is
    one rank, or ``dct advise`` measures the job, the model stays as it is.
    """
    if VARIABLE in os.environ:
        return PlainTraining(config, "dct advise measures the job")
    if all(group.mesh_info.shard_process_group.size() == 1 for group in parameter_groups(model)):
        return PlainTraining(config, "the mesh has one rank")
    return ShardCompression.made(model, config, **options)
