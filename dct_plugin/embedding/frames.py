"""Exchanges whose messages' sizes are not read from a device before they are sent.

A message travels in a frame (:mod:`dct_plugin.codecs.slots`) whose size both ends work out alike: from what
they know of the message (its entries, its segments), and from what the last messages between the two have
taken per entry. What does not fit is sent again, whole. The first messages are exchanged with their sizes,
and with the proof that all ranks mean the same.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..codecs.slots import ALIGNMENT, FAILED, PREFIX, WORDS
from ..transport.exchange import Exchange

__all__ = ["Frames", "Leg", "Series", "Shape"]

#: Messages whose sizes decide over the next frame, and what it has to spare over the largest of them.
_REMEMBERED, _SPARE = 4, 9 / 8
_FRAMED = 1 << 62


class Shape(NamedTuple):
    """What both ends know of a message beforehand.

    Attributes:
        entries: That its size grows with; 0: nothing is sent.
        fixed: Bytes that it has besides.
        most: Bytes that it cannot exceed; None: not known.
    """

    entries: int
    fixed: int = 0
    most: int | None = None


class Series:
    """Sizes of the last messages from one rank to another."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, shape: Shape, nbytes: int) -> None:
        """One more."""
        if shape.entries:
            self._shares.append(max(nbytes - shape.fixed, 0) / shape.entries)

    def frame(self, shape: Shape) -> int:
        """Bytes of the next frame."""
        if not shape.entries:
            return 0
        room = shape.most
        if self._shares:
            expected = shape.fixed + math.ceil(_SPARE * max(self._shares) * shape.entries)
            room = expected if room is None else min(room, expected)
        assert room is not None  # sizes of such messages have been exchanged
        return PREFIX + -(-room // ALIGNMENT) * ALIGNMENT


class Leg:
    """One exchange under way.

    Attributes:
        frames: What it is an exchange of.
        leaving: uint8, all frames that are sent; those that arrive are in ``arriving``.
        sends, bounds: Of each rank, first byte of its frame in them and the one behind it.
    """

    def __init__(
        self, frames: Frames, sends: Sequence[int], gets: Sequence[int], device: torch.device
    ) -> None:
        self.frames = frames
        self.sends, self.bounds = _bounds(sends), _bounds(gets)
        self.leaving = torch.empty(sum(sends), dtype=torch.uint8, device=device)
        self.arriving = torch.empty(sum(gets), dtype=torch.uint8, device=device)

    def frame(self, receiver: int) -> Tensor:
        """To be filled."""
        begin, end = self.sends[receiver]
        return self.leaving[begin:end]

    def words(self, senders: Sequence[int], arrived: Tensor | None = None) -> Tensor:
        """First words of the frames that arrived, int64 [senders, WORDS]; of a copy of them."""
        words = (self.arriving if arrived is None else arrived).view(torch.int64)
        firsts = [words[self.bounds[s][0] // 8 :][:WORDS] for s in senders]
        return torch.cat([words[:0], *firsts]).view(-1, WORDS)


class Frames:
    """Frames between this rank and all others, for messages of one kind.

    Args:
        exchange: The transport.
        fingerprint: Of the operation, 32 bits.

    Attributes:
        fingerprint: That of the operation in frames: a rank that exchanges sizes every time is another one's.
    """

    def __init__(self, exchange: Exchange, fingerprint: int) -> None:
        self.exchange = exchange
        self.fingerprint = fingerprint | _FRAMED
        self.known = False
        """Whether messages have been exchanged before."""
        ranks = range(exchange.world_size)
        self.series = [Series() for _ in ranks], [Series() for _ in ranks]
        """Of the messages to every rank, and from it."""

    def leg(self, sent: Sequence[Shape], got: Sequence[Shape], device: torch.device) -> Leg:
        """Frames for messages to and from all ranks; there are none from and to this one."""
        rank = self.exchange.rank
        sends, gets = (
            [series.frame(shape) for series, shape in zip(each, shapes, strict=True)]
            for each, shapes in zip(self.series, (sent, got), strict=True)
        )
        sends[rank] = gets[rank] = 0
        return Leg(self, sends, gets, device)

    def send(self, leg: Leg) -> None:
        """Exchange the frames."""
        self.exchange.transfer_into(
            [leg.frame(r) for r in range(len(leg.sends))], [leg.arriving[a:b] for a, b in leg.bounds]
        )

    @contextmanager
    def telling(self, leg: Leg) -> Iterator[None]:
        """The ranks that are waiting for the frames are told of an error."""
        try:
            yield
        except BaseException:
            self._fail(leg)
            raise

    def _fail(self, leg: Leg) -> None:
        """Send frames that say so. Never raises."""
        try:
            words = torch.zeros(leg.leaving.numel() // 8, dtype=torch.int64)
            words[[begin // 8 for begin, end in leg.sends if end > begin]] = FAILED
            leg.leaving.copy_(to_device(words.view(torch.uint8), leg.leaving.device))
            self.send(leg)
        except Exception:  # the transport is gone as well: the others will see that
            return

    def cross(self, leg: Leg, messages: Sequence[Tensor], shape: Shape) -> list[Tensor]:
        """What all ranks say, uint8 on the host, when this one says ``messages``, which are there, too; the
        host waits once. The own message is passed through.

        Args:
            leg: For messages that all have ``shape``.

        Raises:
            DesyncError: See :meth:`checked`.
        """
        peers = [r for r in range(len(messages)) if r != self.exchange.rank]
        room = torch.zeros(leg.leaving.numel(), dtype=torch.uint8)
        for r in peers:
            begin, end = leg.sends[r]
            head = torch.tensor([messages[r].numel(), self.fingerprint, 0, 0])
            content = torch.cat([head.view(torch.uint8), messages[r]])[: end - begin]
            room[begin : begin + content.numel()] = content
        leg.leaving.copy_(to_device(room, leg.leaving.device))
        self.send(leg)
        there = to_host(leg.arriving)
        words = leg.words(peers, there).view(-1).tolist()
        sizes = self.checked(words, peers, [shape] * len(messages))
        late = self.again(leg, {r: messages[r] for r in peers}, sizes)
        received = list(messages)
        for r in peers:
            begin = leg.bounds[r][0] + PREFIX
            received[r] = to_host(late[r]) if r in late else there[begin : begin + sizes[r]]
        self.learn([shape] * len(messages), messages, [shape] * len(messages), received)
        return received

    def learn(
        self,
        sent: Sequence[Shape],
        messages: Sequence[Tensor],
        got: Sequence[Shape],
        received: Sequence[Tensor],
    ) -> None:
        """What messages to and from all ranks have taken."""
        self.known = True
        self.note(sent, {r: message.numel() for r, message in enumerate(messages)}, 0)
        self.note(got, {r: message.numel() for r, message in enumerate(received)}, 1)

    def note(self, shapes: Sequence[Shape], sizes: Mapping[int, int], direction: int) -> None:
        """What messages to some ranks (0), or from some (1), have taken."""
        for r, size in sizes.items():
            self.series[direction][r].add(shapes[r], size)

    def checked(self, words: Sequence[int], senders: Sequence[int], got: Sequence[Shape]) -> dict[int, int]:
        """Bytes of the messages of ``senders``, from the first words of their frames.

        Raises:
            DesyncError: A rank failed, or is at another operation.
        """
        rows = [(0, self.fingerprint)] * self.exchange.world_size
        bounds = [0] * len(rows)
        for at, sender in enumerate(senders):
            rows[sender] = (words[WORDS * at], words[WORDS * at + 1])
            most = got[sender].most
            bounds[sender] = rows[sender][0] if most is None else most
        sizes = self.exchange.checked(rows, self.fingerprint, bounds)
        return {sender: sizes[sender] for sender in senders}

    def again(self, leg: Leg, whole: dict[int, Tensor], sizes: dict[int, int]) -> dict[int, Tensor]:
        """Send again what did not fit; returns the messages that did not arrive whole, by sender.

        Args:
            whole: The messages sent, by receiver.
            sizes: Of those that arrived, by sender.
        """
        ranks = range(self.exchange.world_size)
        cut = {r for r, m in whole.items() if m.numel() > _room(leg.sends[r])}
        late = {s for s, size in sizes.items() if size > _room(leg.bounds[s])}
        if not cut and not late:
            return {}
        device, nothing = leg.arriving.device, leg.arriving[:0]
        arrived = self.exchange.transfer(
            [whole[r].to(device) if r in cut else nothing for r in ranks],
            [sizes[r] if r in late else 0 for r in ranks],
        )
        return {sender: arrived[sender] for sender in late}


def _room(bound: tuple[int, int]) -> int:
    """Bytes that a frame has for its message."""
    return bound[1] - bound[0] - PREFIX


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
