"""Exchanges of plans whose messages travel in slots, since their lengths stay on a device.

Lengths, figures and errors of all pending exchanges are read in one copy: those of reductions once in a step,
when the framework needs the sums; those of updates of weights before the weights are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.slots import PREFIX, WORDS
from ..codecs.stats import KERNEL_ERRORS, read_figures
from ..errors import DesyncError, PayloadError
from ..kernels.job import GRAD_DTYPES
from ..metrics import Record, profiled
from ..policy.memory import MOST_PENDING
from ..transport import lost_ranks
from ..transport.exchange import Preparation
from ..transport.slots import AgreedCapacities, Slots, fail
from .plan import BoundedTable, ReductionPlan
from .plan_exchange import Chunk, PlanExchange, PlanExchanges, Sent
from .stream_group import StreamGroup
from .topologies import Phase


def exchanges_of(
    group: StreamGroup, cls: str, finished: Callable[[ReductionPlan], None] = lambda _: None
) -> PlanExchanges:
    """Return the exchanges of a group, as the lengths of messages are on the host or on a device.

    Args:
        group: Streams and process group.
        cls: Class of the exchanges in the metrics.
        finished: Called for each plan whose results are complete.
    """
    if group.backend.lengths_on_host:
        return PlanExchanges(group, finished)
    return PendingExchanges(group, cls, finished)


class PendingExchanges(PlanExchanges):
    """Exchanges plans in slots, and checks those that are pending. A plan with a tensor that kernels do not
    write (fp64) travels with its lengths.

    Args:
        group, cls, finished: See :func:`exchanges_of`.
    """

    def __init__(self, group: StreamGroup, cls: str, finished: Callable[[ReductionPlan], None]) -> None:
        super().__init__(group, finished)
        self._cls = cls
        self._capacities: BoundedTable[int, _Known] = BoundedTable()
        """The value of each chunk, by its fingerprint."""
        self.pending: list[SlotExchange] = []
        """Exchanges whose messages are still to be checked."""
        self._kept = 0.0
        """Entries kept by the exchanges since the last check, the same on all ranks."""
        self._sent_in = -1
        """The step that sends messages now."""
        self._sent: list[tuple[int, int]] = []
        """The fingerprint and the phase of each chunk that it has sent."""
        self._sent_before: list[tuple[int, int]] = []
        """The same of the step before, whose order is that of this one, most often."""

    def preparing(self) -> AbstractContextManager[Preparation]:
        return self.group.exchange.preparing(posts=0, failed=self._fail_next)

    def _fail_next(self) -> None:
        if expected := self._expected():
            fail(expected, self.group.device)
        else:
            self.group.exchange.abort()

    def _expected(self) -> list[AgreedCapacities]:
        """Return the capacities of the slots that this step is still to send, if it is like the last one."""
        following, known = self._following(self.group.step), self._capacities
        return [known[chunk].of_phases[phase] for chunk, phase in following if known.has(chunk)]

    def note_sent(self, step: int, fingerprint: int, phase: int) -> None:
        """Note that a phase of a chunk is sent."""
        self._following(step)
        self._sent.append((fingerprint, phase))

    def _following(self, step: int) -> list[tuple[int, int]]:
        """Return the fingerprints and phases that are still to be sent, if the step is like the last one."""
        if step != self._sent_in:
            self._sent_in, self._sent_before, self._sent = step, self._sent, []
        return self._sent_before[len(self._sent) :]

    def start(self, phases: Sequence[Phase], plan: ReductionPlan, exchange_record: Record) -> PlanExchange:
        if not plan.tensors or not {each.tensor.dtype for each in plan.tensors}.issubset(GRAD_DTYPES):
            self.finish()
            return super().start(phases, plan, exchange_record)
        with self.preparing():
            exchange = self._begun(SlotExchange(self, phases, plan, exchange_record), phases)
        with exchange.sending():
            exchange.post()
        return exchange

    def _begun(self, exchange: SlotExchange, phases: Sequence[Phase]) -> SlotExchange:
        """Return an exchange with the capacities of its slots, which all ranks know."""
        plan = exchange.plan
        chunks = [chunk.plan for chunk in exchange.chunks]
        known = [self._capacities.has(chunk.fingerprint) for chunk in chunks]  # all: ranks ask alike
        if not all(known):
            self._compare_unknown(chunks[0].fingerprint)
        # The stream of a pending tensor needs to know what it sent.
        names = {tensor.name for tensor in plan.tensors} if self.pending else ()
        again = any(t.name in names for each in self.pending for t in each.plan.tensors)
        if again or self._kept > MOST_PENDING:
            self.finish()
        self._kept += sum([each.kept for each in plan.tensors])
        capacities = [self._agreed(phases, chunk) for chunk in chunks]
        exchange.unsent = deque(of[phase] for phase in range(len(phases)) for of in capacities)
        return exchange

    def _agreed(self, phases: Sequence[Phase], chunk: ReductionPlan) -> Sequence[AgreedCapacities]:
        """Return the capacities of a chunk's slots, by phase."""
        kept = [(each.sparsity.density, each.tensor.dtype) for each in chunk.tensors]
        known, bits = self._capacities.get(chunk.fingerprint), self.group.value_dtype.bits
        if known is None or (known.kept, known.value_bits) != (kept, bits):
            of_phases = [phase.capacities(chunk) for phase in phases]
            known = self._capacities[chunk.fingerprint] = _Known(kept, bits, of_phases)
        return known.of_phases

    def _compare_unknown(self, fingerprint: int) -> None:
        """Compare a plan that this rank does not know with those of the others. Ranks that reduce what they
        reduced in the last step send slots.

        Raises:
            DesyncError: The others know their plan, or it is another one. They find that in their slots.
        """
        group, slots_of_others = self.group, self._expected()
        if not slots_of_others:
            group.exchange.agree(fingerprint)
            return
        unknown = fingerprint ^ (1 << 61)  # far from all that differ by steps
        sent = slots_of_others[0].send_empty(group.device, 0, unknown)
        headers = group.exchange.received(sent.headers(), "exchange of sizes")
        try:
            group.exchange.checked_sizes(headers.tolist(), unknown)
        except DesyncError:
            fail(slots_of_others[1:], group.device)
            raise

    def finish(self) -> None:
        """Check the pending exchanges.

        Raises:
            DesyncError: A rank failed, or exchanges other tensors.
            PayloadError: A message arrived damaged.
        """
        pending, self.pending, self._kept = self.pending, [], 0.0
        if not pending:
            return
        sent = [each for exchange in pending for chunk in exchange.chunks for each in chunk.sent]
        stats = [part for each in sent for tensor in each.written for part in tensor.encoded.stats]
        names = [each.name for exchange in pending for each in exchange.plan.tensors]
        which = " to ".join(dict.fromkeys([*names[:1], *names[-1:]]))
        what = f"exchange of messages of {len(names)} tensors, {which},"
        with self.group.exchange.guard(what):  # here the host waits, not where it sends
            lost_ranks.await_device(self.group.device, self.group.exchange.peers.group)
            words = iter(read_figures(stats, [each.heads for each in sent]))
        with self.group.recorded(self._cls) as exchange_record:
            for exchange in pending:
                exchange.check(words, exchange_record)


