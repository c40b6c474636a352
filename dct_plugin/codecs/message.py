"""Messages: the payloads for a peer, one after the other, in buffers that are kept between steps.

The host knows how large a payload may become, not how large it is: it reserves the bound, a kernel writes,
and :meth:`MessageWriter.advance` is given what the kernel returned. After a size that is on the host already,
the next payload begins right behind. After one that is still on the device it begins behind the bound;
:meth:`MessageWriter.read` reads the sizes of all payloads in one copy, and closes the gaps.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .stats import Stats, read_stats

#: Bytes, and times the bytes of the last message, up to which a buffer is kept.
_KEPT_BYTES, _KEPT_TIMES = 1 << 22, 8


class Key(tuple[Any, ...]):
    """A tuple that is hashed once: it is looked up in every step."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


#: The only receiver.
ONE = Key((0,))


class Placed(NamedTuple):
    """Payloads, each behind the last one's bound."""

    buffer: Tensor
    address: int
    """That of the first one."""
    receivers: Key
    sizes: Key
    """Most bytes of each."""
    stats: Stats
    """Those of all of them."""


class Order(NamedTuple):
    """The payloads of all messages by receivers, and those of a receiver as they were written."""

    receivers: np.ndarray
    """int64 [payloads], as all others."""
    placed: np.ndarray
    """Number of the :class:`Placed`."""
    which: np.ndarray
    """Number of the payload in it."""
    offsets: np.ndarray
    """Bytes before the payload in it."""
    sizes: np.ndarray


@functools.lru_cache(maxsize=4096)
def order_of(placed: tuple[tuple[Key, Key], ...]) -> Order:
    """Return the order of payloads by receivers and sizes of each :class:`Placed`."""
    rows = [
        (receiver, number, which, end - size, size)
        for number, (receivers, sizes) in enumerate(placed)
        for which, (receiver, size, end) in enumerate(
            zip(receivers, sizes, itertools.accumulate(sizes), strict=True)
        )
    ]
    return Order(*np.array(sorted(rows), dtype=np.int64).reshape(-1, 5).T)


class MessageWriter:
    """Growing uint8 buffers that the payloads of messages are encoded into in place.

    Args:
        device: Where the payloads are encoded.
        receivers: Number of messages.

    Attributes:
        placed: All payloads since :meth:`clear` or :meth:`read`; none as long as the host knows their sizes.
    """

    def __init__(self, device: torch.device, receivers: int = 1) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._buffers = [nothing] * receivers
        self._lengths = [0] * receivers
        self._reserved = 0
        self.placed: list[Placed] = []

    def clear(self) -> None:
        """Start new messages. The memory is kept, unless it is large and the last message took a small part
        of it: the first messages after a dense start are much larger than later ones.
        """
        for receiver, length in enumerate(self._lengths):
            buffer = self._buffers[receiver]
            if length and buffer.numel() > max(_KEPT_BYTES, _KEPT_TIMES * length):
                self._buffers[receiver] = buffer.new_empty(0)
        self._lengths = [0] * len(self._lengths)
        self.placed.clear()

    def reserve(self, size: int, receiver: int = 0) -> Tensor:
        """Return memory for ``size`` more bytes, uninitialised; valid until the receiver's next call.

        A payload whose figures are on the device is noted (:meth:`advance`) before more is reserved.
        """
        length, buffer = self._lengths[receiver], self._buffers[receiver]
        self._reserved = size
        if length + size > buffer.numel():
            buffer = self._with_room(size, receiver)
        return buffer[length : length + size]

    def _with_room(self, size: int, receiver: int) -> Tensor:
        """Return the buffer of a receiver, which has room for ``size`` more bytes."""
        buffer, length = self._buffers[receiver], self._lengths[receiver]
        self._reserved, needed = size, length + size
        if needed > buffer.numel():
            grown = buffer.new_empty(needed + needed // 4)
            if not self.placed:  # else payloads stay where kernels write them, perhaps only later
                grown[:length] = buffer[:length]
            self._buffers[receiver] = buffer = grown
        return buffer

    def advance(self, written: int | Stats, receiver: int = 0) -> None:
        """Note that the reserved memory holds a payload of ``written`` bytes, or of as many as the statistics
        say.
        """
        if not self.placed and isinstance(written, int):
            self._lengths[receiver] += written
            return
        stats = written if isinstance(written, Stats) else Stats(written, 0, 0, False)
        size = self._reserved if stats.pending else stats.nbytes
        if stats.pending or self.placed:
            self._place(receiver, Key((receiver,)), Key((size,)), size, stats)
        else:
            self._lengths[receiver] += size

    def place(self, receivers: Key, sizes: Key, total: int, stats: Stats) -> int:
        """Return the address of memory for payloads whose figures are on the device. Those for all receivers
        lie in one buffer.

        Args:
            receivers: That of each payload.
            sizes: Bytes that each has at most; ``total`` is their sum.
            stats: Their figures.
        """
        self._with_room(total, 0)
        return self._place(0, receivers, sizes, total, stats)

    def _place(self, where: int, receivers: Key, sizes: Key, total: int, stats: Stats) -> int:
        """Note payloads in the memory that was reserved in the buffer of the receiver ``where``."""
        for receiver, length in () if self.placed else enumerate(self._lengths):
            if length:
                buffer, known = self._buffers[receiver], Stats(length, 0, 0, False)
                self.placed.append(Placed(buffer, buffer.data_ptr(), Key((receiver,)), Key((length,)), known))
        address = self._buffers[where].data_ptr() + self._lengths[where]
        self.placed.append(Placed(self._buffers[where], address, receivers, sizes, stats))
        self._lengths[where] += total
        return address

    @property
    def layout(self) -> tuple[tuple[Key, Key], ...]:
        """Receivers and sizes of what was placed, for :func:`order_of`."""
        return tuple([(each.receivers, each.sizes) for each in self.placed])

    @property
    def message(self) -> Tensor:
        """All that was written for the first receiver since :meth:`clear`; see :meth:`read`."""
        return self.read()[0]

    def read(self) -> list[Tensor]:
        """Return all that was written for each receiver since :meth:`clear`: views, valid until the next
        :meth:`clear`. There is one device-to-host copy for the sizes of all payloads.
        """
        if self.placed:
            read_stats([each.stats for each in self.placed])
            parts: list[list[Tensor]] = [[] for _ in self._lengths]
            order = order_of(self.layout)
            for receiver, number, which, offset, _ in zip(*map(np.ndarray.tolist, order), strict=True):
                buffer, address, _, _, stats = self.placed[number]
                begin = address - buffer.data_ptr() + offset
                parts[receiver].append(buffer[begin : begin + stats.sizes[which]])
            # What all payloads were written to is let go: later messages most often travel in slots, unread.
            self._buffers = [torch.cat([self._buffers[0][:0], *each]) for each in parts]
            self._lengths = [buffer.numel() for buffer in self._buffers]
            self.placed.clear()
        return [buffer[:length] for buffer, length in zip(self._buffers, self._lengths, strict=True)]
