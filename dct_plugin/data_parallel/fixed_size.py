"""The transport of messages whose sizes stay on the device: the host waits for the device once.

Messages travel in slots of fixed size (:mod:`dct_plugin.transport.fixed_size`), and the device adds them up.
Sizes, figures and errors of all exchanges are read in one copy when the exchanges are finished: those of
reductions once in a step, where the host framework says so (:attr:`.reducer.GradientReducer.deferred`), those
of updates of weights before the weights are used again.

A message that turns out too long for its slot was added nowhere: weights stay as they were, and sums became
NaN, which leaves residuals alone; an owner that lacked a message says so in its answer. Such messages are
sent again, whole, when the exchange is finished, and what depends on them is computed again. The bits are
those of a message that had fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.slots import WORDS
from ..codecs.stats import KERNEL_ERRORS, read_figures
from ..errors import PayloadError
from ..kernels import GRAD_DTYPES
from ..metrics import Record
from ..transport.bounded_table import BoundedTable
from ..transport.fixed_size import FixedSizeExchange, SlotTransfer
from .plan import ReductionPlan
from .stream_group import StreamGroup, WrittenTensor
from .topology import Phase


@dataclass
class _SentPhase:
    """One phase of an exchange that is under way."""

    exchange: FixedSizeExchange
    slots: SlotTransfer
    writers: Sequence[MessageWriter]
    """One writer for each receiver; the same one where all ranks get the same message."""
    written: list[WrittenTensor]
    errors: Tensor
    """int32 [ranks]: what the kernels found wrong with the message of each sender."""


@dataclass
class _PendingReduction:
    """An exchange whose results the host has not checked yet."""

    phases: Sequence[Phase]
    plan: ReductionPlan
    writers: list[MessageWriter]
    """One for each rank, and one for the answer."""
    sent: list[_SentPhase] = field(default_factory=list)


class _Result:
    """The figures of one phase, as the host reads them.

    Attributes:
        rows: First words of the slot from each sender.
        errors: What is wrong with the message of each sender (0: nothing).
        sent, got: Bytes of the messages by receiver, and by sender.
        late: Senders whose message did not fit.
        lacking: Senders whose message stands for nothing, since they lacked another.
    """

    def __init__(self, phase: _SentPhase, words: Sequence[int], errors: Sequence[int]) -> None:
        self.phase, self.errors = phase, errors
        self.rows = {r: list(words[WORDS * r : WORDS * (r + 1)]) for r in range(len(errors))}
        self.sent = {
            r: sum(stats.nbytes for _, stats in writer.parts) for r, writer in enumerate(phase.writers)
        }
        self.got = {r: row[0] for r, row in self.rows.items()}
        self.late = {r for r, size in self.got.items() if size > phase.slots.room_from(r)}
        self.lacking = {r for r, row in self.rows.items() if row[2]}


class FixedSizeReductions:
    """Exchanges in slots of fixed size.

    Args:
        group: Streams and process group; its kernels write slots.
        cls: Class of the exchanges in the metrics.
        finished: Called for each plan whose results are complete.
    """

    def __init__(
        self, group: StreamGroup, cls: str, finished: Callable[[ReductionPlan], None] = lambda _: None
    ) -> None:
        self._group, self._cls, self._finished = group, cls, finished
        self._kernels = group.backend
        self._exchanges: BoundedTable[list[FixedSizeExchange]] = BoundedTable()
        """One entry for each phase, by the fingerprint of the plan."""
        self._pending: list[_PendingReduction] = []

    def knows(self, phases: Sequence[Phase], plan: ReductionPlan) -> bool:
        """Return whether slots can hold the plan's messages, which have been exchanged before."""
        if not self._exchanges.has(plan.fingerprint):
            return False
        complete = len(self._exchanges[plan.fingerprint]) == len(phases)
        return complete and all(each.tensor.dtype in GRAD_DTYPES for each in plan.tensors)

    def remember(
        self, phase: int, plan: ReductionPlan, sent: Sequence[Tensor], received: Sequence[Tensor]
    ) -> None:
        """Remember messages of a plan that were exchanged with their sizes."""
        if phase == 0:
            self._exchanges[plan.fingerprint] = []
        exchange = FixedSizeExchange(self._group.exchange, plan.fingerprint)
        self._exchanges[plan.fingerprint].append(exchange)
        exchange.remember(_numbered(sent), _numbered(received))

    # -- under way ---

    def finish_before(self, plan: ReductionPlan) -> None:
        """Call :meth:`finish` if the plan's messages are to be exchanged with their sizes, or if one of its
        tensors is pending: its stream needs to know what it sent.
        """
        names = {tensor.name for tensor in plan.tensors}
        pending = (tensor.name for each in self._pending for tensor in each.plan.tensors)
        if plan.fingerprint not in self._exchanges or not names.isdisjoint(pending):
            self.finish()

    def start(self, phases: Sequence[Phase], plan: ReductionPlan, whole: Record) -> None:
        """Queue the exchange of a plan whose messages have been exchanged before."""
        pending = _PendingReduction(phases, plan, self._group.take_writers())
        try:
            lacks: Tensor | None = None
            for phase in phases:
                lacks = self._send(pending, phase, lacks, whole)
        except BaseException:
            self._fail(pending)
            raise
        self._pending.append(pending)

    def replace_result(self, name: str, tensor: Tensor) -> None:
        """Correct ``tensor`` instead of the pending tensor of that name, if a message did not fit."""
        for pending in self._pending:
            for each in pending.plan.tensors:
                if each.name == name:
                    each.tensor = tensor

    def _send(self, pending: _PendingReduction, phase: Phase, lacks: Tensor | None, whole: Record) -> Tensor:
        """Queue one phase; return int64 []: whether a message did not fit."""
        plan, rank, ranks = pending.plan, self._group.rank, self._group.world_size
        exchange = self._exchanges[plan.fingerprint][len(pending.sent)]
        # The writer of an answer is one that the first phase does not use.
        writers = pending.writers[:ranks]
        if phase.to_all:
            writers = [pending.writers[-1] if pending.sent else pending.writers[0]] * ranks
        written = phase.write(plan, writers)
        slots = exchange.slots(self._group.device, shared=phase.to_all)
        self._kernels.write_slot(writers[rank], slots.slot_from(rank), exchange.fingerprint, lacks)
        if not phase.to_all:
            for receiver in range(ranks):
                if receiver != rank:
                    self._kernels.write_slot(writers[receiver], slots.slot_to(receiver), exchange.fingerprint)
        sent = _SentPhase(exchange, slots, writers, written, torch.empty(0))
        pending.sent.append(sent)
        with whole.timed("exchange"):
            exchange.send(slots)
        with whole.timed("decode"):
            found = [destination.add_slots(slots) for destination in phase.destinations(plan)]
        sent.errors = torch.cat([errors for errors, _ in found]).to(torch.int64)
        return torch.cat([missing for _, missing in found]).amax()

    def _fail(self, pending: _PendingReduction) -> None:
        """Tell the ranks that wait for the phases that were not sent. Never raises."""
        exchanges = self._exchanges.get(pending.plan.fingerprint, [])[len(pending.sent) :]
        for exchange, phase in zip(exchanges, pending.phases[len(pending.sent) :], strict=False):
            exchange.fail(exchange.slots(self._group.device, shared=phase.to_all))

    # -- finished ---

    def finish(self) -> None:
        """Wait for the pending exchanges; messages that did not fit are exchanged now.

        Raises:
            DesyncError: A rank failed, or exchanges other tensors.
            PayloadError: A message arrived damaged.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        sent = [phase for each in pending for phase in each.sent]
        stats = [part for phase in sent for each in phase.written for part in each.encoded.stats]
        ranks = range(self._group.world_size)
        figures = iter(
            read_figures(stats, [t for phase in sent for t in (phase.slots.words(ranks), phase.errors)])
        )
        with self._group.recorded(self._cls) as whole:
            for each in pending:
                self._close(
                    each, [_Result(phase, next(figures), next(figures)) for phase in each.sent], whole
                )

    def _close(self, pending: _PendingReduction, results: Sequence[_Result], whole: Record) -> None:
        """Check the results of an exchange, and complete them."""
        for phase, result in zip(pending.phases, results, strict=True):
            self._check(pending.plan, phase, result)
        messages = self._resend(results[0])
        affected = results[-1].late | results[-1].lacking
        if len(results) == 2 and affected:
            messages = self._answer_again(pending, results[1], affected, messages)
        with whole.timed("decode"):
            for destination in pending.phases[-1].destinations(pending.plan):
                if affected & set(destination.senders):
                    destination.add_again([messages[sender] for sender in destination.senders])
        for result in results:
            result.phase.exchange.remember(result.sent, result.got)
            self._group.account(result.phase.written, whole)
        self._group.give_back(pending.writers)
        self._finished(pending.plan)

    def _check(self, plan: ReductionPlan, phase: Phase, result: _Result) -> None:
        slots = result.phase.exchange
        headers = [row[:2] for row in result.rows.values()]
        slots.exchange.checked_sizes(headers, slots.fingerprint, phase.largest_messages(plan))
        for sender, error in enumerate(result.errors):
            if error:
                problem = KERNEL_ERRORS[error]
                raise PayloadError(
                    f"rank {self._group.rank}: message from rank {sender} of the group: {problem}"
                )

    def _resend(self, result: _Result) -> list[Tensor]:
        """Send again what did not fit; return all messages, if one to this rank did not."""
        phase, rank = result.phase, self._group.rank
        arrived = phase.exchange.resend(
            phase.slots, result.sent, lambda receiver: phase.writers[receiver].message, result.got
        )
        if not result.late:
            return []
        arrived[rank] = phase.writers[rank].message
        return [
            arrived[sender] if sender in arrived else phase.slots.message_from(sender, size)
            for sender, size in result.got.items()
        ]

    def _answer_again(
        self, pending: _PendingReduction, result: _Result, affected: set[int], messages: Sequence[Tensor]
    ) -> list[Tensor]:
        """Exchange, with their sizes, the answers of owners that lacked a message, and those that did not
        fit; return the answers of all ranks, empty for the others.
        """
        plan, phase, rank = pending.plan, result.phase, self._group.rank
        first, second = pending.phases
        writer, answer = phase.writers[rank], phase.slots.arriving[:0]
        if rank in result.lacking:
            for destination in first.destinations(plan):
                destination.add_again([messages[sender] for sender in destination.senders])
            writer.clear()
            phase.written = second.write(plan, [writer])
        if rank in affected:
            answer = writer.message
            result.sent = dict.fromkeys(result.sent, answer.numel())
        bounds = second.largest_messages(plan)
        answers = self._group.exchange.all_gather(answer, plan.fingerprint, bounds=bounds)
        result.got |= {owner: answers[owner].numel() for owner in affected}
        return answers


def _numbered(messages: Sequence[Tensor]) -> dict[int, int]:
    """Return the bytes of messages by rank."""
    return {rank: message.numel() for rank, message in enumerate(messages)}
