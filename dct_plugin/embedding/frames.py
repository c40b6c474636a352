"""Exchanges whose messages' sizes are not read from a device before they are sent.

A message travels in a frame (:mod:`dct_plugin.codecs.slots`). Both ends compute the same size of the frame:
from what they know of the message (its entries, its segments), and from the bytes per entry of the last
messages between the two. A message that does not fit is sent again, whole. The first messages are exchanged
with their sizes, and with the proof that all ranks mean the same.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..codecs.slots import ALIGNMENT, FAILED, PREFIX, WORDS
from ..transport.exchange import Exchange

__all__ = ["Frames", "Leg", "Shape"]

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


class DeviceMessages(Protocol):
    """Messages on a device, whose sizes the host does not know."""

    def framed(self, number: int, room: int) -> Tensor:
        """The first bytes of a message, at most ``room`` of them; some more may follow."""
        ...


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


class Arrived(NamedTuple):
    """Frames that arrived and have not been read.

    Attributes:
        words: int64 [senders, WORDS] on the device, their first words.
        begins: First byte of each message in :attr:`Leg.arriving`.
        nbytes: int64 [senders] on the device: bytes of each message that are there, without ``spare``.
        most: Bytes that none of them exceeds.
    """

    words: Tensor
    begins: list[int]
    nbytes: Tensor
    most: int


class Leg:
    """One exchange under way.

    Attributes:
        leaving: uint8, all frames that are sent; those that arrive are in ``arriving``.
        sends, bounds: Of each rank, first byte of its frame in them and the one behind it.
        sent, got: Shapes of the messages to and from every rank.
    """

    def __init__(
        self,
        fingerprint: int,
        sent: Sequence[Shape],
        got: Sequence[Shape],
        sizes: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self._fingerprint = fingerprint
        self.sent, self.got = sent, got
        self.sends, self.bounds = (
            list(itertools.pairwise(itertools.accumulate(s, initial=0))) for s in sizes
        )
        self.leaving, self.arriving = (torch.empty(sum(s), dtype=torch.uint8, device=device) for s in sizes)

    def frame(self, receiver: int) -> Tensor:
        """To be filled."""
        begin, end = self.sends[receiver]
        return self.leaving[begin:end]

    def fill(self, numbers: Mapping[int, int], messages: DeviceMessages, nbytes: Tensor) -> None:
        """Put messages into their frames, as far as they fit.

        Args:
            numbers: Number of the message for each receiver.
            nbytes: int64 [messages] on the device, their sizes.
        """
        heads = torch.zeros(len(nbytes), WORDS, dtype=torch.int64, device=nbytes.device)
        heads[:, 0] = nbytes
        heads[:, 1] = self._fingerprint
        for receiver, number in numbers.items():
            frame = self.frame(receiver)
            body = messages.framed(number, len(frame) - PREFIX)
            frame.view(torch.int64)[:WORDS] = heads[number]
            frame[PREFIX : PREFIX + len(body)] = body

    def words(self, senders: Sequence[int], arrived: Tensor | None = None) -> Tensor:
        """First words of the frames that arrived, int64 [senders, WORDS]; of a copy of them."""
        words = (self.arriving if arrived is None else arrived).view(torch.int64)
        firsts = [words[self.bounds[s][0] // 8 :][:WORDS] for s in senders]
        return torch.cat([words[:0], *firsts]).view(-1, WORDS)

    def arrived(self, senders: Sequence[int], spare: int = 0) -> Arrived:
        """Describe the messages of ``senders`` without their last ``spare`` bytes, for kernels to read."""
        begins = [self.bounds[s][0] + PREFIX for s in senders]
        rooms = [self.bounds[s][1] - begin - spare for s, begin in zip(senders, begins, strict=True)]
        words = self.words(senders)
        room = to_device(torch.tensor(rooms, dtype=torch.int64), words.device)
        nbytes = torch.minimum(words[:, 0] - spare, room).clamp(min=0)
        return Arrived(words, begins, nbytes, max(rooms, default=0))

    def message(self, sender: int, nbytes: int) -> Tensor:
        """The first bytes of the message that arrived."""
        begin = self.bounds[sender][0] + PREFIX
        return self.arriving[begin : begin + nbytes]


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
        return Leg(self.fingerprint, sent, got, (sends, gets), device)

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

    def cross(self, leg: Leg, messages: Sequence[Tensor]) -> list[Tensor]:
        """Send ``messages`` to all ranks and return theirs, uint8 on the host, which waits once. The own
        message is passed through.

        Raises:
            DesyncError: See :meth:`finish`.
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
        copy = to_host(leg.arriving)
        words = leg.words(peers, copy).view(-1).tolist()
        late, sizes = self.finish(leg, {r: messages[r] for r in peers}, words, peers)
        received = list(messages)
        for r in peers:
            begin = leg.bounds[r][0] + PREFIX
            received[r] = to_host(late[r]) if r in late else copy[begin : begin + sizes[r]]
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
        self._note(sent, {r: message.numel() for r, message in enumerate(messages)}, 0)
        self._note(got, {r: message.numel() for r, message in enumerate(received)}, 1)

    def _note(self, shapes: Sequence[Shape], sizes: Mapping[int, int], direction: int) -> None:
        """What messages to some ranks (0), or from some (1), have taken."""
        for r, size in sizes.items():
            self.series[direction][r].add(shapes[r], size)

    def finish(
        self, leg: Leg, messages: Mapping[int, Tensor], words: Sequence[int], senders: Sequence[int]
    ) -> tuple[dict[int, Tensor], dict[int, int]]:
        """Check what arrived, and send again what did not fit.

        Args:
            messages: Those that were sent, whole, by receiver; none that is known to fit is needed.
            words: First words of the frames of ``senders``, on the host.

        Returns:
            The messages that did not arrive whole at first, and the sizes of all messages, by sender.

        Raises:
            DesyncError: A rank failed, or is at another operation.
        """
        sizes = self._checked(words, senders, leg.got)
        late = self._again(leg, messages, sizes)
        self._note(leg.sent, {r: message.numel() for r, message in messages.items()}, 0)
        self._note(leg.got, sizes, 1)
        return late, sizes

    def _checked(self, words: Sequence[int], senders: Sequence[int], got: Sequence[Shape]) -> dict[int, int]:
        rows = [(0, self.fingerprint)] * self.exchange.world_size
        bounds = [0] * len(rows)
        for at, sender in enumerate(senders):
            rows[sender] = (words[WORDS * at], words[WORDS * at + 1])
            most = got[sender].most
            bounds[sender] = rows[sender][0] if most is None else most
        sizes = self.exchange.checked(rows, self.fingerprint, bounds)
        return {sender: sizes[sender] for sender in senders}

    def _again(self, leg: Leg, whole: Mapping[int, Tensor], sizes: dict[int, int]) -> dict[int, Tensor]:
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
