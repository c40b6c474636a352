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
        self._unpacked: list[tuple[int, int | Stats]] = []  # (start, size) since the first gap

    def clear(self) -> None:
        """Start a new message; the memory is kept."""
        self._length = 0
        self._unpacked.clear()

    def reserve(self, size: int) -> Tensor:
        """Room for ``size`` more bytes, uninitialised; valid until the next call."""
        needed = self._length + size
        if needed > self._buffer.numel():
            grown = self._buffer.new_empty(needed + needed // 4)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._reserved = size
        return self._buffer[self._length : needed]

    def advance(self, written: int | Stats) -> None:
        """The reserved room holds a payload of ``written`` bytes, or of as many as the statistics say."""
        pending = isinstance(written, Stats) and written.pending
        if pending or self._unpacked:
            self._unpacked.append((self._length, written))
        if pending:
            self._length += self._reserved
        else:
            self._length += written.nbytes if isinstance(written, Stats) else written

    @property
    def buffer(self) -> Tensor:
        """What payloads were written to."""
        return self._buffer

    @property
    def parts(self) -> list[tuple[int, int, Stats]]:
        """``(start in the buffer, room, figures)`` of the payloads, whose figures are on the device."""
        starts = [start for start, _ in self._unpacked]
        ends = [*starts, self._length][1:] if starts else []
        figures = [size for _, size in self._unpacked]
        return [
            (start, end - start, each)
            for start, end, each in zip(starts, ends, figures, strict=True)
            if isinstance(each, Stats)
        ]

    @property
    def message(self) -> Tensor:
        """What was written since :meth:`clear` (a view: gone at the next :meth:`clear`)."""
        return read_messages([self])[0]

    def _pack(self) -> Tensor:
        if self._unpacked:
            parts = [self._buffer[: self._unpacked[0][0]]]
            for start, size in self._unpacked:
                parts.append(self._buffer[start : start + (size.nbytes if isinstance(size, Stats) else size)])
            total = sum(part.numel() for part in parts)
            if total > self._spare.numel():
                self._spare = self._buffer.new_empty(total + total // 4)
            torch.cat(parts, out=self._spare[:total])
            self._buffer, self._spare = self._spare, self._buffer
            self._length = total
            self._unpacked.clear()
        return self._buffer[: self._length]


def read_messages(writers: Iterable[MessageWriter]) -> list[Tensor]:
    """:attr:`MessageWriter.message` of each, with one device-to-host copy for all their payloads' sizes.

    The :class:`~dct_plugin.codecs.stats.Stats` they were advanced by are read with it.
    """
    writers = list(writers)
    read_stats(size for writer in writers for _, size in writer._unpacked if isinstance(size, Stats))
    return [writer._pack() for writer in writers]
