"""Messages of unequal size between the ranks of a process group.

With its size every message is announced by a fingerprint of what the sender sends, so that ranks out of step
stop with a message instead of adding up each other's wrong tensors, and a failed rank can tell the others
before it stops. How the bytes travel is said in :mod:`.transports`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DesyncError
from . import lost_ranks
from .transports import Carrier, Row, carrier_of

logger = logging.getLogger("dct_plugin.transport")

_FAILED = -1


class _Posted(NamedTuple):
    """What was announced and not answered yet."""

    rows: Sequence[Row]
    """To every rank: size, fingerprint, nanoseconds since the last exchange."""
    messages: Sequence[Tensor] | None
    fingerprint: int
    busy: int
    at: int
    """Nanoseconds of this rank's clock."""


#: Header and fixed parts of a payload, and position and value of an entry, both with room to spare.
_ROOM, _MOST_PER_ENTRY = 4096, 16


def most_bytes(entries: int) -> int:
    """Bytes that a payload of a tensor of so many entries cannot reach, however it is coded."""
    return _ROOM + _MOST_PER_ENTRY * entries


def wire_of(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where a message of ``device`` has to lie for the group to carry it: gloo sends from the host."""
    backends = str(dist.get_backend_config(group)).split(",")
    if device.type == "cpu" or f"{device.type}:gloo" not in backends:
        return device
    _say_once(device)
    return torch.device("cpu")


@functools.cache
def _say_once(device: torch.device) -> None:
    logger.warning("gloo carries messages of %s through the host; nccl would not", device)


class Exchange:
    """Variable-size messages over one process group.

    Every method is a collective: all ranks of the group call it in the same order. Works on gloo with CPU
    tensors and on nccl with CUDA tensors. Where gloo carries CUDA tensors, messages go through the host. Who
    sets :attr:`group` does so before the first of them.

    Args:
        group: Process group, None for the default one.
        device: Device of the messages.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._wire = wire_of(group, device)
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.step: int | None = None
        """Named in the message about a lost peer."""
        self.waited_ms = 0.0
        """Milliseconds so far in which this rank's message was ready and another's was not."""
        self._carrier: Carrier | None = None
        self._summed_bytes = 0
        self._left = 0
        """When the last exchange was over, nanoseconds of this rank's clock; 0 before the first."""
        self._posted: deque[_Posted] = deque()
        self._posts = 0
        self._lost = False
        """Whether the transport failed."""
        self._global = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)

    @property
    def sent_bytes(self) -> int:
        """Bytes handed to the transport so far, what announces messages included."""
        return self._summed_bytes + (0 if self._carrier is None else self._carrier.sent_bytes)

    def all_to_all(
        self, messages: Sequence[Tensor], fingerprint: int = 0, *, bounds: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Send ``messages[r]`` to rank ``r``; returns what rank ``r`` sent to this one, at position ``r``.

        Args:
            messages: One 1-D uint8 tensor per rank of the group (may be empty); the own one is passed
                through.
            fingerprint: Non-negative 63-bit description of the operation, the same on every rank.
            bounds: Most bytes that rank ``r`` can have to say, where the caller knows them.

        Raises:
            DesyncError: A rank reported a failure, is at another operation, announces more bytes than it can
                have, or was lost; names the ranks.
        """
        self.post(messages, fingerprint)
        return self.collect(messages[self.rank], bounds=bounds)

    def post(self, messages: Sequence[Tensor], fingerprint: int = 0) -> None:
        """The first half of :meth:`all_to_all`: what can leave leaves. Any number may be posted before they
        are collected, and stay as they are until the last of them is.
        """
        messages = self._outgoing(messages)
        self._post([m.numel() for m in messages], fingerprint, messages)

    def pump(self) -> None:
        """Move what can be moved of what was posted here and by others, without waiting."""
        if self._posted:
            with self._transport("exchange of messages"):
                self._carried().pump()

    def collect(self, own: Tensor, *, bounds: Sequence[int] | None = None) -> list[Tensor]:
        """The second half of :meth:`all_to_all`, for the oldest of the messages that were posted; ``own`` is
        the one to this rank. After an error nothing is posted any more.
        """
        messages, sizes = self._posted[0].messages, self._agreed(bounds)
        assert messages is not None
        with self._transport("exchange of messages"):
            received = self._carried().deliver(messages, sizes, more=bool(self._posted))
        if not self._posted:
            self._left = time.perf_counter_ns()
        return self._arrived(received, own)

    def transfer(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """:meth:`all_to_all` where every rank knows beforehand that rank ``r`` sends it ``sizes[r]``."""
        own = messages[self.rank]
        rooms = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        self.transfer_into(messages, rooms)
        return [own if r == self.rank else room for r, room in enumerate(rooms)]

    def transfer_into(self, messages: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """:meth:`transfer` into memory that is there; that of the own message is left alone."""
        outgoing, received = self._outgoing(messages), list(rooms)
        received[self.rank] = outgoing[self.rank]
        if self._wire != self.device:
            received = [room.new_empty(room.shape, device=self._wire) for room in received]
        with self._transport("exchange of messages"):
            self._carried().transfer(outgoing, received)
        for r, (room, arrived) in enumerate(zip(rooms, received, strict=True)):
            if arrived.device != room.device and r != self.rank:
                room.copy_(arrived)

    def _outgoing(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """``messages`` where the transport takes them from; one that all ranks get is copied once."""
        if self._wire == self.device:
            return list(messages)
        there = {id(m): m.to(self._wire) for r, m in enumerate(messages) if r != self.rank}
        empty = torch.empty(0, dtype=torch.uint8, device=self._wire)
        return [empty if r == self.rank else there[id(m)] for r, m in enumerate(messages)]

    def _arrived(self, received: Sequence[Tensor], own: Tensor) -> list[Tensor]:
        return [own if r == self.rank else m.to(self.device) for r, m in enumerate(received)]

    def checked(
        self, rows: Sequence[Sequence[int]], fingerprint: int, bounds: Sequence[int] | None = None
    ) -> list[int]:
        """The sizes of ``(size, fingerprint)`` from every rank; errors as of :meth:`all_to_all`."""
        failed = [self._global[r] for r, (size, _) in enumerate(rows) if size < 0]
        if failed:
            at = "" if self.step is None else f" in step {self.step}"
            raise DesyncError(
                f"rank {self._global[self.rank]}: rank(s) {failed} failed while preparing this exchange{at}; "
                "see their own error output"
            )
        strange = [self._global[r] for r, (_, other) in enumerate(rows) if other != fingerprint]
        if strange:
            raise DesyncError(
                f"rank {self._global[self.rank]}: rank(s) {strange} are exchanging other tensors "
                "(names, sizes or order differ); every rank must reduce the same gradients in one order"
            )
        sizes = [size for size, _ in rows]
        for sender, (size, bound) in enumerate(zip(sizes, sizes if bounds is None else bounds, strict=True)):
            if size > bound:
                raise DesyncError(
                    f"rank {self._global[self.rank]}: rank {self._global[sender]} announces a message of "
                    f"{size} bytes, where at most {bound} can be right"
                )
        return sizes

    def agree(self, fingerprint: int) -> None:
        """Every rank is about to do what ``fingerprint`` describes, or all stop as in :meth:`all_to_all`."""
        self._post([0] * self.world_size, fingerprint, None)
        self._agreed(None)

    def all_reduce(self, tensor: Tensor) -> int:
        """Sum ``tensor`` over the ranks, in place and dense; returns the bytes that count as sent."""
        with self._transport("dense all-reduce"):
            dist.all_reduce(tensor, group=self.group)
        # A ring all-reduce's bytes: the transport does not tell.
        size = round(2 * (self.world_size - 1) / self.world_size * tensor.numel() * tensor.element_size())
        self._summed_bytes += size
        return size

    def all_gather(
        self, message: Tensor, fingerprint: int = 0, *, bounds: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Send ``message`` (1-D uint8) to every rank; returns all ranks' messages in rank order."""
        return self.all_to_all([message] * self.world_size, fingerprint, bounds=bounds)

    @contextmanager
    def preparing(self, *, announced: bool = True, posts: int = 1) -> Iterator[None]:
        """Around the work that makes the messages of the next exchange. Its receivers are ready from the
        start, and the other ranks, who may be waiting in it already, are told of an error.

        Args:
            announced: Whether that is one that says how long its messages are: all but :meth:`transfer`.
            posts: Of the exchanges that are prepared here; the block may have posted some when it fails.
        """
        before = self._posts
        try:
            if announced:
                with self._transport("exchange of sizes"):
                    self._carried().expect()
            yield
        except BaseException:
            self.abort(posts - (self._posts - before))
            raise

    @contextmanager
    def collecting(self, *, posts: int = 0) -> Iterator[None]:
        """Around the work on what was posted: after an error the rest is taken from the ranks that sent it,
        who may be well, and forgotten, and they are told in the ``posts`` exchanges that they wait for next.
        """
        try:
            yield
        except BaseException:
            self.abort(posts)
            raise

    def abort(self, posts: int = 1) -> None:
        """Tell the ranks that are waiting in their next exchange, or the next ``posts``, that this one
        failed. Never raises.
        """
        if self._lost:  # the others see that
            return
        with contextlib.suppress(Exception):
            for _ in range(posts):
                self._post([_FAILED] * self.world_size, 0, None)
            self._drain()
        self._posted.clear()

    def _carried(self) -> Carrier:
        if self._carrier is None:
            self._carrier = carrier_of(self.group, self._wire)
            lost_ranks.rejoin()
        return self._carrier

    def _transport(self, what: str) -> lost_ranks.transport:
        """Around the transport's own work: what it raises names addresses at best, not ranks."""
        return lost_ranks.transport(what, self.group, self.step, self._give_up)

    def _give_up(self) -> None:
        self._lost = True
        self._posted.clear()

    def _post(self, sizes: Sequence[int], fingerprint: int, messages: Sequence[Tensor] | None) -> None:
        at = time.perf_counter_ns()
        busy = at - self._left if self._left else 0
        rows = [(size, fingerprint, busy) for size in sizes]
        self._posted.append(_Posted(rows, messages, fingerprint, busy, at))
        self._posts += 1
        with self._transport("exchange of sizes"):
            self._carried().post(rows, messages)

    def _agreed(self, bounds: Sequence[int] | None) -> list[int]:
        """Sizes of the messages that come, to the oldest that was posted."""
        fingerprint, rows = self._posted[0].fingerprint, self._answers()
        try:
            return self.checked(rows, fingerprint, bounds)
        except DesyncError:
            self._carried().drop([size for size, _ in rows])
            with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                self._drain()
            raise

    def _answers(self) -> list[tuple[int, int]]:
        """Size and fingerprint of the message from every rank."""
        posted, entered = self._posted.popleft(), time.perf_counter_ns()
        with self._transport("exchange of sizes"):
            rows = self._carried().answers(posted.rows, posted.messages)
        # Ranks leave an exchange together, so that of what they did since then the longest is what all wait
        # for, from when they come here; their clocks need not agree.
        now = time.perf_counter_ns()
        if not self._posted:
            self._left = now
        others = [row[2] for row in rows]
        if all(others):
            late = max(others) - posted.busy - (entered - posted.at)
            self.waited_ms += max(0, min(late, now - entered)) / 1e6
        return [(size, fingerprint) for size, fingerprint, _ in rows]

    def _drain(self) -> None:
        """Take what the others send to what was posted, and forget it: they may be well, and go on."""
        while self._posted:
            messages = self._posted[0].messages
            sizes = [size for size, _ in self._answers()]
            if messages is None or min(sizes) < 0:  # then nobody takes it
                self._carried().drop(sizes)
            else:
                self._carried().deliver(messages, sizes, more=bool(self._posted))
