"""A message: the payloads for one peer, one after the other in one buffer that is kept between steps.

The host knows how large a payload may become, not how large it is: it reserves the bound, a kernel writes,
and :meth:`MessageWriter.advance` is given what the kernel returned. After a size that is on the host already,
the next payload begins right behind. After one that is still on the device it begins behind the bound;
:func:`read_messages` reads the sizes of all payloads of all messages in one copy, and closes the gaps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .stats import Stats, read_stats

#: Bytes, and times the bytes of the last message, up to which a buffer is kept.
_KEPT_BYTES, _KEPT_TIMES = 1 << 22, 8


class MessageWriter:
    """Growing uint8 buffer that payloads are encoded into in place.

    Args:
        device: Where the payloads are encoded.

    Attributes:
        placed: What was written since the first payload whose figures are on the device: its place (buffer,
            address, bytes), the statistics that have its size, and its number among their payloads.
    """

    def __init__(self, device: torch.device) -> None:
        self._use(torch.empty(0, dtype=torch.uint8, device=device))
        self._spare = self._buffer  # where the next message with gaps is packed
        self._length = 0
        self._reserved = 0
        self.placed: list[tuple[Tensor, int, int, Stats, int]] = []

    def clear(self) -> None:
        """Start a new message. The memory is kept, unless it is large and the last message took a small part
        of it: the first messages after a dense start are much larger than later ones.
        """
        if self._room > max(_KEPT_BYTES, _KEPT_TIMES * self._length) and self._length:
            self._use(self._buffer.new_empty(0))
            self._spare = self._buffer
        self._length = 0
        self.placed.clear()

    def reserve(self, size: int) -> Tensor:
        """Return memory for ``size`` more bytes, uninitialised; valid until the next call."""
        self._reserved, needed = size, self._length + size
        if needed > self._room:
            grown = self._buffer.new_empty(needed + needed // 4)
            if not self.placed:  # else payloads stay where kernels write them, perhaps only later
                grown[: self._length] = self._buffer[: self._length]
            self._use(grown)
        return self._buffer[self._length : needed]

    def advance(self, written: int | Stats) -> None:
        """Note that the reserved memory holds a payload of ``written`` bytes, or of as many as the statistics
        say.
        """
        stats = written if isinstance(written, Stats) else Stats(written, 0, 0, False)
        if stats.pending:
            self.place(self._reserved, stats)
            return
        if self.placed:
            self.placed.append((self._buffer, self._address + self._length, self._reserved, stats, 0))
        self._length += stats.nbytes

    def place(self, size: int, stats: Stats, which: int = 0) -> int:
        """Return the address of memory for a payload of at most ``size`` bytes, whose figures are on the
        device: ``which`` of those that ``stats`` has.
        """
        at, needed = self._length, self._length + size
        if needed > self._room:
            self.reserve(size)
        if at and not self.placed:
            self.placed.append((self._buffer, self._address, at, Stats(at, 0, 0, False), 0))
        address = self._address + at
        self.placed.append((self._buffer, address, size, stats, which))
        self._length = needed
        return address

    @property
    def message(self) -> Tensor:
        """All that was written since :meth:`clear`; a view, valid until the next :meth:`clear`."""
        return read_messages([self])[0]

    def _pack(self) -> Tensor:
        if self.placed:
            parts = [
                buffer[address - buffer.data_ptr() :][: stats.sizes[which]]
                for buffer, address, _, stats, which in self.placed
            ]
            total = sum(part.numel() for part in parts)
            if total > self._spare.numel():
                self._spare = self._buffer.new_empty(total + total // 4)
            torch.cat(parts, out=self._spare[:total])
            packed, self._spare = self._spare, self._buffer
            self._use(packed)
            self._length = total
            self.placed.clear()
        return self._buffer[: self._length]

    def _use(self, buffer: Tensor) -> None:
        self._buffer, self._address, self._room = buffer, buffer.data_ptr(), buffer.numel()


def read_messages(writers: Iterable[MessageWriter]) -> list[Tensor]:
    """Return the message of each writer, with one device-to-host copy for all their payloads' sizes.

    The :class:`~dct_plugin.codecs.stats.Stats` they were advanced by are read with it.
    """
    writers = list(writers)
    read_stats(stats for writer in writers for *_, stats, _ in writer.placed)
    return [writer._pack() for writer in writers]
