"""Changes of 16-bit weights, by their bits alone.

A weight is a number of 16 bits here, so ``-0.0`` and NaN are weights like others. What crosses is the
*distance* that a weight has moved in the order of the floats, modulo 2**16; most distances are 1 or 2. A part
of the weights is one payload (:mod:`.payload`) for each band of distances. The values are whole numbers, to
which the receiver rounds: levels of a type in few bits lie less than half of 1 beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .payload import payload_bound
from .values import ValueDtype

#: Entries of a part.
PART = 1 << 22
#: Far distances that every payload has room for.
_ROOM = 4096


class Band(NamedTuple):
    """Distances that are one payload of a part."""

    last: int
    """The largest distance; the smallest is one more than that of the band before."""
    value_dtype: ValueDtype

    def capacity(self, numel: int) -> int:
        """Return the most entries in the payload of a part. Far distances are few, or weights cross whole."""
        return numel if self.value_dtype is not ValueDtype.FP32 else min(numel, max(numel // 8, _ROOM))


#: Four bits have eight levels of each sign; fp16 has the whole numbers up to 2**11.
BANDS = (
    Band(1, ValueDtype.SIGN),
    Band(9, ValueDtype.INT4),
    Band(127, ValueDtype.INT8),
    Band(1 << 11, ValueDtype.FP16),
    Band(1 << 15, ValueDtype.FP32),
)


@lru_cache(maxsize=4096)
def changes_bound(numel: int) -> int:
    """Return the most bytes of the payloads of a part."""
    return sum(payload_bound(numel, band.capacity(numel), band.value_dtype) for band in BANDS)


def distances(wanted: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield the distances of each band from ``held`` to ``wanted``, bf16 or fp16 [numel] both; fp16 or fp32
    [numel], zeros where a distance is of another band.
    """
    moved = _places(wanted.view(torch.int16)) - _places(held.view(torch.int16))
    below = -moved.abs()  # that of -2**15 is in range
    first = -1
    for last, dtype in BANDS:
        other = (below > first) | (below < -last)
        yield moved.masked_fill(other, 0).to(torch.float32 if dtype is ValueDtype.FP32 else torch.float16)
        first = -last - 1


def move(bits: Tensor, by: Tensor) -> None:
    """Move 16-bit weights, given as int16 [numel], in place by distances, fp32 [numel], which are rounded."""
    by = by.round().clamp(-(1 << 15), 1 << 15).to(torch.int32)
    bits.copy_(_places((_places(bits) + by).to(torch.int16)))


def _places(bits: Tensor) -> Tensor:
    """Return the places of floats, given as int16, in their order, int16; and the bits of places."""
    return bits ^ (bits >> 15 & 0x7FFF)
