"""The exchange of a plan's messages, chunk by chunk, the same on every device.

A plan is cut between tensors. The message of the first chunk leaves before the last chunk is made, and sums
begin with the first message that arrives. Where the host knows the lengths of messages, they travel with
their lengths. Where lengths stay on a device, messages travel in slots, and
:class:`.pending_exchanges.PendingExchanges` checks them later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from ..codecs.message import MessageWriter
from ..metrics import Record, profiled
from ..transport.exchange import Exchange
from ..transport.slots import AgreedCapacities, Slots, fail
from .plan import ReductionPlan
from .stream_group import StreamGroup, WrittenTensor
from .topology import Phase


@dataclass
class SentPhase:
    """The messages of one phase of a chunk.

    Attributes:
        writer: That of the messages: one for each receiver, or one for all.
        written: The tensors in the messages of this rank.
        messages: The messages by receiver, if the host knows their lengths.
        slots, capacities: Those of messages whose lengths are on a device; else None.
        add_up: Adds up the messages in slots, see :meth:`.Phase.prepare_sum`.
        heads: int64 [ranks, WORDS]: the first words of the slot from each sender, the last of which is what
            kernels found wrong with its message.
    """

    phase: Phase
    writer: MessageWriter
    written: list[WrittenTensor]
    messages: Sequence[Tensor] = ()
    slots: Slots | None = None
    capacities: AgreedCapacities | None = None
    add_up: Callable[[], Tensor] | None = None
    heads: Tensor = field(init=False)


@dataclass
class ExchangedChunk:
    """A chunk of a plan, its memory, and the phases that were sent so far."""

    plan: ReductionPlan
    writers: tuple[MessageWriter, MessageWriter]
    """That of messages to each rank, and that of a message to all of them."""
    sent: list[SentPhase] = field(default_factory=list)


class SendOrder:
    """The order in which a step sends its messages. It is that of the step before, most often."""

    def __init__(self) -> None:
        self._step = -1
        self._last: list[tuple[int, int]] = []
        self._now: list[tuple[int, int]] = []

    def note(self, step: int, fingerprint: int, phase: int) -> None:
        """Note that a phase of a chunk is sent."""
        self.following(step)
        self._now.append((fingerprint, phase))

    def following(self, step: int) -> list[tuple[int, int]]:
        """Return the fingerprints and phases that are still to be sent, if the step is like the last one."""
        if step != self._step:
            self._step, self._last, self._now = step, self._now, []
        return self._last[len(self._now) :]


class PlanExchange:
    """The exchange of the chunks of a plan.

    Every rank posts the chunks in the same order and collects them in the same order, but may do so at
    different times. A failure is passed on to the ranks that wait for any of them.

    Args:
        group: Streams and process group.
        order: The order of the messages in a step.
        phases: Phases of the exchange: one, or two of which the second answers the first.
        plan: The plan.
        chunks: Its parts.
        exchange_record: Record of the exchange.
        capacities: By chunk, those of the slots of each phase; None where messages travel with their lengths.

    Attributes:
        chunks: The chunks that were posted.

    Raises:
        ValueError: There are more phases than two, or none.
    """

    def __init__(
        self,
        group: StreamGroup,
        order: SendOrder,
        phases: Sequence[Phase],
        plan: ReductionPlan,
        chunks: Sequence[ReductionPlan],
        exchange_record: Record,
        capacities: Sequence[Sequence[AgreedCapacities]] | None,
    ) -> None:
        if len(phases) not in (1, 2):
            raise ValueError(f"an exchange has one phase, or two; this one has {len(phases)}")
        self._group, self._order, self._phases, self._exchange_record = group, order, phases, exchange_record
        self._exchange: Exchange = group.exchange
        self.plan, self.in_slots = plan, capacities is not None
        self.chunks: list[ExchangedChunk] = []
        self._to_post = list(chunks)
        self._unsent = deque(of[phase] for phase in range(len(phases)) for of in capacities or ())
        """Capacities of the slots that are still to be sent, in order."""

    def post(self) -> None:
        """Send the messages of the first phase."""
        phase = self._phases[0]
        with self._preparing(len(self._to_post)):
            for plan in self._to_post:
                chunk = ExchangedChunk(plan, self._group.take_writers())
                self._send(phase, chunk)
                self.chunks.append(chunk)

    def finish(self) -> None:
        """Receive the messages and add them up, and answer them if there are two phases."""
        if len(self._phases) == 2:
            with self._exchange.preparing(posts=0):  # all: a rank that failed on the way does not answer any
                received = [self._receive(chunk) for chunk in self.chunks]
            with self._preparing(len(received)):
                for chunk, messages in zip(self.chunks, received, strict=True):
                    self._add(chunk, messages)
                    self._send(self._phases[1], chunk)
        with self._exchange.preparing(posts=0):
            for chunk in self.chunks:
                self._add(chunk, self._receive(chunk))

    def _send(self, phase: Phase, chunk: ExchangedChunk) -> None:
        """Write and send the messages of a phase: one for each rank, or one for all."""
        group, plan, writer = self._group, chunk.plan, chunk.writers[phase.to_all]
        # Payloads, slots and the coming sum are one batch, of which one table goes to the device: before the
        # messages do, on their stream. What is to run behind messages that arrive runs behind that copy, too.
        with profiled("dct.select"), group.backend.batched():
            sent = SentPhase(phase, writer, phase.write(plan, writer))
            if self.in_slots:
                self._fill_slots(sent, plan)
        if sent.slots is None:
            sent.messages = writer.read() * (group.world_size if phase.to_all else 1)
            with self._exchange_record.timed("exchange"):
                self._exchange.post(sent.messages, group.at_step(plan.fingerprint))
            group.account(sent.written, self._exchange_record)
        else:
            self._unsent.popleft()
            self._order.note(group.step, plan.fingerprint, self._phases.index(phase))
            with self._exchange_record.timed("exchange"):
                sent.slots.send(self._exchange)
        chunk.sent.append(sent)

    def _fill_slots(self, sent: SentPhase, plan: ReductionPlan) -> None:
        """Put the messages of a phase into slots, and prepare the sum of those that arrive."""
        group, phase = self._group, sent.phase
        sent.capacities = self._unsent[0]
        sent.slots = slots = sent.capacities.slots(group.device)
        nothing = phase.nothing_to_add
        fingerprint = group.at_step(plan.fingerprint)
        group.backend.write_slots(sent.writer, slots.memory, slots.bounds_to, fingerprint, nothing)
        sent.add_up = phase.prepare_sum(plan, slots)

    def _receive(self, chunk: ExchangedChunk) -> list[Tensor]:
        """Return the messages of the last phase from all ranks; none where they are in slots."""
        sent = chunk.sent[-1]
        if self.in_slots:
            return []
        bounds = sent.phase.largest_messages(chunk.plan)
        with self._exchange_record.timed("exchange"):
            return self._exchange.collect(sent.messages[self._group.rank], bounds=bounds)

    def _add(self, chunk: ExchangedChunk, messages: Sequence[Tensor]) -> None:
        """Add up the messages of the last phase."""
        sent = chunk.sent[-1]
        with self._exchange_record.timed("decode"):
            if sent.add_up is None:
                for destination in sent.phase.destinations(chunk.plan):
                    destination.add_messages([messages[sender] for sender in destination.senders])
                return
            sent.heads = sent.add_up()

    def _preparing(self, count: int) -> AbstractContextManager[None]:
        """Surround the work that sends so many messages to each rank. If it fails, the other ranks, which may
        be waiting for them already, are told.
        """
        return self._exchange.preparing(posts=0 if self.in_slots else count, failed=self._fail)

    def _fail(self) -> None:
        fail(self._unsent, self._group.device)
