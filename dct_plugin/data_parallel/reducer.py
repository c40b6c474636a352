"""The reducer: gradients of a data-parallel group, summed through compressed messages.

A bucket's way: :class:`Reduction` has its tensors planned (:mod:`.planner`) and the plans exchanged
(:mod:`.plan_exchange`): a phase of their topology (:mod:`.topologies`) encodes them into messages, which
travel, and adds those that arrive. Add-ons (:mod:`.add_ons`) see gradients, plans and sums. With
:class:`Overlap` messages travel while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from .. import checkpoint
from ..codecs.copies import SideStream
from ..compression.stream import as_flat
from ..config import DataParallelConfig
from ..console import logger
from ..errors import DCTError
from ..host_traffic import bytes_sent
from ..metrics import Record
from ..transport.transports import GroupPeers
from .add_on import ReducerContext
from .add_ons import AddOns
from .dense_sums import DenseSums
from .pending_exchanges import exchanges_of
from .plan import Entries, ReductionPlan, Shard
from .plan_exchange import PlanExchange, PlanExchanges, receive_in_background
from .planner import Planner
from .stream_group import GroupOptions, Ranks, StreamGroup
from .topologies import Phase, Topologies

if TYPE_CHECKING:
    from .local_steps.exchange import ProgressExchange
    from .nodes.sums import NodeSums

_Shards = Sequence[Sequence[Shard]]


class GradientReducer:
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
        loss_scale: Factor that the framework multiplies into the gradients.
        optimizer: The optimizer of the gradients (``param_groups``), whose learning rates add-ons may follow.
        options: ``metrics``, which records bytes, density and times; ``device`` of the gradients;
            ``kernels``, the defaults when None; ``step``, optimizer steps so far, for a reducer that is made
            while the training runs.

    Attributes:
        group: The ranks, their streams and their exchange.
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
        self.group = group = StreamGroup(config, ranks, transactional=transactional, **options)
        self.config, group.loss_scale = config, loss_scale
        self._sends_gradients = config.exchange_of == "gradients"
        self.flushed = False
        """True if a step after :meth:`flush` has sent all that residuals held."""
        self.node_sums: NodeSums | None = None
        if group.nodes is not None:
            from .nodes.ranks import NodeRanks

            group.node = NodeRanks(group.nodes, group.device, config.min_numel, group.metrics)
            group.exchanges.append(group.node.exchange)
        self.progress: ProgressExchange | None = None
        self.topologies = Topologies(group)
        self.add_ons = AddOns(ReducerContext(group, config, self.topologies, optimizer))
        self.planner = Planner(group, self.topologies, self.add_ons)
        self.dense_sums = DenseSums(group)
        self.exchanges = exchanges_of(group, "gradient", self.add_ons.show_sums)
        if group.node is not None:
            from .nodes.sums import NodeSums

            self.node_sums = NodeSums(group.node, group, self.exchanges.preparing)
        if self.add_ons.local_steps is not None:
            from .local_steps.exchange import ProgressExchange

            self.progress = ProgressExchange(self, self.add_ons.local_steps)
        self.begin_step(group.step)

    # -- collectives ---

    def all_reduce(self, entries: Entries, *, scale: float = 1.0) -> None:
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
        self.finish()

    def reduce_scatter(
        self, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]], *, scale: float = 1.0
    ) -> None:
        """Give every owner ``scale`` times the thresholded sum of its shards (ZeRO-1/2).

        Args:
            entries: ``(name, tensor, shards)``; the shards cover the 1-D contiguous tensor once. The owner's
                shards are changed in place; the rest of the tensor is left unspecified.
            scale: For an average, one over the world size.

        Raises:
            DesyncError, PayloadError: See :meth:`all_reduce`.
            ValueError: The shards of a tensor do not cover it.
        """
        self.begin_scatter(entries, scale=scale).finish()
        self.finish()

    def begin(self, entries: Entries, *, scale: float = 1.0) -> Reduction:
        """Return an :meth:`all_reduce` that is to be posted and finished. Its sums are there after
        :meth:`finish`.
        """
        if self.progress is not None and self.add_ons.exchanges_progress:
            self.progress.in_pass()
        return Reduction(self, entries, scale)

    def begin_scatter(
        self, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]], *, scale: float = 1.0
    ) -> Reduction:
        """Return a :meth:`reduce_scatter`, see :meth:`begin`."""
        self.topologies.sums_at_owners = True
        tensors = [(name, tensor) for name, tensor, _ in entries]
        if self.group.streams.loaded:
            self.group.streams.give_up_sums([name for name, _ in tensors])
        return Reduction(self, tensors, scale, [shards for *_, shards in entries])

    def finish(self) -> None:
        """Complete the sums of all reductions that were finished; a collective.

        It waits for the device, and checks the messages.

        Raises:
            DesyncError, PayloadError: See :meth:`all_reduce`.
        """
        self.exchanges.finish()
        local = self.add_ons.local_steps
        if self.progress is not None and local is not None and local.gradients:
            self.progress.share_nonfinite()

    def return_to_residual(self, entries: Entries) -> None:
        """Add to the residuals what an exchange left in these tensors, where no rank used it."""
        for name, tensor in entries:
            flat = as_flat(tensor)
            if self.group.node is not None:
                flat = flat[slice(*self.group.node.part(name, flat.numel()))]
            stream = self.group.streams.get(name)
            if stream is not None and stream.residual is not None:
                stream.residual.add(flat)
            for each in self.add_ons:
                each.returned(name, tensor)

    def flush(self) -> None:
        """Send all gradients and residuals from the next step on, before the host continues without this
        reducer; call it on every rank.
        """
        self.planner.sends_all = True
        if self.progress is not None:
            self.progress.flush()
        for each in self.add_ons:
            each.flush()
        self.group.set_value_dtype("fp32")
        self.begin_step(self.group.step)

    # -- the steps of a reduction ---

    def plan(
        self, entries: Entries, scale: float, shards: _Shards | None
    ) -> Sequence[tuple[Sequence[Phase], ReductionPlan]]:
        """Show gradients to the add-ons; return the plans of their exchange and its phases, none where this
        step sends no messages.
        """
        with self.exchanges.preparing():
            self.add_ons.before_compression(entries)
            local = self.add_ons.local_steps
            if self.is_dense or (local is not None and local.alone):
                return ()
            return self.planner.plan(entries, scale, shards)

    def keep(self, entries: Entries, scale: float) -> None:
        """Leave gradients as those of this rank alone, if they stay there in this step."""
        local, group = self.add_ons.local_steps, self.group
        if local is None or not local.alone:
            return
        factor = scale * group.group_size * local.keep(entries)
        for _, tensor in entries if factor != 1.0 else ():
            tensor.mul_(factor)
        if group.metrics is not None and local.counted < 1:  # the exchange of progress counts for the rest
            nbytes = (1 - local.counted) * sum(tensor.nbytes for _, tensor in entries)
            dense = bytes_sent("all_reduce", nbytes, group.world_size, gloo=group.device.type == "cpu")
            group.metrics.record(Record("gradient_local", dense))

    def shared_weight(self, name: str, own: Tensor) -> Tensor:
        """Return a weight as all ranks hold it: the common one under local steps, else ``own``, also of a
        parameter that was unfrozen since.
        """
        local = self.add_ons.local_steps
        if self.progress is None or local is None or name not in local.weights.held:
            return own
        self.progress.finish(follows=False)  # a backward pass may need this rank's own weights
        return local.weights.weight(name)

    # -- steps ---

    def end_step(
        self, *, skipped: bool = False, loss_scale: float | None = None, reduced_at: float | None = None
    ) -> None:
        """Close an optimizer step; warm-up counts it, also a skipped one.

        Args:
            skipped: The optimizer did not use the gradients reduced since the last step: residuals and
                thresholds are restored bitwise. Without ``transactional`` they are not, and the entries that
                were sent in the step are lost, see :meth:`undo`.
            loss_scale: The coming gradients are multiplied by it; residuals and thresholds follow (exact for
                powers of 2). None: as before.
            reduced_at: Loss scale of the gradients reduced in this step, for hosts that learn it only now.
        """
        self.finish()
        if self.is_dense:
            self.dense_sums.end_step(skipped=skipped)
        self.flushed |= self.planner.sends_all and not skipped
        group = self.group
        if group.metrics is not None:
            group.metrics.starting = group.schedule.starting(group.step)
        if reduced_at is not None:
            group.loss_scale = reduced_at
        self.add_ons.earlier.clear()
        if self._sends_gradients:
            group.streams.end_step(group.waiting, skipped=skipped)
        for each in self.add_ons:
            each.end_step(skipped=skipped and group.streams.transactional)
        if skipped and self.config.nonfinite_action == "skip":
            group.nonfinite_reported = False  # the next one may be another rank's and parameter's
        if loss_scale is not None:
            self.rescale(loss_scale)
        self.begin_step(group.step + 1)
        self._exchange_progress()

    def _exchange_progress(self) -> None:
        if self.progress is not None and self.add_ons.exchanges_progress:
            self.progress.after_step()

    def begin_step(self, step: int) -> None:
        """Decide what the reductions of a step have in common; ``step`` is the number of those before it."""
        self.group.step = step
        self.planner.begin_step()
        self.add_ons.begin_step()
        starting = step < self.config.dense_steps
        self.is_dense = self.group.world_size == 1 or starting or self.add_ons.dense
        """True if gradients of this step are summed densely."""

    def undo(self, names: Collection[str], *, lost: bool) -> None:
        """Take back the reductions of these tensors since their last step, whose sums no optimizer used.

        Args:
            names: The tensors; those of other reducers may be among them.
            lost: There was no second residual in these reductions. What was sent is old residual and gradient
                in one, and cannot be told apart any more: residuals are set to zero.
        """
        self.finish()
        for stream in self.group.streams.of(names):
            stream.end_step(skipped=True)
            if lost and stream.residual is not None:
                stream.residual.clear()
        for each in self.add_ons:
            each.undo(names, lost=lost)

    def commit(self, names: Collection[str]) -> None:
        """Close the step of these tensors, whose optimizer stepped after the step was counted."""
        self.finish()
        for stream in self.group.streams.of(names) if self.group.streams.transactional else ():
            stream.end_step()
        self._exchange_progress()

    def reject_step(self) -> bool:
        """Close a step that no optimizer made, after :meth:`undo` of its tensors; return whether it counts.

        It does where gradients stay on their rank, since the other ranks may have made it. Progress that is
        due is exchanged after the next step: now a backward pass may need the weights.
        """
        self.dense_sums.end_step(skipped=True)
        self.add_ons.earlier.clear()
        for each in self.add_ons:
            each.end_step(skipped=True)
        if counts := self.add_ons.alone:
            self.begin_step(self.group.step + 1)
        return counts

    def rescale(self, loss_scale: float) -> None:
        """Note between two steps that the coming gradients are multiplied by ``loss_scale``. Residuals and
        thresholds follow where they lie (exact for powers of 2).
        """
        ratio, self.group.loss_scale = loss_scale / self.group.loss_scale, loss_scale
        if ratio != 1.0 and self._sends_gradients:
            self.group.streams.rescale(ratio)
            for each in self.add_ons:
                each.rescale(ratio)

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters of this rank (each rank has its own)."""
        if self.progress is not None:
            self.progress.finish()
        streams = self.group.streams.state_dict()
        state = {"step": self.group.step, "loss_scale": self.group.loss_scale, "streams": streams}
        state |= {each.key: each.state_dict() for each in self.add_ons if each.key}
        if self.group.node is not None:
            state |= {"layout": self.group.layout, "parts": self.group.node.state_dict(streams)}
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
        if state.get("parts") and state["layout"] != self.group.layout:
            raise DCTError(
                f"rank {dist.get_rank()}: the state was saved with the nodes {state['layout']}, they are "
                f"{self.group.layout or 'none'} now; save and load files, which spread the residuals anew"
            )
        self.finish()
        if self.progress is not None:
            self.progress.finish()
        self.dense_sums.forget()
        self.group.loss_scale = scale = state["loss_scale"] if loss_scale is None else loss_scale
        self.group.step = state["step"]
        if self._sends_gradients:
            state = checkpoint.in_unit(state, scale / state["loss_scale"])
        loaded = dict(state["streams"])
        if self.group.node is not None:
            loaded = self.group.node.own_parts(loaded, state.get("parts"))
        self.group.streams.load(loaded)
        if self.topologies.is_direct:
            self.group.streams.give_up_sums(loaded)
        for each in self.add_ons:
            saved = each.in_unit(state.get(each.key), state.get("ratio", 1.0))
            each.load_state_dict(saved, step=self.group.step)
        self.begin_step(self.group.step)
        kept = sum(each.get("residual") is not None for each in loaded.values())
        # torchft restores states in mid-run, and may have no default process group.
        is_first = isinstance(self.group.exchange.peers, GroupPeers) and dist.get_rank() == 0
        has_peers = self.group.world_size > 1  # one rank sends nothing
        if self.group.step and (kept or not loaded) and is_first and has_peers:
            what = f"the residuals of {kept} tensors, for {self.group.world_size} ranks or nodes"
            step, rest = self.group.step, self.group.schedule.rest(self.group.step)
            logger.warning(f"dct: resumed at step {step} with {what}; {rest}")


