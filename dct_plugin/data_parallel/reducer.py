"""The reducer: gradients of a data-parallel group, summed through compressed messages.

A reducer has topologies (which rank sends what to whom: :mod:`.topologies`), a transport (:mod:`.pipelined`,
or :mod:`.fixed_size` where sizes stay on a device) and add-ons (:mod:`.add_ons`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from .. import checkpoint
from ..config import DataParallelConfig
from ..errors import ConfigError, DCTError
from ..metrics import Record
from ..stream import Compressor
from .add_on import AddOn, ReducerContext
from .add_ons import add_ons_of
from .dense_sums import DenseSums
from .fixed_size import FixedSizeReductions
from .node_chunks import NodeChunks
from .pipelined import PipelinedExchange
from .plan import PlannedTensor, ReductionPlan, Shard
from .stream_group import GroupOptions, Ranks, Sparsity, StreamGroup
from .topologies import Topologies
from .topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AddOn = TypeVar("_AddOn", bound=AddOn)
_Entries = Sequence[tuple[str, Tensor]]

#: Bytes of tensors below ``min_numel`` in a bucket that are worth two exchanges of their own.
SMALL_APART = 4096


class GradientReducer(StreamGroup):
    """Sum of gradients over a data-parallel group by compressed messages.

    Every method that takes entries is a collective: all ranks of the group call it in the same order with
    tensors of the same names and sizes; a rank that is out of step or fails makes the others raise
    :class:`~dct_plugin.errors.DesyncError`.

    Args:
        config: The ``data_parallel`` settings.
        ranks: Process group (gloo or nccl), None for the default one; or other kinds of peers; or nodes,
            whose ranks are summed densely before.
        transactional: Keep a second residual to undo skipped steps, as fp16 loss scaling and
            ``nonfinite_action: "skip"`` need.
        loss_scale: Factor that the host multiplies into the gradients.
        optimizer: The optimizer of the gradients (``param_groups``), whose learning rates add-ons may follow.
        options: ``metrics``, which records bytes, density and times; ``device`` of the gradients;
            ``kernels``, the defaults when None; ``step``, optimizer steps so far, for a reducer that is made
            while the training runs.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        ranks: Ranks = None,
        *,
        transactional: bool = False,
        loss_scale: float = 1.0,
        optimizer: Any = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        transactional = transactional or config.nonfinite_action == "skip"
        super().__init__(config, ranks, transactional=transactional, **options)
        self.config, self.loss_scale = self.settings, loss_scale
        self.deferred = False
        """True if the host calls :meth:`finish` before it uses what was reduced. The reducer then waits for a
        device there, not in every reduction.
        """
        self.flushed = False
        """True if a step has brought all that residuals held, after :meth:`flush`."""
        self._flushes = False
        self.earlier: dict[str, Tensor] = {}
        """By name, the sum (1-D) of this step's earlier gradients, where the host adds a pass to what was
        reduced before and reduces both. Add-ons see the gradients of the pass alone.
        """
        self.topologies = Topologies(self)
        self._dense = DenseSums(self, self.config.dense_steps)
        self._fixed_size = (
            FixedSizeReductions(self, "gradient", self.after_reduce) if self.fixed_size else None
        )
        self.add_ons = add_ons_of(ReducerContext(self, self.config, self.topologies, optimizer))
        self._dense.add_ons = self.add_ons

    def add_on(self, kind: type[_AddOn]) -> _AddOn:
        """Return the add-on of a kind.

        Raises:
            ConfigError: The configuration does not ask for it.
        """
        found = next((each for each in self.add_ons if isinstance(each, kind)), None)
        if found is None:
            raise ConfigError(kind.missing.format(feedback=self.config.feedback.label()))
        return found

    # -- collectives ---

    def all_reduce(self, entries: Sequence[tuple[str, Tensor]], *, scale: float = 1.0) -> None:
        """Replace every tensor by ``scale`` times its thresholded sum over the ranks, bitwise the same on
        all.

        Args:
            entries: ``(name, tensor)``; 1-D contiguous tensors of a floating-point type, changed in place. An
                entry that is not finite anywhere comes back as NaN on every rank.
            scale: For an average, one over the world size.

        Raises:
            DesyncError: A rank failed or reduces other tensors.
            PayloadError: A message arrived damaged.
        """
        self.begin(entries, scale=scale).finish()

    def begin(self, entries: Sequence[tuple[str, Tensor]], *, scale: float = 1.0) -> Reduction:
        """Begin an :meth:`all_reduce` of tensors that get their gradients one after the other; one at a
        time.
        """
        return Reduction(self, entries, scale)

    def reduce_scatter(
        self, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]], *, scale: float = 1.0
    ) -> None:
        """Give every owner ``scale`` times the thresholded sum of its shards (ZeRO-1/2).

        Args:
            entries: ``(name, tensor, shards)``; the shards cover the 1-D contiguous tensor once. The owner's
                shards are changed in place; the rest of the tensor is left unspecified.
            scale: For an average, one over the world size.

        Raises:
            DesyncError: A rank failed or reduces other tensors.
            PayloadError: A message arrived damaged.
            ValueError: The shards of a tensor do not cover it.
        """
        scatter, self.topologies.sums_at_owners = self.topologies.scatter, True
        with self.recorded("gradient") as whole:
            gradients, shards = scatter.enter(
                [(name, tensor) for name, tensor, _ in entries], [shards for *_, shards in entries], whole
            )
            with scatter.entered():
                self.observe(gradients)
                if not self.reduce_dense(gradients, scale, whole):
                    self.reduce(scatter, self.plan(scatter, gradients, scale, shards), whole)
        if not self.deferred or self.node is not None:
            self.finish()

    def finish(self) -> None:
        """Wait for all reductions, whatever :attr:`deferred` says; a collective.

        Raises:
            DesyncError, PayloadError: See :meth:`all_reduce`.
        """
        if self._fixed_size is not None:
            self._fixed_size.finish()
        self.topologies.everywhere.leave()
        self.topologies.scatter.leave()

    def replace_result(self, name: str, tensor: Tensor) -> None:
        """Note that the host copied a tensor that was reduced since the last :meth:`finish`, and uses the
        copy ``tensor``. If a message did not fit its slot, :meth:`finish` corrects the copy.
        """
        if self._fixed_size is not None:
            self._fixed_size.replace_result(name, tensor)

    def flush(self) -> None:
        """Send all gradients and residuals from the next step on, before the host continues without this
        reducer; call it on every rank.
        """
        self._flushes = True
        if not self.fixed_size:  # slots are laid out for one type of values
            self.set_value_dtype("fp32")

    def observe(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        """Show gradients to the add-ons before they are reduced, also those that the host reduces by itself.

        Raises:
            ConfigError: The host has not said what an add-on needs to know.
        """
        if self.earlier and self.add_ons:
            entries = [(name, self._of_this_pass(name, tensor)) for name, tensor in entries]
        for add_on in self.add_ons:
            add_on.observe(entries)

    def _of_this_pass(self, name: str, tensor: Tensor) -> Tensor:
        """Return a gradient, or this rank's part of the node's, without those of earlier passes."""
        if (earlier := self.earlier.get(name)) is None:
            return tensor
        if self.node is not None and tensor.numel() < earlier.numel():
            earlier = earlier[slice(*self.node.part(name, earlier.numel()))]
        return tensor - earlier  # the ranks of a node have the same, and so its mean has

    # -- the steps of a reduction ---

    @property
    def in_parts(self) -> bool:
        """True if tensors can leave one after the other, since nothing takes all of them at once."""
        at_once = self.fixed_size or self._dense.active
        return not (at_once or any(each.exchanges for each in self.add_ons))

    @property
    def in_chunks(self) -> bool:
        """True if the ranks of a node sum tensors chunk by chunk, and give each other messages."""
        return not (self.node is None or self.fixed_size or self._dense.active)

    def sparsity(self, name: str) -> Sparsity:
        """Return the sparsity of a tensor in this step."""
        if self._flushes:
            return Sparsity(1.0)
        sparsity = super().sparsity(name)
        for add_on in reversed(self.add_ons):
            sparsity = add_on.sparsity(name, sparsity)
        return sparsity

    def plan(
        self,
        topology: Topology,
        entries: _Entries,
        scale: float,
        shards: Sequence[Sequence[Shard]] | None = None,
    ) -> ReductionPlan:
        """Return the plan of an :meth:`all_reduce`, or of a :meth:`reduce_scatter` of ``shards``."""
        with self.exchange.preparing():
            tensors = []
            for index, (name, tensor) in enumerate(entries):
                small = self.is_small(name, tensor.numel())
                parts = (
                    topology.shards(name, tensor.numel(), small=small) if shards is None else shards[index]
                )
                tensors.append(PlannedTensor(name, tensor, list(parts), small))
            large = [each.name for each in tensors if not each.small]
            compared = [name for add_on in self.add_ons for name in add_on.compared(large)]
            return ReductionPlan(
                topology.name,
                tensors,
                scale * self.ranks_inside,
                compared,
                topology.sums_everywhere,
                self.fixed_size,
            )

    def pipelined(
        self, topology: Topology, plan: ReductionPlan, whole: Record, inside: NodeChunks | None = None
    ) -> PipelinedExchange:
        """Return an exchange of the plan in chunks, or in those of the node."""
        with self.exchange.preparing():
            chunks = (
                plan.chunks(lambda tensor: self.sparsity(tensor.name).density)
                if inside is None
                else inside.own
            )
        remember = None if self._fixed_size is None else self._fixed_size.remember
        return PipelinedExchange(self, topology.phases, chunks, whole, remember, inside)

    def reduce(
        self, topology: Topology, plan: ReductionPlan, whole: Record, inside: NodeChunks | None = None
    ) -> None:
        """Reduce the tensors of a plan, or queue that."""
        fixed_size = self._fixed_size
        if fixed_size is not None:
            fixed_size.finish_before(plan)
        for add_on in self.add_ons:
            add_on.before_reduce(plan, whole)
        if fixed_size is not None and fixed_size.knows(topology.phases, plan):
            fixed_size.start(topology.phases, plan, whole)
        else:
            self.pipelined(topology, plan, whole, inside).finish()
            self.after_reduce(plan)

    def reduce_dense(self, entries: Sequence[tuple[str, Tensor]], scale: float, whole: Record) -> bool:
        """Sum tensors as the host framework would, if this step is dense; return whether it is."""
        if self._dense.active:
            plan = ReductionPlan(
                "dense",
                [PlannedTensor(n, t, [Shard(0, 0, t.numel())], False) for n, t in entries],
                scale * self.ranks_inside,
                fixed_size=self.fixed_size,
            )
            self._dense.reduce(plan, whole)
        return self._dense.active

    def after_reduce(self, plan: ReductionPlan) -> None:
        """Show reduced gradients to the add-ons."""
        for add_on in self.add_ons:
            add_on.after_reduce(plan)

    # -- steps ---

    def end_step(
        self, *, skipped: bool = False, loss_scale: float | None = None, reduced_at: float | None = None
    ) -> None:
        """Close an optimizer step; warm-up counts it, also a skipped one.

        Args:
            skipped: The optimizer did not use the gradients reduced since the last step: residuals and
                thresholds are restored bitwise. Without ``transactional`` they are not, and the entries that
                were sent in the step are lost.
            loss_scale: The coming gradients are multiplied by it; residuals and thresholds follow (exact for
                powers of 2). None: as before.
            reduced_at: Loss scale of the gradients reduced in this step, for hosts that learn it only now.
        """
        self.finish()
        self._dense.end_step(skipped=skipped)
        self.flushed |= self._flushes and not skipped
        if self.metrics is not None:
            self.metrics.starting = self.schedule.starting(self.step)
        if reduced_at is not None:
            self.loss_scale = reduced_at
        self._close(skipped=skipped)
        if loss_scale is not None:
            self.rescale(loss_scale)
        self.step += 1

    def reject_step(self) -> None:
        """Close a step that the optimizer never made: it is not counted, and residuals are restored as in a
        skipped step.
        """
        self.finish()
        self._dense.end_step(skipped=True)
        self._close(skipped=True)

    def rescale(self, loss_scale: float) -> None:
        """Note between two steps that the coming gradients are multiplied by ``loss_scale``. Residuals and
        thresholds follow where they lie (exact for powers of 2).
        """
        ratio, self.loss_scale = loss_scale / self.loss_scale, loss_scale
        if ratio != 1.0:
            self.loaded = dict(checkpoint.in_unit({"streams": self.loaded}, ratio)["streams"])
            for each in self._kept():
                each.rescale(ratio)

    def _kept(self) -> list[Compressor | AddOn]:
        return [*self.streams.values(), *self.add_ons]  # a list, since add-ons may change streams

    def _close(self, *, skipped: bool) -> None:
        self.earlier.clear()
        for each in self._kept():
            each.end_step(skipped=skipped and self._transactional)
        if skipped and self.config.nonfinite_action == "skip":
            self.nonfinite_reported = False  # the next one may be another rank's and parameter's

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters of this rank (each rank has its own)."""
        add_ons = {each.key: each.state_dict() for each in self.add_ons if each.key}
        state = {"step": self.step, "loss_scale": self.loss_scale, "streams": self.streams_state(), **add_ons}
        if self.node is not None:
            state |= {"layout": self.layout, "parts": self.node.state_dict(state["streams"])}
        return state

    def load_state_dict(self, state: dict[str, Any], *, loss_scale: float | None = None) -> None:
        """Restore :meth:`state_dict`; streams get their state when they are next used, unknown ones start
        afresh.

        Args:
            state: That of this rank.
            loss_scale: That of the coming gradients; None: the saved one.

        Raises:
            DCTError: The state is that of other nodes.
        """
        if state.get("parts") and state["layout"] != self.layout:
            raise DCTError(
                f"rank {dist.get_rank()}: the state was saved with the nodes {state['layout']}, they are "
                f"{self.layout or 'none'} now; save and load files, which spread the residuals anew"
            )
        self.finish()
        self._dense.forget()
        scale = state["loss_scale"] if loss_scale is None else loss_scale
        self.step, self.loss_scale = state["step"], scale
        state = checkpoint.in_unit(state, scale / state["loss_scale"])
        self.streams.clear()
        self.loaded = dict(state["streams"])
        if self.node is not None:
            self.loaded = self.node.own_parts(self.loaded, state.get("parts"))
        for each in self.add_ons:
            if each.key:
                saved = each.in_unit(state.get(each.key), state.get("ratio", 1.0))
                each.load_state_dict(saved, step=self.step)


def _by_topology(reducer: GradientReducer, entries: _Entries) -> list[tuple[Topology, _Entries]]:
    """Divide the entries of an all-reduce, in order, into those that are exchanged together.

    The direct topology would send a tensor below ``min_numel`` whole to every rank. With more than two ranks
    fewer bytes cross when an owner sums it: those of a ring.
    """
    small = [each for each in entries if reducer.is_small(each[0], each[1].numel())]
    nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in small)
    topologies = reducer.topologies
    if topologies.small is None or nbytes < SMALL_APART:
        return [(topologies.everywhere, entries)]
    large = [each for each in entries if not reducer.is_small(each[0], each[1].numel())]
    parts: list[tuple[Topology, _Entries]] = [(topologies.everywhere, large), (topologies.small, small)]
    return parts if large else parts[1:]


class Reduction:
    """An :meth:`~GradientReducer.all_reduce` of tensors that get their gradients one after the other.

    Tensors that have their gradients can be on their way before the last ones have theirs. All calls together
    are one collective; ranks may call :meth:`advance` when and as often as they like.

    Args:
        reducer: Reducer of the tensors.
        entries, scale: See :meth:`~GradientReducer.all_reduce`.
    """

    def __init__(self, reducer: GradientReducer, entries: Sequence[tuple[str, Tensor]], scale: float) -> None:
        self._reducer, self._entries, self._scale = reducer, entries, scale
        self._whole = Record("gradient", tensors=0)
        self._parts = _by_topology(reducer, entries)
        self._plan: ReductionPlan | None = None
        self._exchange: PipelinedExchange | None = None
        self._inside: NodeChunks | None = None
        self._observed = 0

    def advance(self, ready: int, idle: Callable[[], bool]) -> None:
        """Send what can be sent, and add up what comes as long as the caller is ``idle()``.

        Args:
            ready: So many of the first tensors have their gradients.
            idle: Returns whether the caller has nothing else to do.

        Raises:
            DesyncError, PayloadError: See :meth:`~GradientReducer.all_reduce`.
        """
        reducer = self._reducer
        if not reducer.in_parts:
            return
        with reducer.recording(self._whole):
            topology, first = self._parts[0]
            if self._exchange is None:
                self._plan, self._inside = self._planned(topology, first)
                self._exchange = reducer.pipelined(topology, self._plan, self._whole, self._inside)
            if len(first) < len(self._entries):
                names = {name for name, _ in first}
                available = sum(name in names for name, _ in self._entries[:ready])
            else:
                available = ready
            with reducer.exchange.preparing(posts=self._exchange.unposted):
                self._observe(ready)
                self._exchange.post(available)
            while self._exchange.collectable and idle():
                self._exchange.collect()

    def finish(self) -> None:
        """Reduce the other tensors; all of them have their gradients, and then hold the sums.

        Raises:
            DesyncError, PayloadError: See :meth:`~GradientReducer.all_reduce`.
        """
        reducer, whole = self._reducer, self._whole
        with reducer.recording(whole):
            if self._exchange is not None and self._plan is not None:
                with reducer.exchange.preparing(posts=self._exchange.unposted):
                    self._observe(len(self._entries))
                self._exchange.finish()
                reducer.after_reduce(self._plan)
                self._reduce(self._parts[1:])
            elif reducer.in_chunks:
                self._reduce(self._parts)
            else:
                topology = reducer.topologies.everywhere
                self._entries, _ = topology.enter(self._entries, None, whole)
                self._parts = _by_topology(reducer, self._entries)
                with topology.entered():
                    self._observe(len(self._entries))
                    if not reducer.reduce_dense(self._entries, self._scale, whole):
                        self._reduce(self._parts)
        if reducer.metrics is not None:
            reducer.metrics.record(whole)
        if not reducer.deferred:
            reducer.finish()

    def _reduce(self, parts: Sequence[tuple[Topology, _Entries]]) -> None:
        reducer = self._reducer
        for topology, entries in parts:
            plan, inside = self._planned(topology, entries)
            if inside is not None and not reducer.in_parts:
                with reducer.exchange.preparing(posts=len(inside.sizes)):
                    inside.enter(len(inside.sizes) - 1, self._whole)
            reducer.reduce(topology, plan, self._whole, inside)

    def _planned(self, topology: Topology, entries: _Entries) -> tuple[ReductionPlan, NodeChunks | None]:
        """Return the plan of tensors, and what the ranks of the node do with their chunks."""
        reducer = self._reducer
        if not reducer.in_chunks:
            return reducer.plan(topology, entries, self._scale), None
        plan = reducer.plan(topology, topology.parts(entries), self._scale)
        return plan, topology.in_node(entries, plan, reducer.observe)

    def _observe(self, ready: int) -> None:
        """Show gradients to the add-ons before they are thresholded, and cleared."""
        if self._inside is not None:  # shows them
            return
        if ready > self._observed or not self._entries:
            self._reducer.observe(self._entries[self._observed : ready])
            self._observed = ready
