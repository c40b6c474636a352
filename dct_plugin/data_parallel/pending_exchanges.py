"""Exchanges whose messages travelled in slots, and that the host has not checked yet.

Lengths, figures and errors of all pending exchanges are read in one copy: those of reductions once in a step,
when the host framework needs the sums; those of updates of weights before the weights are used again.

A message that turns out too long for its slot was added nowhere: weights stay as they were, and sums became
NaN, which leaves residuals alone; an owner that lacked a message says so in its answer. What did not fit is
sent then, and what depends on it is computed again. The bits are those of a message that had fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from ..codecs.slots import WORDS
from ..codecs.stats import KERNEL_ERRORS, read_figures
from ..errors import DesyncError, PayloadError
from ..kernels.job import GRAD_DTYPES
from ..metrics import Record
from ..policy.memory import MOST_PENDING
from ..transport.bounded_table import BoundedTable
from ..transport.slots import AgreedCapacities, Slots, fail
from .plan import ReductionPlan
from .plan_exchange import ExchangedChunk, PlanExchange, SendOrder, SentPhase
from .stream_group import StreamGroup
from .topology import Phase


class PendingExchanges:
    """The exchanges of a group: begins them, and checks those that are pending.

    Args:
        group: Streams and process group.
        cls: Class of the exchanges in the metrics.
        finished: Called for each plan whose results are complete.
    """

    def __init__(
        self, group: StreamGroup, cls: str, finished: Callable[[ReductionPlan], None] = lambda _: None
    ) -> None:
        self._group, self._cls, self._finished = group, cls, finished
        self._capacities: BoundedTable[list[AgreedCapacities]] = BoundedTable()
        """Those of each phase, by the fingerprint of a chunk."""
        self._pending: list[PlanExchange] = []
        self._kept = 0.0
        """Entries kept by the exchanges since the last check, the same on all ranks."""
        self._order = SendOrder()

    def preparing(self) -> AbstractContextManager[None]:
        """Surround work before the next exchange. The others wait there for headers, or, as in the last step,
        for slots: an error is told where they wait.
        """
        return self._group.exchange.preparing(posts=0, failed=self._fail_next)

    def _fail_next(self) -> None:
        if expected := self._expected():
            fail(expected, self._group.device)
        else:
            self._group.exchange.abort()

    def _expected(self) -> list[AgreedCapacities]:
        """Return the capacities of the slots that this step is still to send, if it is like the last one."""
        following = self._order.following(self._group.step)
        return [self._capacities[c][phase] for c, phase in following if self._capacities.has(c)]

    def begin(self, phases: Sequence[Phase], plan: ReductionPlan, exchange_record: Record) -> PlanExchange:
        """Return an exchange of a plan, to be posted and given to :meth:`complete`."""
        group = self._group
        large = [each for each in plan.tensors if not each.small]
        for each, sparsity in zip(large, group.sparsities([each.name for each in large]), strict=True):
            each.sparsity = sparsity
        chunks = plan.chunks(group.backend.message_entries)
        known = [self._known(phases, chunk) for chunk in chunks]
        in_slots = bool(chunks) and all(known)
        if chunks and not in_slots:
            self._compare_unknown(chunks[0].fingerprint)
        # The stream of a pending tensor needs to know what it sent.
        names = {tensor.name for tensor in plan.tensors} if self._pending else ()
        again = any(t.name in names for each in self._pending for t in each.plan.tensors)
        if not in_slots or again or self._kept > MOST_PENDING:
            self.finish()
        self._kept += sum([each.kept for each in plan.tensors])
        capacities = known if in_slots else None
        return PlanExchange(group, self._order, phases, plan, chunks, exchange_record, capacities)

    def complete(self, exchange: PlanExchange) -> None:
        """Receive and add up the messages of an exchange, which stays pending if they are in slots."""
        exchange.finish()
        if exchange.in_slots:
            self._pending.append(exchange)
            return
        for chunk in exchange.chunks:
            if not self._group.backend.lengths_on_host:
                self._remember_first(chunk)
            self._group.give_back(chunk.writers)
        self._finished(exchange.plan)

    def replace_result(self, name: str, tensor: Tensor) -> None:
        """Correct ``tensor`` instead of the pending tensor of that name, if a message did not fit."""
        for exchange in self._pending:
            for chunk in exchange.chunks:
                for each in chunk.plan.tensors:
                    if each.name == name:
                        each.tensor = tensor

    def _known(self, phases: Sequence[Phase], chunk: ReductionPlan) -> list[AgreedCapacities]:
        """Return the capacities of a chunk's slots; none if its messages are to travel with their lengths."""
        if self._group.backend.lengths_on_host or not self._capacities.has(chunk.fingerprint):
            return []
        known = self._capacities[chunk.fingerprint]
        fits = {each.tensor.dtype for each in chunk.tensors}.issubset(GRAD_DTYPES)
        return known if fits and len(known) == len(phases) else []

    def _compare_unknown(self, fingerprint: int) -> None:
        """Compare a plan that this rank does not know with those of the others, before its messages travel
        with their lengths. Ranks that reduce what they reduced in the last step send slots.

        Raises:
            DesyncError: The others know their plan, or it is another one. They find that in their slots.
        """
        group = self._group
        slots_of_others = self._expected()
        if not slots_of_others:
            return
        unknown = fingerprint ^ 1
        sent = slots_of_others[0].send_empty(group.device, 0, unknown)
        group.exchange.await_device("exchange of sizes")
        try:
            group.exchange.checked_sizes(sent.headers().tolist(), unknown)
        except DesyncError:
            fail(slots_of_others[1:], group.device)
            raise

    def _remember_first(self, chunk: ExchangedChunk) -> None:
        """Remember messages that were exchanged with their lengths: the next ones travel in slots."""
        known: list[AgreedCapacities] = []
        plan, exchange = chunk.plan, self._group.exchange
        for sent in chunk.sent:
            bounds, shared = sent.phase.largest_messages(plan), sent.phase.to_all
            known.append(AgreedCapacities(exchange, plan.fingerprint, bounds, shared=shared))
            sizes = {rank: message.numel() for rank, message in enumerate(sent.messages)}
            known[-1].remember(sizes, sent.received)
        self._capacities[plan.fingerprint] = known

    # -- finished ---

    def finish(self) -> None:
        """Check the pending exchanges; messages that did not fit are exchanged now.

        Raises:
            DesyncError: A rank failed, or exchanges other tensors.
            PayloadError: A message arrived damaged.
        """
        pending, self._pending, self._kept = self._pending, [], 0.0
        if not pending:
            return
        chunks = [chunk for exchange in pending for chunk in exchange.chunks]
        phases = [
            (sent, slots) for chunk in chunks for sent in chunk.sent if (slots := sent.slots) is not None
        ]
        stats = [part for sent, _ in phases for each in sent.written for part in each.encoded.stats]
        also = [sent.heads for sent, _ in phases]
        names = [each.name for exchange in pending for each in exchange.plan.tensors]
        which = " to ".join(dict.fromkeys([*names[:1], *names[-1:]]))
        what = f"exchange of messages of {len(names)} tensors, {which},"
        self._group.exchange.await_device(what)  # here the host waits, not where it sends
        figures = iter(read_figures(stats, also))
        results = iter([_Result(sent, slots, next(figures)) for sent, slots in phases])
        with self._group.recorded(self._cls) as exchange_record:
            for exchange in pending:
                for chunk in exchange.chunks:
                    self._close(chunk, [next(results) for _ in chunk.sent], exchange_record)
                self._finished(exchange.plan)

    def _close(self, chunk: ExchangedChunk, results: Sequence[_Result], exchange_record: Record) -> None:
        """Check the results of a chunk, and complete them."""
        known = self._capacities[chunk.plan.fingerprint]
        for result in results:
            self._check(chunk.plan, result)
        messages = self._resend(known[0], results[0])
        affected = results[-1].truncated_from | results[-1].invalid_from
        if len(results) == 2 and affected:
            messages = self._answer_again(chunk.plan, results, affected, messages)
        if affected:
            with exchange_record.timed("decode"):
                for destination in results[-1].sent.phase.destinations(chunk.plan):
                    if affected & set(destination.senders):
                        destination.add_again([messages[sender] for sender in destination.senders])
        for capacities, result in zip(known, results, strict=True):
            result.sent.received = result.received_bytes
            capacities.remember(result.sent_bytes, result.received_bytes)
            self._group.account(result.sent.written, exchange_record)
        self._group.give_back(chunk.writers)

    def _check(self, plan: ReductionPlan, result: _Result) -> None:
        bounds = result.sent.phase.largest_messages(plan)
        self._group.exchange.checked_sizes(result.headers, plan.fingerprint, bounds)
        for sender, (*_, error) in enumerate(result.headers):
            if error:
                own, problem = self._group.rank, KERNEL_ERRORS[error]
                raise PayloadError(f"rank {own}: message from rank {sender} of the group: {problem}")

    def _resend(self, capacities: AgreedCapacities, result: _Result) -> list[Tensor]:
        """Send what did not fit; return all messages, if one to this rank did not."""
        writer, rank = result.sent.writer, self._group.rank
        arrived = capacities.resend(result.slots, writer, result.sent_bytes, result.received_bytes)
        if not result.truncated_from | result.invalid_from:
            return []
        arrived[rank] = writer.read()[0 if capacities.shared else rank]
        return [
            arrived[sender] if sender in arrived else result.slots.message_from(sender, size)
            for sender, size in result.received_bytes.items()
        ]

    def _answer_again(
        self,
        plan: ReductionPlan,
        results: Sequence[_Result],
        affected: Iterable[int],
        messages: Sequence[Tensor],
    ) -> list[Tensor]:
        """Exchange, with their lengths, the answers of owners that lacked a message, and those that did not
        fit; return the answers of all ranks, empty for the others.
        """
        first, second, rank = results[0].sent.phase, results[1].sent.phase, self._group.rank
        sent, answer = results[1].sent, results[1].slots.received[:0]
        writer = sent.writer
        if rank in results[1].invalid_from:
            for destination in first.destinations(plan):
                destination.add_again([messages[sender] for sender in destination.senders])
            writer.clear()
            with self._group.backend.batched():
                sent.written = second.write(plan, writer)
        if rank in affected:
            answer = writer.message
            results[1].sent_bytes = dict.fromkeys(results[1].sent_bytes, answer.numel())
        answers = self._group.exchange.all_gather(
            answer, plan.fingerprint, bounds=second.largest_messages(plan)
        )
        results[1].received_bytes |= {owner: answers[owner].numel() for owner in affected}
        return answers


class _Result:
    """The figures of one phase, as the host reads them.

    Attributes:
        headers: First words of the slot from each sender; the last is what is wrong with its message.
        sent_bytes, received_bytes: Bytes of the messages by receiver, and by sender.
        truncated_from: Senders whose message did not fit.
        invalid_from: Senders whose message stands for nothing, since they lacked another.
    """

    def __init__(self, sent: SentPhase, slots: Slots, words: Sequence[int]) -> None:
        self.sent, self.slots = sent, slots
        self.headers = [words[first : first + WORDS] for first in range(0, len(words), WORDS)]
        sizes = sent.writer.sizes()
        sizes *= len(self.headers) if sent.phase.to_all else 1
        self.sent_bytes = dict(enumerate(sizes))
        self.received_bytes = {r: row[0] for r, row in enumerate(self.headers)}
        self.truncated_from = {r for r, size in self.received_bytes.items() if size > slots.room_from[r]}
        self.invalid_from = {r for r, row in enumerate(self.headers) if row[2]}