class Reduction:
    """A reduction in two halves, between which its messages travel.

    Both halves are collectives. One reduction is finished before the next one is posted.

    Args:
        reducer: Reducer of the tensors.
        entries, scale: See :meth:`~GradientReducer.all_reduce`.
        shards: By entry, the parts and their owners, see :meth:`~GradientReducer.reduce_scatter`; None for an
            all-reduce.
    """

    def __init__(
        self, reducer: GradientReducer, entries: Entries, scale: float, shards: _Shards | None = None
    ) -> None:
        self._reducer, self._entries, self._scale, self._shards = reducer, entries, scale, shards
        self._exchange_record = Record("gradient")
        self._exchanges: list[PlanExchange] | None = None

    def post(self, exchanges: PlanExchanges | None = None, *, in_background: bool = False) -> None:
        """Send the messages of all tensors. Gradients become zeros; a dense step sums them now.

        Args:
            exchanges: Those that the plans go into; None: the reducer's.
            in_background: Messages are to arrive while this thread does other work.

        Raises:
            DesyncError, PayloadError: See :meth:`~GradientReducer.all_reduce`.
        """
        reducer, entries, shards = self._reducer, self._entries, self._shards
        scale, exchange_record = self._scale, self._exchange_record
        self._exchanges = []
        with reducer.group.recording(exchange_record):
            if reducer.node_sums is not None:
                entries, shards = reducer.node_sums.reduce_in_node(entries, shards, exchange_record)
            with self._telling_node():
                plans = reducer.plan(entries, scale, shards)
                if reducer.is_dense:
                    reducer.dense_sums.reduce(reducer.planner.dense(entries, scale), exchange_record)
                elif not plans:
                    reducer.keep(entries, scale)
                for phases, plan in plans:
                    into = exchanges or reducer.exchanges
                    self._exchanges.append(into.start(phases, plan, exchange_record))
            if in_background:
                receive_in_background(self._exchanges)

    def answer(self) -> None:
        """Receive the first of two phases, and send the second. Only the last plan may have two."""
        exchanges = self._exchanges or []
        with self._reducer.group.recording(self._exchange_record):
            for exchange in exchanges[:-1]:
                exchange.wait()
            for exchange in exchanges[-1:]:
                exchange.answer()
        self._exchanges = exchanges[-1:]

    def receive(self) -> None:
        """Receive all messages that another thread does not receive, and send the last answers."""
        self.answer()
        exchanges, self._exchanges = self._exchanges or [], []
        with self._reducer.group.recording(self._exchange_record):
            for exchange in exchanges:
                if exchange.arrives_in_background:
                    self._exchanges.append(exchange)
                else:
                    exchange.wait()

    def finish(self) -> None:
        """Receive the messages and add them up; posts them first, unless that has been done.

        Raises:
            DesyncError, PayloadError: See :meth:`~GradientReducer.all_reduce`.
        """
        if self._exchanges is None:
            self.post()
        reducer = self._reducer
        with reducer.group.recording(self._exchange_record), self._telling_node():
            for exchange in self._exchanges or ():
                exchange.wait()
            if reducer.node_sums is not None:
                reducer.node_sums.gather_in_node(self._exchange_record)
        if reducer.group.metrics is not None:
            reducer.group.metrics.record(self._exchange_record)

    def _telling_node(self) -> AbstractContextManager[Any]:
        """Surround work whose results the other ranks of the node wait for: they are told of an error."""
        node = self._reducer.group.node
        return nullcontext() if node is None else node.failing_together()


