"""ZeRO-3 with hpZ: the copy of the weights in each node stays, and gets thresholded or exact updates.

With ``zero_hpz_partition_size`` DeepSpeed keeps each parameter a second time, divided over the ranks of a
node (the secondary tensor), gathers it there in the backward pass, and drops it after every step: the next
forward pass gathers from all ranks. Here training passes gather inside the node alone. After a step the rank
that holds a slice in the owners' node sends what changed to the ranks that hold the slice in other nodes, and
every one of them, itself included, adds exactly what was sent. What was not sent stays the difference between
the owners' partitions and the copy.

DeepSpeed's own partitions are always exact, and so is whatever is gathered from them: evaluation,
``GatheredParameters``, checkpoints, persistent parameters. The copy is dropped, and gathered anew in full, in
warm-up, after a checkpoint, and after weights were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero import partition_parameters
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.passes import calls_of, remove
from dct_plugin.data_parallel.plan import Part, shards_in
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.errors import ConfigError
from dct_plugin.transport.nodes import KEY

from ..host.gathered_slice import GatheredSlice
from ..host.patching import Function, Patches, given
from .engine import EngineContext
from .path import GradientPath
from .weight_updates import WeightUpdates, swap

if TYPE_CHECKING:
    from dct_plugin.data_parallel.step_ahead.add_on import StepAhead

_KEY = "zero_optimization.zero_hpz_partition_size"
#: The attribute of parameters that ``GatheredParameters`` has gathered; of DeepSpeed 0.19.8.
_GATHERED = getattr(partition_parameters, "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR", "")


def layout_of_copies(ranks: int, size: int) -> list[list[int]]:
    """Return the ranks of each copy that DeepSpeed keeps: so many (``size``) consecutive ones."""
    return [list(range(first, first + size)) for first in range(0, ranks, size)]


def _check_nodes(engine: Any, reducer: GradientReducer) -> None:
    """Refuse nodes that are not the ranks of DeepSpeed's copies, and one copy for all ranks.

    Raises:
        ConfigError: Names the rank, both keys and the nodes.
    """
    group, asked = reducer.group, engine.zero_hpz_partition_size()
    ranks, nodes = group.group_size, group.nodes
    if asked < ranks and group.layout == layout_of_copies(ranks, asked):
        return
    found = "none" if nodes is None else ", ".join(str(list(node)) for node in nodes.ranks)
    raise ConfigError(
        f"rank {engine.global_rank}: {_KEY} = {asked} with dct.data_parallel.parameters: DeepSpeed keeps a "
        f"copy in each {asked} consecutive ranks of {ranks}, and the nodes are {found}; set it to the ranks "
        f"of one of several nodes, start ranks host by host, and leave {KEY} out, or leave parameters out"
    )


class HeldSlice(GatheredSlice):
    """This rank's slice of the copy of a parameter in its node; the shape is the whole parameter's.

    Args:
        name: Name of the parameter's stream.
        parameter: The parameter.
        layout: Positions in the data-parallel group of each node's ranks.
        position: This rank's position in its node.
    """

    def __init__(self, name: str, parameter: Any, layout: Sequence[Sequence[int]], position: int) -> None:
        super().__init__(parameter.ds_shape)
        self.name, self.parameter = name, parameter
        each = parameter.partition_numel()
        start, stop = (
            min(parameter.ds_numel, bound * each * len(layout)) for bound in (position, position + 1)
        )
        self.bounds: Part = (start, stop)
        """The entries of the parameter that the slice has, without padding."""
        self.shards = shards_in(start, stop - start, each * len(layout[0])) if start < stop else []
        """The parts of the slice that each node's ranks own."""
        self.copy: Tensor | None = None
        """The slice as all nodes have it, with padding."""

    @property
    def device(self) -> torch.device:
        return self.parameter.ds_tensor.device

    @property
    def requires_grad(self) -> bool:
        return bool(self.parameter.requires_grad)

    @property
    def _version(self) -> int:
        return 0 if self.copy is None else int(self.copy._version)

    @property
    def held(self) -> Tensor:
        assert self.copy is not None
        return self.copy

    @property
    def weights(self) -> Tensor:
        """The slice as all nodes have it, 1-D, without padding."""
        return self.held[: self.bounds[1] - self.bounds[0]]

    def show(self, memory: Tensor | None) -> None:
        """Let DeepSpeed gather from a slice, or, without one, from the owners' partitions."""
        self.parameter.ds_secondary_tensor = memory


