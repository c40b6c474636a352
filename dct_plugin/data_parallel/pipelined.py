"""The transport of messages whose sizes the host knows: several chunks of a plan travel at once.

A plan is cut between tensors. The message of the first chunk leaves before the last chunk is made, and sums
begin with the first message that arrives.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ..codecs.message import MessageWriter, read_messages
from ..metrics import Record
from .node_chunks import NodeChunks
from .plan import ReductionPlan
from .stream_group import StreamGroup, WrittenTensor
from .topology import Phase


class PipelinedExchange:
    """The exchange of the chunks of a plan.

    Every rank posts the chunks in the same order and collects them in the same order, but may do so at
    different times. A failure is passed on to the ranks that wait for any of them.

    Args:
        group: Streams and process group.
        phases: Phases of the exchange: one, or two of which the second answers the first.
        chunks: Parts of the plan.
        whole: Record of the exchange.
        remember: Told the phase, the chunk and the messages sent and received, after each exchange.
        inside: What the ranks of a node do with the chunks, which are this rank's parts then.
    """

    def __init__(
        self,
        group: StreamGroup,
        phases: Sequence[Phase],
        chunks: Sequence[ReductionPlan],
        whole: Record,
        remember: Callable[[int, ReductionPlan, Sequence[Tensor], Sequence[Tensor]], None] | None = None,
        inside: NodeChunks | None = None,
    ) -> None:
        self._group, self._phases, self._chunks, self._whole = group, phases, chunks, whole
        self._exchange = group.exchange
        self._remember = remember
        self._inside = inside
        sizes = [len(chunk.tensors) for chunk in chunks] if inside is None else inside.sizes
        self._ends = list(itertools.accumulate(sizes))
        self._posted = 0
        self._arrived: list[Tensor] = []
        """Messages of the last phase, for the other ranks of the node."""
        self._writers: list[list[MessageWriter]] = []
        """Those of each chunk, in use until all messages have left."""
        self._under_way: deque[tuple[ReductionPlan, list[Tensor]]] = deque()

    @property
    def unposted(self) -> int:
        """Number of messages that the other ranks are still to get in the first phase."""
        return len(self._chunks) - self._posted

    @property
    def collectable(self) -> bool:
        """True if a chunk has been posted and :meth:`collect` may wait for it."""
        return bool(self._under_way) and len(self._phases) == 1

    def post(self, ready: int) -> None:
        """Send the chunks that the first ``ready`` tensors of the plan complete."""
        end = bisect_right(self._ends, ready)
        if end <= self._posted:
            return
        phase = self._phases[0]
        with self._exchange.preparing(posts=self.unposted):
            for index in range(self._posted, end):
                if self._inside is not None:
                    self._inside.enter(index, self._whole)
                with self._working():
                    chunk = self._chunks[index]
                    self._writers.append(self._group.take_writers())
                    writers = self._writers[-1][: 1 if phase.to_all else self._group.world_size]
                    written = phase.write(chunk, writers)
                    self._under_way.append((chunk, self._send(chunk, writers, written)))
                    self._posted += 1

    def collect(self) -> None:
        """Add up the oldest chunk that has been posted, in rank order."""
        with self._working(), self._exchange.collecting(posts=self.unposted):
            chunk, sent = self._under_way.popleft()
            self._add(0, chunk, self._receive(0, chunk, sent))

    def finish(self) -> None:
        """Post the other chunks, and collect all of them; every tensor holds its sum then."""
        self.post(self._ends[-1])
        if len(self._phases) == 2:
            with self._working():
                self._answer()
        while self._under_way:
            self.collect()
        if self._inside is not None:
            shared = self._inside.share(self._arrived, self._whole)
            with self._whole.timed("decode"):
                for chunk, messages in shared:
                    self._sum(len(self._phases) - 1, chunk, messages)
        for writers in self._writers:
            self._group.give_back(writers)

    def _answer(self) -> None:
        """Exchange the second phase, when all messages of the first have arrived."""
        with self._exchange.collecting():  # all: a rank that failed on the way does not answer any
            received = [(chunk, self._receive(0, chunk, sent)) for chunk, sent in self._under_way]
        self._under_way.clear()
        answered = []
        with self._exchange.preparing(posts=len(received)):
            for (chunk, messages), writers in zip(received, self._writers, strict=True):
                self._add(0, chunk, messages)
                written = self._phases[1].write(chunk, writers[-1:])
                answered.append((chunk, self._send(chunk, writers[-1:], written)))
        with self._exchange.collecting():
            for chunk, sent in answered:
                self._add(1, chunk, self._receive(1, chunk, sent))

    def _send(
        self, chunk: ReductionPlan, writers: Sequence[MessageWriter], written: Sequence[WrittenTensor]
    ) -> list[Tensor]:
        """Post the messages and return them, one for each rank."""
        messages = read_messages(writers)
        if len(messages) < self._group.world_size:
            messages *= self._group.world_size
        with self._whole.timed("exchange"):
            self._exchange.post(messages, chunk.fingerprint)
        self._group.account(written, self._whole)
        return messages

    def _receive(self, phase: int, chunk: ReductionPlan, sent: Sequence[Tensor]) -> list[Tensor]:
        """Return the messages from all ranks that belong to those that were ``sent``."""
        bounds = self._phases[phase].largest_messages(chunk)
        with self._whole.timed("exchange"):
            received = self._exchange.collect(sent[self._group.rank], bounds=bounds)
        if self._remember is not None:
            self._remember(phase, chunk, sent, received)
        return received

    def _working(self) -> AbstractContextManager[None]:
        """Surround work whose results the other ranks of the node wait for: they are told of an error."""
        return nullcontext() if self._inside is None else self._inside.failing_together()

    def _add(self, phase: int, chunk: ReductionPlan, messages: Sequence[Tensor]) -> None:
        if self._inside is not None and phase == len(self._phases) - 1:
            self._arrived += messages
        with self._whole.timed("decode"):
            self._sum(phase, chunk, messages)

    def _sum(self, phase: int, chunk: ReductionPlan, messages: Sequence[Tensor]) -> None:
        for destination in self._phases[phase].destinations(chunk):
            destination.add_messages([messages[sender] for sender in destination.senders])