class Overlap:
    """Runs the reductions of one reducer in the order in which they are submitted, the same on all ranks.

    A framework submits a reduction when a bucket is full. Its messages leave at once. They are collected when
    the next reduction is submitted, or when the framework waits.

    On CUDA they are queued on a stream, from the host's own thread. Kernels of a second thread would come in
    between those of the model's other communication, in an order that differs from rank to rank.

    Args:
        reducer: The reducer of the buckets.
        wanted: False: a reduction is finished when it is submitted.
        own_stream: Whether reductions get a stream; False where the framework submits on a stream of its own.
    """

    def __init__(self, reducer: GradientReducer, *, wanted: bool = True, own_stream: bool = True) -> None:
        self.reducer, self._wanted = reducer, wanted
        # What is ready goes first: the others wait for it. Kernels that run when they are called need none.
        apart = wanted and own_stream and reducer.group.backend.batches
        self._side = SideStream(priority=-1) if apart else None
        self._open: tuple[Reduction, Callable[[], None]] | None = None

    def submit(
        self, reduction: Reduction, done: Callable[[], None] = lambda: None, *, last: bool = False
    ) -> None:
        """Send the messages of a reduction, after those of the one before were collected.

        Args:
            reduction: The reduction.
            done: Called when its messages were collected.
            last: Collect the messages at once: the host waits for ``done`` next.

        Raises:
            DesyncError, PayloadError: See :meth:`~dct_plugin.data_parallel.GradientReducer.all_reduce`.
        """
        with self._stream():
            self._collect()
            reduction.post()
            self._open = reduction, done
            if last or not self._wanted:
                self._collect()

    def wait(self) -> None:
        """Return when the results of all that was submitted can be used on the current stream.

        Raises:
            DesyncError, PayloadError: See :meth:`~dct_plugin.data_parallel.GradientReducer.all_reduce`.
        """
        with self._stream():
            self._collect()
            self.reducer.finish()
        if self._side is not None:
            self._side.join()

    def _collect(self) -> None:
        if self._open is not None:
            (reduction, done), self._open = self._open, None
            reduction.finish()
            done()

    def _stream(self) -> AbstractContextManager[None]:
        """Surround work of the reducer."""
        side = self._side
        return nullcontext() if side is None else side.queue(device=self.reducer.group.device)
