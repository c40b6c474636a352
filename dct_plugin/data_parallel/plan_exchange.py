"""The exchange of a plan: its messages are encoded and sent, and those that arrive are added.

A plan is cut between tensors. The message of the first chunk leaves before the last chunk is made, and sums
begin with the first message that arrives. Here messages travel with their lengths. Where lengths stay on a
device, they travel in slots: :mod:`.pending_exchanges`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..codecs.message import MessageWriter
from ..metrics import TENSOR, Record, profiled
from ..transport.exchange import Preparation
from .plan import ReductionPlan
from .stream_group import StreamGroup
from .topologies import Phase, WrittenTensor


@dataclass
class Sent:
    """The messages of one phase of a chunk.

    Attributes:
        written: The tensors in the messages of this rank.
        messages: The messages by receiver, if they travel with their lengths.
        lacking: Senders whose messages hold nothing, see :meth:`.Phase.complete`.
    """

    phase: Phase
    written: list[WrittenTensor]
    messages: Sequence[Tensor] = ()
    lacking: Sequence[int] = ()


@dataclass
class Chunk:
    """A chunk of a plan, its memory, and the phases that were sent so far."""

    plan: ReductionPlan
    writers: tuple[MessageWriter, MessageWriter]
    """That of messages to each rank, and that of a message to all of them."""
    sent: list[Any] = field(default_factory=list)
    arriving: Callable[[], list[Tensor]] | None = None
    """Returns the messages of the phase that was sent last, if another thread receives them."""


class PlanExchanges:
    """Exchanges plans between the ranks of a group, one after the other.

    Args:
        group: Streams and process group.
        finished: Called for each plan whose results are complete.
    """

    def __init__(self, group: StreamGroup, finished: Callable[[ReductionPlan], None]) -> None:
        self.group, self.finished = group, finished
        self.spare_writers: list[tuple[MessageWriter, MessageWriter]] = []
        """Writers whose messages have left."""

    def preparing(self) -> AbstractContextManager[Preparation]:
        """Surround work before the next exchange. The other ranks may wait in it already: an error is told
        where they wait.
        """
        return self.group.exchange.preparing()

    def start(self, phases: Sequence[Phase], plan: ReductionPlan, exchange_record: Record) -> PlanExchange:
        """Send the messages of a plan; return its exchange, to be waited for.

        Args:
            phases: One phase, or two of which the second answers the first.
            plan: The plan.
            exchange_record: Record of the exchange.
        """
        with self.preparing() as preparation:
            exchange = PlanExchange(self, phases, plan, exchange_record)
            preparation.posts = len(exchange.chunks)
            exchange.post()
        return exchange

    def finish(self) -> None:
        """Complete the results of all exchanges; a collective."""

    def take_writers(self) -> tuple[MessageWriter, MessageWriter]:
        """Return empty message writers: of a message for each rank, and of one for all of them."""
        if not self.spare_writers:
            device = self.group.device
            return MessageWriter(device, self.group.world_size), MessageWriter(device)
        writers = self.spare_writers.pop()
        for writer in writers:
            writer.clear()
        return writers

    def account(self, written: Sequence[WrittenTensor], exchange_record: Record) -> None:
        """Let thresholds follow what was written, and record it; the first figure read reads all of them."""
        group, metrics, records = self.group, self.group.metrics, []
        for name, cls, encoded, stream, dense_bytes, copies, label in written:
            totals = encoded.totals()
            if totals.nonfinite and name is not None and not group.nonfinite_reported:
                group.report_nonfinite(name)
            if stream is not None:
                stream.observe(encoded, totals)
            if metrics is None:
                continue
            sent, copied = 0, iter(copies)
            for stats in encoded.stats:
                for nbytes in stats.sizes:
                    sent += nbytes * next(copied)
            record = encoded.record(cls, dense_bytes=dense_bytes, sent_bytes=sent, totals=totals)
            records.append(record)
            exchange_record.sent_bytes -= record.sent_bytes
            exchange_record.select_ms -= record.select_ms + record.encode_ms
            if label:
                records.append(replace(record, cls=f"{cls}/{label}"))
            if metrics.config.tensors and name is not None and encoded.density < 1:
                records.append(replace(record, cls=f"{cls}{TENSOR}{name}"))
        if metrics is not None:
            metrics.record(*records)


class PlanExchange:
    """The exchange of one plan.

    All ranks post and collect messages in the same order, but may do so at different times. A failure is
    passed on to the ranks that wait for any of them.

    Args:
        exchanges: The exchanges of the group.
        phases, plan, exchange_record: See :meth:`PlanExchanges.start`.

    Attributes:
        chunks: The chunks of the plan.

    Raises:
        ValueError: There are more phases than two, or none.
    """

    def __init__(
        self,
        exchanges: PlanExchanges,
        phases: Sequence[Phase],
        plan: ReductionPlan,
        exchange_record: Record,
    ) -> None:
        if len(phases) not in (1, 2):
            raise ValueError(f"an exchange has one phase, or two; this one has {len(phases)}")
        self._exchanges, self._group = exchanges, exchanges.group
        self.plan, self._phases, self._record = plan, phases, exchange_record
        self._step = self._group.step  # answers may be sent in a later one
        parts = plan.chunks(self._group.backend.message_entries)
        self.chunks = [Chunk(part, exchanges.take_writers()) for part in parts]

    def post(self) -> None:
        """Send the messages of the first phase; called within :meth:`PlanExchanges.preparing`."""
        for chunk in self.chunks:
            self._send(self._phases[0], chunk)

    @property
    def arrives_in_background(self) -> bool:
        """True if another thread receives the messages."""
        return all(chunk.arriving is not None for chunk in self.chunks)

    def answer(self) -> None:
        """Receive the messages of the first of two phases, add them up and answer them. Errors as of
        :meth:`wait`.
        """
        if all(len(chunk.sent) == len(self._phases) for chunk in self.chunks):
            return
        in_background = self.arrives_in_background
        with self._group.exchange.preparing(posts=0):  # all: a rank that failed on the way answers none
            received = [self._receive(chunk) for chunk in self.chunks]
        with self._preparing(len(received)):
            for chunk, messages in zip(self.chunks, received, strict=True):
                self._add(chunk, messages)
                self._send(self._phases[1], chunk)
        if in_background:
            receive_in_background([self])

    def wait(self) -> None:
        """Receive the messages and add them up, and answer them if there are two phases.

        Raises:
            DesyncError: A rank failed, or exchanges other tensors.
            PayloadError: A message arrived damaged.
        """
        if len(self._phases) > 1:
            self.answer()
        with self._group.exchange.preparing(posts=0):
            for chunk in self.chunks:
                self._add(chunk, self._receive(chunk))
        self._done()

    def _done(self) -> None:
        """Complete the messages that lack something, and say that the sums of the plan are complete."""
        for chunk in self.chunks:
            sent = chunk.sent[-1]
            if sent.lacking:
                sent.phase.complete(chunk.plan, sent.lacking)
            self._exchanges.spare_writers.append(chunk.writers)
        self._exchanges.finished(self.plan)

    def _preparing(self, posts: int) -> AbstractContextManager[Preparation]:
        """Surround the work that sends so many messages to each rank."""
        return self._group.exchange.preparing(posts=posts)

    def _send(self, phase: Phase, chunk: Chunk) -> None:
        """Encode and send the messages of a phase: one for each rank, or one for all."""
        group, writer = self._group, chunk.writers[phase.to_all]
        with profiled("dct.select"), group.backend.batched():
            sent = Sent(phase, phase.encode(chunk.plan, writer))
        sent.messages = writer.read() * (group.world_size if phase.to_all else 1)
        with self._record.timed("exchange"):
            group.exchange.post(sent.messages, chunk.plan.fingerprint + self._step)
        self._exchanges.account(sent.written, self._record)
        chunk.sent.append(sent)

    def _receive(self, chunk: Chunk) -> list[Tensor]:
        """Return the messages of the last phase from all ranks."""
        sent, receive, chunk.arriving = chunk.sent[-1], chunk.arriving or self.receiver(chunk), None
        with self._record.timed("exchange"):
            messages = receive()
        if sent.phase.follows:
            sent.lacking = [sender for sender, message in enumerate(messages) if not message.numel()]
        return messages

    def receiver(self, chunk: Chunk) -> Callable[[], list[Tensor]]:
        """Return a function that receives the messages of the last phase from all ranks."""
        group, sent = self._group, chunk.sent[-1]
        bounds = sent.phase.largest_messages(chunk.plan)
        return functools.partial(group.exchange.collect, sent.messages[group.rank], bounds=bounds)

    def _add(self, chunk: Chunk, messages: Sequence[Tensor]) -> None:
        """Add the messages of the last phase."""
        with self._record.timed("decode"):
            chunk.sent[-1].phase.add(chunk.plan, messages)


def receive_in_background(exchanges: Sequence[PlanExchange]) -> None:
    """Let another thread receive the messages of exchanges in their order, where the transport can. Those in
    slots arrive on the current stream.
    """
    sent = [(each, chunk) for each in exchanges for chunk in each.chunks if chunk.sent[-1].messages]
    if not sent:
        return
    receivers = [each.receiver(chunk) for each, chunk in sent]
    arriving = sent[0][0]._group.exchange.announced.in_background(receivers)
    for (_, chunk), messages in zip(sent, arriving, strict=False):
        chunk.arriving = messages
