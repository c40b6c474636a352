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
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._spare = self._buffer  # where the next message with gaps is packed
        self._length = 0
        self._reserved = 0
        # Since the first gap: places (buffer, first byte, bytes), and the sizes of what is in them.
        self._unpacked: list[tuple[Tensor, int, int, int | Stats]] = []

    def clear(self) -> None:
        """Start a new message. The memory is kept, unless it is large and the last message took a small part
        of it: the first messages after a dense start are much larger than later ones.
        """
        if self._buffer.numel() > max(_KEPT_BYTES, _KEPT_TIMES * self._length) and self._length:
            self._buffer = self._spare = self._buffer.new_empty(0)
        self._length = 0
        self._unpacked.clear()

    def reserve(self, size: int) -> Tensor:
        """Return memory for ``size`` more bytes, uninitialised; valid until the next call."""
        self._reserved, needed = size, self._length + size
        if needed > self._buffer.numel():
            grown = self._buffer.new_empty(needed + needed // 4)
            if not self._unpacked:  # else payloads stay where kernels write them, perhaps only later
                grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        return self._buffer[self._length : needed]

    def advance(self, written: int | Stats) -> None:
        """Note that the reserved memory holds a payload of ``written`` bytes, or of as many as the statistics
        say.
        """
        if isinstance(written, Stats) and written.pending:
            self.place(self._reserved, written)
            return
        nbytes = written.nbytes if isinstance(written, Stats) else written
        if self._unpacked:
            self._unpacked.append((self._buffer, self._length, self._reserved, written))
        self._length += nbytes

    def place(self, size: int, stats: Stats) -> int:
        """Return the address of memory for a payload of at most ``size`` bytes, whose figures are on the
        device.
        """
        at, needed = self._length, self._length + size
        if needed > self._buffer.numel():
            self.reserve(size)
        if at and not self._unpacked:
            self._unpacked.append((self._buffer, 0, at, at))
        self._unpacked.append((self._buffer, at, size, stats))
        self._length = needed
        return self._buffer.data_ptr() + at

    @property
    def placed(self) -> list[tuple[Tensor, int, int, Stats]]:
        """The place (buffer, first byte, bytes) and the figures of each payload whose figures are on the
        device.
        """
        return [
            (buffer, at, nbytes, size)
            for buffer, at, nbytes, size in self._unpacked
            if isinstance(size, Stats)
        ]

    @property
    def message(self) -> Tensor:
        """All that was written since :meth:`clear`; a view, valid until the next :meth:`clear`."""
        return read_messages([self])[0]

    def _pack(self) -> Tensor:
        if self._unpacked:
            parts = [
                buffer[at : at + (size.nbytes if isinstance(size, Stats) else size)]
                for buffer, at, _, size in self._unpacked
            ]
            total = sum(part.numel() for part in parts)
            if total > self._spare.numel():
                self._spare = self._buffer.new_empty(total + total // 4)
            torch.cat(parts, out=self._spare[:total])
            self._buffer, self._spare = self._spare, self._buffer
            self._length = total
            self._unpacked.clear()
        return self._buffer[: self._length]


def read_messages(writers: Iterable[MessageWriter]) -> list[Tensor]:
    """Return the message of each writer, with one device-to-host copy for all their payloads' sizes.

    The :class:`~dct_plugin.codecs.stats.Stats` they were advanced by are read with it.
    """
    writers = list(writers)
    read_stats(size for writer in writers for *_, size in writer._unpacked if isinstance(size, Stats))
    return [writer._pack() for writer in writers]
