"""Thresholded updates of the weights: the other half of the traffic of a sharded optimizer.

Under ZeRO-1 and 2 and Megatron's distributed optimizer a rank owns a part of the master weights (fp32), and
every rank trains with working weights (fp32, bf16 or fp16). After the optimizer's step the owner sends the
entries of ``master - working`` that reach a threshold, and *every rank, the owner too, adds exactly what was
sent* to its working weights. What was not sent stays between master and working weight: error feedback that
needs no memory and cannot be lost.

With ``"parameters": "exact"`` everything is sent that changed (:mod:`.exact_updates`), and nothing waits.

16-bit working weights: the difference is to the master as it would be rounded, so that nothing is sent which
rounding would swallow, and an entry that is sent arrives exactly where the host's own gather puts it
(unless it moved by more than the value type can say).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..codecs.message import MessageWriter
from ..codecs.payload import split_message
from ..codecs.values import ValueDtype
from ..compression.stream import add_payload, encode_all
from ..config import DataParallelConfig, NoFeedback, ParametersConfig
from ..metrics import Record
from ..transport.slots import Slots
from .exact_updates import EXACT_CLASS, ChangesToAll, GatherChoice
from .pending_exchanges import exchanges_of
from .plan import PlannedTensor, ReductionPlan, Shard, Sparsity
from .stream_group import GroupOptions, Ranks, StreamGroup
from .topologies import OwnersToAll, WrittenTensor, naming_sender


class ParameterUpdates:
    """Brings working weights to their owners' master weights, all ranks to bitwise the same values.

    Args:
        config: The ``data_parallel`` settings.
        ranks: Process group over which the masters are sharded, None for the default one; or its nodes:
            updates cross between them once, and are gathered inside.
        gathers: With nodes: False where a rank has weights that only the ranks with its position in other
            nodes have, and owners of shards are nodes: nothing is gathered inside.
        options: ``metrics``, which records bytes, density and times; ``device`` of the weights; ``kernels``,
            the defaults when None; ``step``, optimizer steps so far.

    Attributes:
        choice: Chooses between exact updates and the host's gathers, which the host times by it.
        whole: Names of the weights that are sent whole, like small ones.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        ranks: Ranks = None,
        *,
        gathers: bool = True,
        **options: Unpack[GroupOptions],
    ) -> None:
        self.exact = config.parameters in ("exact", "int8")  # which are exact codes
        given = config.parameters
        self.config = given if isinstance(given, ParametersConfig) else ParametersConfig()
        sparsity, value_dtype = 0.0 if self.exact else self.config.sparsity, self.config.value_dtype
        changes = {"sparsity": sparsity, "value_dtype": value_dtype, "feedback": NoFeedback()}
        self.group = group = StreamGroup(config.model_copy(update=changes), ranks, **options)
        self._between_nodes = None
        if group.nodes is not None and gathers:
            from .nodes.ranks import NodeRanks
            from .nodes.sums import UpdatesBetweenNodes

            node = NodeRanks(group.nodes, group.device, config.min_numel, group.metrics)
            group.exchanges.append(node.exchange)
            self._between_nodes = UpdatesBetweenNodes(node, group.layout)
        self.whole: frozenset[str] = frozenset()
        self._cls = EXACT_CLASS if self.exact else "parameter"
        self._exchanges = exchanges_of(group, self._cls)
        self.choice = GatherChoice(group)
        self._phase: OwnersToAll = ChangesToAll(group) if self.exact else MasterBroadcast(group)

    @classmethod
    def of_copies(cls, config: DataParallelConfig, group: StreamGroup) -> ParameterUpdates:
        """Return the updates of weights of which each node of a reducer's ``group`` keeps a copy."""
        return cls(
            config,
            group.nodes or group.process_group,
            gathers=False,
            metrics=group.metrics,
            device=group.device,
            kernels=group.streams.kernels,
        )

    def full(self, dtype: torch.dtype) -> bool:
        """Return whether in this step the host is to gather weights of ``dtype`` by itself, in full.

        The same on all ranks. True in warm-up steps, every ``full_every`` steps, and where nothing would be
        saved or rounded. With exact updates, :attr:`choice` says it, in a collective now and then.
        """
        every, group = self.config.full_every, self.group
        if group.world_size == 1 or (every is not None and (group.step + 1) % every == 0):
            return True
        if self.exact:
            return self.choice.is_whole(group.step)
        if group.schedule.density(group.step) < 1.0:
            return False
        lossless = group.value_dtype in (ValueDtype.FP32, ValueDtype.lossless(dtype))
        return lossless or group.step < group.schedule.warmup_steps

    def record_full(self, numel: int, element_size: int) -> None:
        """The host has gathered ``numel`` weights in full: nothing is pending."""
        self.forget()
        # What a rank sends in a ring: the transport does not tell.
        ranks, metrics = self.group.world_size, self.group.metrics
        size = (ranks - 1) / ranks * numel * element_size
        if metrics is not None and size:
            metrics.record(Record("parameter_full", size, size, numel))

    def gather_whole(self, weights: Tensor) -> None:
        """Gather whole weights, 1-D, of which rank ``r`` has the ``r``-th part; a collective."""
        group = self.group
        group.agree("gather of weights")
        with group.recorded("parameter_full") as exchange_record:
            group.exchange.gather_into(weights.view(torch.uint8))
            exchange_record.dense_bytes = (group.world_size - 1) * weights.nbytes / group.world_size
            exchange_record.numel = weights.numel()
        self.forget()

    def update(
        self, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]], master_of: Callable[[str], Tensor]
    ) -> None:
        """Move working weights towards the masters; a collective.

        Args:
            entries: ``(name, working, shards)``; 1-D contiguous working weights of any floating type, changed
                in place, the same on all ranks before and after; every rank owns at most one of the shards.
            master_of: The masters of this rank's shard of a name, 1-D, of the shard's length; they may be
                rounded to the type of the working weights. For exact updates: the working weights of this
                shard before the step, of which ``working`` has the new ones.

        Raises:
            DesyncError: A rank failed or updates other tensors.
            PayloadError: A message arrived damaged.
            ValueError: The shards of a tensor do not cover it.
        """
        self._phase.masters = master_of
        with self.choice.timed(sum(tensor.numel() for _, tensor, _ in entries), whole=False):
            self._update(entries)
        del self._phase.masters  # frees what exact updates were compared with

    def _update(self, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]]) -> None:
        between, exchanges, group = self._between_nodes, self._exchanges, self.group
        with group.recorded(self._cls) as exchange_record:
            with exchanges.preparing():
                if between is None:
                    sent = entries
                else:
                    sent = [
                        (name, weights[shard.start : shard.stop], [owner])
                        for name, weights, shards in entries
                        for shard, owner in between.exchanged(shards)
                    ]
                sparsity = Sparsity(group.schedule.density(group.step))
                tensors = [
                    PlannedTensor(n, t, s, n in self.whole or group.is_small(n, t.numel()), sparsity)
                    for n, t, s in sent
                ]
                plan = ReductionPlan(group.operation("parameters"), tensors)
            exchanges.start([self._phase], plan, exchange_record).wait()
        exchanges.finish()
        if between is not None:
            between.gather(entries)

    def pending_of(self, name: str) -> tuple[Shard, Tensor] | None:
        """Return this rank's shard of a name, and what its working weights lack there (fp32), to be read
        before the next call or update. None if nothing is pending, or with nodes: a rank's own shard is
        no part of what it displaces.
        """
        return None if self._between_nodes is not None else self._phase.pending_of(name)

    def end_step(self, *, skipped: bool = False, loss_scale: float | None = None) -> None:
        """An optimizer step is over; one that was skipped has updated nothing."""
        self.group.step += 1

    def forget(self) -> None:
        """The host has brought working weights to the masters: nothing is pending."""
        self._phase.forget()

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Thresholds and counters of this rank; what is not sent yet follows from the weights."""
        return {"step": self.group.step, "streams": self.group.streams.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None, *, step: int = 0) -> None:
        """Restore :meth:`state_dict`; None measures thresholds anew, ``step`` steps into the training."""
        self.forget()
        self.choice.clear()
        self.group.step = step if state is None else int(state["step"])
        self.group.streams.load({} if state is None else state["streams"])


class MasterBroadcast(OwnersToAll):
    """Every owner sends what its working weights lack to all ranks."""

    spare = True

    def __init__(self, group: StreamGroup) -> None:
        super().__init__(group)
        self._own: dict[str, tuple[Shard, Tensor, Tensor]] = {}
        """This rank's shards of the last update, their working weights and masters."""

    def forget(self) -> None:
        self._own.clear()

    @torch.no_grad()
    def pending_of(self, name: str) -> tuple[Shard, Tensor] | None:
        if name not in self._own:
            return None
        shard, working, master = self._own[name]
        return shard, self._difference(working, master)

    def encode(self, plan: ReductionPlan, writer: MessageWriter) -> list[WrittenTensor]:
        group, written, copies = self.group, [], self.group.world_size - 1
        owned = [
            (each, shard, each.view(shard), self.masters(each.name))
            for each, shard in plan.owned_by(group.rank)
        ]
        rounded = iter(_rounded([(master, held.dtype) for each, _, held, master in owned if each.small]))
        for each, shard, working, master in owned:
            stream = None
            if each.small:
                dtype = self.small_dtype(working.dtype)
                encoded = encode_all(group.backend, next(rounded), writer, dtype)
            else:
                stream = group.streams.named(each.name)
                self._own[each.name] = shard, working, master
                difference = self._difference(working, master)
                encoded = stream.encode(difference, writer, self.density(each))
            name = "parameter_small" if each.small else "parameter"
            dense = copies * encoded.numel * each.tensor.element_size()
            written.append(WrittenTensor(None, name, encoded, stream, dense, [copies]))
        return written

    def add(self, plan: ReductionPlan, messages: Sequence[Tensor]) -> None:
        for owner, message in enumerate(messages):
            owned = [(each.view(shard), each.small) for each, shard in plan.owned_by(owner)]
            if replaced := [weights for weights, small in owned if small]:  # which are sent whole
                torch._foreach_zero_(replaced)
            weights = [each for each, _ in owned]
            with naming_sender(self.group, owner):
                for working, payload in zip(weights, split_message([message], 0, weights), strict=True):
                    add_payload(self.group.backend, payload, working)

    def prepare_sum(self, plan: ReductionPlan, slots: Slots) -> Callable[[], Tensor]:
        add_up = super().prepare_sum(plan, slots)
        small = [each.tensor for each in plan.tensors if each.small]  # which are sent whole

        def add() -> Tensor:
            if small:
                torch._foreach_zero_(small)
            return add_up()

        return add

    def _difference(self, working: Tensor, master: Tensor) -> Tensor:
        """Return what the working weights lack, fp32; in scratch memory if kernels have read it by the next
        call.
        """
        group = self.group
        if group.backend.batches:  # kernels are launched later
            out = torch.empty(working.numel(), dtype=torch.float32, device=group.device)
        else:
            out = group.streams.scratch.take("difference", working)
        group.backend.difference(master, working, out)
        return out


def _rounded(masters: Sequence[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """Masters in the types of their working weights, with few launches for many of them."""
    made = [torch.empty(master.numel(), dtype=dtype, device=master.device) for master, dtype in masters]
    if made:
        torch._foreach_copy_(made, [master for master, _ in masters])
    return made