@dataclass
class SentInSlots(Sent):
    """The messages of one phase of a chunk, in slots.

    Attributes:
        slots, capacities: The slots.
        add_up: Adds up the messages in slots, see :meth:`.Phase.prepare_sum`.
        heads: int64 [ranks, WORDS]: the first words of the slot from each sender, the last of which is what
            kernels found wrong with its message.
    """

    slots: Slots = field(init=False)
    capacities: AgreedCapacities = field(init=False)
    add_up: Callable[[], Tensor] = field(init=False)
    heads: Tensor = field(init=False)


class SlotExchange(PlanExchange):
    """The exchange of one plan in slots.

    Attributes:
        unsent: Capacities of the slots that are still to be sent, in order.
    """

    _exchanges: PendingExchanges
    unsent: deque[AgreedCapacities]

    def sending(self) -> AbstractContextManager[Preparation]:
        """Surround the work that sends slots: the other ranks, which wait for them, are told of an error."""
        return self._group.exchange.preparing(posts=0, failed=lambda: fail(self.unsent, self._group.device))

    def _preparing(self, posts: int) -> AbstractContextManager[Preparation]:
        return self.sending()

    def _done(self) -> None:
        self._exchanges.pending.append(self)

    def _send(self, phase: Phase, chunk: Chunk) -> None:
        group, plan, writer = self._group, chunk.plan, chunk.writers[phase.to_all]
        # Payloads, slots and the coming sum are one batch, of which one table goes to the device: before the
        # messages do, on their stream. What is to run behind messages that arrive runs behind that copy, too.
        with profiled("dct.select"), group.backend.batched():
            sent = SentInSlots(phase, phase.encode(plan, writer))
            sent.capacities = self.unsent[0]
            sent.slots = slots = sent.capacities.slots(group.device)
            fingerprint = plan.fingerprint + self._step
            bounds, nothing = slots.bounds_to, phase.nothing_to_add
            group.backend.write_slots(writer, slots.memory, bounds, fingerprint, nothing)
            sent.add_up = phase.prepare_sum(plan, slots)
        self.unsent.popleft()
        self._exchanges.note_sent(self._step, plan.fingerprint, self._phases.index(phase))
        with self._record.timed("exchange"):
            slots.send(group.exchange)
        chunk.sent.append(sent)

    def _receive(self, chunk: Chunk) -> list[Tensor]:
        return []

    def _add(self, chunk: Chunk, messages: Sequence[Tensor]) -> None:
        sent = chunk.sent[-1]
        with self._record.timed("decode"):
            sent.heads = sent.add_up()

    def check(self, words: Iterator[Sequence[int]], exchange_record: Record) -> None:
        """Check the messages, whose first words in their slots are the next of ``words``; record them.

        Raises:
            DesyncError, PayloadError: See :meth:`PendingExchanges.finish`.
        """
        for chunk in self.chunks:
            for sent in chunk.sent:
                self._check(chunk, sent, next(words))
                self._exchanges.account(sent.written, exchange_record)
        super()._done()

    def _check(self, chunk: Chunk, sent: SentInSlots, words: Sequence[int]) -> None:
        """Check the messages of a phase, as the first words of their slots say."""
        heads = [words[first : first + WORDS] for first in range(0, len(words), WORDS)]
        phase, room = sent.phase, sent.slots.layout.room_from
        bounds = None if phase.follows else room
        sizes = self._group.exchange.checked_sizes(heads, chunk.plan.fingerprint + self._step, bounds)
        for sender, (*_, error) in enumerate(heads):
            if error:
                own, problem = self._group.rank, KERNEL_ERRORS[error]
                raise PayloadError(f"rank {own}: message from rank {sender} of the group: {problem}")
        if phase.follows:
            sent.lacking = [rank for rank, (_, _, nothing, _) in enumerate(heads) if nothing]
            rest = [0 if h[2] else max(0, n - most) for h, n, most in zip(heads, sizes, room, strict=True)]
            if any(rest):
                self._add_longer(chunk, sent, rest)
            sent.capacities.follow(sizes)

    def _add_longer(self, chunk: Chunk, sent: SentInSlots, rest: Sequence[int]) -> None:
        """Exchange so many bytes of each message that were behind its slot, and add those messages."""
        group, slots, own = self._group, sent.slots, sent.slots.received[:0]
        if rest[group.rank]:
            own = chunk.writers[sent.phase.to_all].message[-rest[group.rank] :]
        messages = group.exchange.transfer([own for _ in rest], rest)
        for sender, (begin, end) in enumerate(slots.bounds):
            if rest[sender]:
                messages[sender] = torch.cat([slots.received[begin + PREFIX : end], messages[sender]])
        with self._record.timed("decode"):
            sent.phase.add(chunk.plan, messages)


class _Known(NamedTuple):
    """The capacities of a chunk's slots, and what they follow from.

    Attributes:
        kept: Density and type of each tensor.
        value_bits: Bits of a value.
        of_phases: The capacities by phase.
    """

    kept: Sequence[tuple[float, torch.dtype]]
    value_bits: int
    of_phases: Sequence[AgreedCapacities]