class HpzCopies(WeightUpdates):
    """The copies of the weights in the nodes, which training passes gather from.

    Args:
        context: The engine.
        reducer: Sums its gradients, inside nodes first.
        parameters: ``(name of the stream, parameter)`` of all that are trained.

    Raises:
        ConfigError: DeepSpeed's copies are not one in each node.
    """

    def __init__(
        self, context: EngineContext, reducer: GradientReducer, parameters: Sequence[tuple[str, Any]]
    ) -> None:
        engine = context.engine
        _check_nodes(engine, reducer)
        assert reducer.group.node is not None
        self._module, self._optimizer, self._node = engine.module, engine.optimizer, reducer.group.node
        self.updates = ParameterUpdates.of_copies(context.config.data_parallel, reducer.group)
        self._layout = reducer.group.layout
        copied = [pair for pair in parameters if not pair[1].ds_persist and pair[1].ds_numel]
        copied.sort(key=lambda pair: -pair[1].ds_tensor.element_size())
        self.slices = [HeldSlice(name, each, self._layout, self._node.position) for name, each in copied]
        self._parameters = [parameter for _, parameter in parameters]
        self.ahead: StepAhead | None = None
        self._stepping = self._shown = self._stale = False
        self._found: list[bool] = []
        """For each forward pass that runs: whether copies were shown before it."""
        self._handles: list[Any] = []

    def look_ahead(self, path: GradientPath) -> StepAhead:
        """Let training passes gather displaced copies; owners' partitions are never displaced.

        Args:
            path: The path of the engine's gradients.

        Returns:
            What displaces and restores the copies.

        Raises:
            ConfigError: The step of the engine's optimizer is not known.
        """
        groups = [[parameter for _, parameter in group] for group in path.named_parameters()]
        units = units_of(path.optimizer, groups=groups)
        pairs: Any = [(each.name, each) for each in self.slices if each.shards]
        self.ahead = path.reducer.add_ons.step_ahead.prepare(
            pairs,
            lambda held: units(held.parameter),  # type: ignore[attr-defined]
            unit=1.0 / (path.scale * path.reducer.group.group_size),
            pending_of=self.updates.pending_of,
            held={each.name: each.bounds for each in self.slices},
        )
        return self.ahead

    def install(self, patches: Patches) -> None:
        patches.intercept(self._optimizer, "invalidate_secondary_tensor", self._invalidate)
        for parameter in self._parameters:
            patches.intercept(parameter, "partition", self._partition)
        self._handles = [calls_of(self._module).follow(self._before_pass, self._after_pass)]

    def close(self) -> None:
        remove(self._handles)
        self.gather()

    def before_step(self) -> None:
        if self.ahead is not None:
            self.ahead.restore()
        self._stepping = True

    def after_step(self) -> None:
        self._stepping = False

    def gather(self) -> None:
        """Drop the copies: the next pass gathers from the owners' partitions, which are exact."""
        if self._held:
            self._release()
            self._drop()

    def _drop(self) -> None:
        if self.ahead is not None:
            self.ahead.forget()
        self.updates.forget()
        for each in self.slices:
            each.copy = None
            each.show(None)
        self._shown = False

    @property
    def _held(self) -> bool:
        return bool(self.slices) and self.slices[0].copy is not None

    @property
    def _full(self) -> bool:
        """True if nothing is thresholded in this step."""
        if not self.slices:
            return True
        return not self.updates.exact and self.updates.full(self.slices[0].parameter.ds_tensor.dtype)

    # -- which weights passes gather ---

    def _before_pass(self, trains: bool) -> None:
        self._found.append(self._shown and not trains)
        if any(getattr(parameter, _GATHERED, 0) for parameter in self._parameters):
            return  # somebody has gathered weights for this pass
        if self._stale:
            self._release()
            self._stale = False
        if trains and not self._held and not self._full:
            self._fill()
        if self._held:
            self._show(trains)

    def _after_pass(self, _: bool) -> None:
        """Let a backward pass that comes gather what its forward pass gathered."""
        if self._found and self._found.pop() and self._held:
            self._show(True)

    def _show(self, trains: bool) -> None:
        """Let passes gather from the copies, displaced with step-ahead, or else exact weights."""
        if self.ahead is not None and not trains:
            self.ahead.restore()
        if trains != self._shown:
            self._release()
            for each in self.slices:
                each.show(each.copy if trains else None)
            self._shown = trains
        if self.ahead is not None and trains:
            self.ahead.displace()

    def _release(self) -> None:
        """Free what DeepSpeed has gathered so far."""
        if any(each.parameter.ds_status.name != "NOT_AVAILABLE" for each in self.slices):
            self._optimizer._partition_all_parameters()

    @torch.no_grad()
    def _fill(self) -> None:
        """Make the copies from the owners' partitions; a collective of all ranks."""
        self._release()
        for each in self.slices:
            parameter = each.parameter
            if parameter.ds_secondary_tensor is None:
                parameter.all_gather([parameter])
                parameter.partition([parameter])
            each.copy = parameter.ds_secondary_tensor
        self._shown = True

    def _partition(self, original: Function, *args: Any, **keywords: Any) -> Any:
        # Weights were written in GatheredParameters.
        if self._held and given(original, "has_been_updated", args, keywords):
            self._stale = True
            self._drop()
        return original(*args, **keywords)

    # -- updates ---

    def _invalidate(self, original: Function) -> None:
        """Update the copies where DeepSpeed drops its secondary tensors, after a step."""
        if not self._stepping or self._full:
            self.gather()
        elif self._held:
            self._update()
        self._shown = False
        original()

    @torch.no_grad()
    def _update(self) -> None:
        if self.ahead is not None:
            self.ahead.forget()
        masters = self._collect_masters()
        entries = [(each.name, each.weights, each.shards) for each in self.slices if each.shards]
        self.updates.update(entries, masters.__getitem__)

    def _collect_masters(self) -> dict[str, Tensor]:
        """Return the partitions of this rank's slices that ranks of this node own; a collective of these.
        With exact updates the slices take these weights, and what was there before is returned.
        """
        node, own = self._node, self._node.position
        parts = [each.parameter.ds_tensor.detach() for each in self.slices]
        # The positions of the node whose slices have the partitions of its ranks.
        holders = [rank // len(self._layout) for rank in self._layout[self.updates.group.rank]]
        outgoing = [parts if position == holders[own] else [] for position in range(node.size)]
        senders = [position for position, holder in enumerate(holders) if holder == own]
        like = [parts if position in senders else [] for position in range(node.size)]
        names = [each.name for each in self.slices]
        received = node.all_to_all_in_node("masters", outgoing, like, list(zip(names, parts, strict=True)))
        if own in senders:
            received[own] = parts
        masters = {}
        for index, each in enumerate(self.slices):
            shard = next((s for s in each.shards if s.owner == self.updates.group.rank), None)
            if shard is not None:
                whole = torch.cat([received[position][index] for position in senders])
                masters[each.name] = whole[: shard.stop - shard.start]
                if self.updates.exact:  # weights become new here, and are compared with those before
                    swap(each.weights[shard.start : shard.stop], masters[each.name])
        return masters
