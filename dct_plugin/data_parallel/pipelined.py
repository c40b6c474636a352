"""A plan's messages: cut between tensors, several under way at once, the first before the last is made."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..codecs.message import MessageWriter, read_messages
from ..metrics import Record
from .fixed_size import Reducing
from .plan import Item, Plan
from .stream_group import Written

__all__ = ["Pieces"]


class InPieces(Reducing, Protocol):
    """What is asked of a :class:`.reducer.GradientReducer`."""

    spare_writers: list[list[MessageWriter]]

    def density(self, item: Item) -> float: ...
    def received(
        self, piece: Plan, sent: Sequence[Tensor], arrived: Sequence[Tensor], *, answers: bool
    ) -> None: ...


class Pieces:
    """The exchange of a plan. All ranks post its pieces in order and collect them in order; when they do is
    theirs to say. A failure is passed on to the ranks that wait for any of them.

    Args:
        reducer: Whose plan it is.
        plan: What is exchanged.
        scale: Of the sums.
        whole: Record of the exchange.
    """

    def __init__(self, reducer: InPieces, plan: Plan, scale: float, whole: Record) -> None:
        self._reducer = reducer
        self._exchange = reducer.exchange
        self._scale = scale
        self._whole = whole
        with self._exchange.preparing():
            self._pieces = plan.pieces(reducer.density)
        self._direct, self._two_phase = plan.kind == "direct", plan.kind == "two_phase"
        self._ends = list(itertools.accumulate(len(piece.items) for piece in self._pieces))
        self._made = 0
        self._lent: list[list[MessageWriter]] = []
        self._under_way: deque[tuple[Plan, list[Tensor]]] = deque()

    @property
    def owed(self) -> int:
        """Messages that the other ranks are still to get."""
        return len(self._pieces) - self._made

    @property
    def collectable(self) -> bool:
        """Whether a piece has been posted that :meth:`collect` would wait for."""
        return bool(self._under_way) and not self._two_phase

    def post(self, there: int) -> None:
        """Send the pieces that the first ``there`` tensors of the plan complete."""
        end = bisect_right(self._ends, there)
        if end <= self._made:
            return
        reducer = self._reducer
        # Everybody sends everybody the same message, or every owner its own.
        ranks, copies = (1, reducer.world_size - 1) if self._direct else (reducer.world_size, 1)
        with self._exchange.preparing(posts=self.owed):
            for piece in self._pieces[self._made : end]:
                writers = self._writers()[:ranks]
                written = reducer.write(piece, writers, copies=copies)
                self._under_way.append((piece, self._send(piece, writers, written)))
                self._made += 1

    def collect(self) -> None:
        """Add up the oldest piece that has been posted, in rank order."""
        with self._exchange.collecting(posts=self.owed):
            piece, messages = self._under_way.popleft()
            outs = (
                [item.tensor for item in piece.items]
                if self._direct
                else [item.view(shard) for item, shard in piece.owned_by(self._reducer.rank)]
            )
            self._reducer.sum_into(self._collect(piece, messages), outs, self._scale, self._whole)

    def finish(self) -> None:
        """Post what was not, and collect everything: every tensor is there."""
        reducer = self._reducer
        self.post(self._ends[-1])
        if self._two_phase:
            self._answer()
        while self._under_way:
            self.collect()
        reducer.spare_writers += self._lent

    def _writers(self) -> list[MessageWriter]:
        """To every rank, until all messages have left."""
        spare, ranks = self._reducer.spare_writers, range(self._reducer.world_size)
        made = spare.pop() if spare else [MessageWriter(self._exchange.device) for _ in ranks]
        for writer in made:
            writer.clear()
        self._lent.append(made)
        return made

    def _answer(self) -> None:
        """Owners, who got everything sparse, sum it up, threshold again and send that to all."""
        reducer, answered = self._reducer, list[tuple[Plan, list[Tensor]]]()
        with self._exchange.collecting():  # all: a rank that failed on the way will not answer any
            received = [(piece, self._collect(piece, messages)) for piece, messages in self._under_way]
        self._under_way.clear()
        with self._exchange.preparing(posts=len(received)):
            for piece, messages in received:
                owned, answer = piece.owned_by(reducer.rank), MessageWriter(messages[0].device)
                totals = reducer.totals(owned)
                reducer.sum_into(messages, totals, 1.0, self._whole)
                written = reducer.write_answers(owned, totals, answer)
                answered.append((piece, self._send(piece, [answer], written)))
        with self._exchange.collecting():
            for piece, messages in answered:
                for owner, message in enumerate(self._collect(piece, messages, answers=True)):
                    views = [item.view(shard) for item, shard in piece.owned_by(owner)]
                    reducer.sum_into([message], views, self._scale, self._whole, sender=owner)

    def _send(
        self, piece: Plan, writers: Sequence[MessageWriter], written: Sequence[Written]
    ) -> list[Tensor]:
        """The messages to all ranks, on their way; one that all get has one writer."""
        messages = read_messages(writers)
        if len(messages) < self._reducer.world_size:
            messages *= self._reducer.world_size
        with self._whole.timed("exchange"):
            self._exchange.post(messages, piece.fingerprint)
        self._reducer.account(written, self._whole)
        return messages

    def _collect(self, piece: Plan, messages: Sequence[Tensor], *, answers: bool = False) -> list[Tensor]:
        """From every rank the message with the shards owned here, or there (``answers``), in the plan's
        order; ``messages`` were posted.
        """
        rank, world_size = self._reducer.rank, self._reducer.world_size
        if answers:
            bounds = [piece.bound(owner) for owner in range(world_size)]
        else:
            bounds = [piece.bound(0 if self._direct else rank)] * world_size
        with self._whole.timed("exchange"):
            arrived = self._exchange.collect(messages[rank], bounds=bounds)
        self._reducer.received(piece, messages, arrived, answers=answers)
        return arrived
