"""Whole numbers in as many bits as their segment has: bit planes, on any device, without a wait.

Numbers lie in groups of 8, and a segment has whole groups. Bit ``p`` of a group's numbers is one byte, the
first number in its lowest bit. The bytes of a segment are those of bit 0 of all of its groups, then those of
bit 1, and so on. Numbers are signed (two's complement): in ``w`` bits they are in ``[-2**(w-1), 2**(w-1))``.

The number of bits may stay on the device. What a host has to know is the sum of the bytes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 8
#: Products with these bring bit 0 of all eight bytes of a number into its last byte, and the reverse.
_GATHERING, _SPREADING = 0x0102040810204080, 0x0002040810204081
_LOWEST = 0x0101010101010101


def pack(numbers: Tensor, widths: Tensor, groups: Tensor, nbytes: int) -> Tensor:
    """Return the planes of ``numbers``, uint8 [nbytes].

    Args:
        numbers: int32 [groups, 8], the segments' groups one after the other.
        widths: int64 [segments], bits of a number, 0 to 32.
        groups: int64 [segments], groups of each segment.
        nbytes: The sum of ``widths * groups``.
    """
    group, plane = _places(widths, groups, nbytes)
    bits = ((numbers.index_select(0, group) >> plane.unsqueeze(1)) & 1).to(torch.uint8)
    return ((bits.view(torch.int64).view(-1) * _GATHERING) >> 56).to(torch.uint8)


def unpack(planes: Tensor, widths: Tensor, groups: Tensor, count: int) -> Tensor:
    """Do the inverse of :func:`pack`; ``count`` is the sum of ``groups``. Return int32 [count, 8]."""
    group, plane = _places(widths, groups, planes.numel())
    byte = planes.to(torch.int64).unsqueeze(1)
    # The first 7 bits do not meet when the byte is copied to every seventh place; the last one is put there.
    spread = (((byte & 127) * _SPREADING) & _LOWEST) | ((byte >> 7) << 56)
    bits = spread.view(torch.uint8).to(torch.int32) << plane.unsqueeze(1)
    numbers = torch.zeros(count, GROUP, dtype=torch.int32, device=planes.device).index_add_(0, group, bits)
    unused = (32 - widths).clamp(max=31).to(torch.int32).repeat_interleave(groups, output_size=count)
    return numbers << unused.unsqueeze(1) >> unused.unsqueeze(1)


def _places(widths: Tensor, groups: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
    """Return the group, int64 [nbytes], and the plane, int32 [nbytes], of every byte."""
    sizes = widths * groups
    at = torch.arange(nbytes, device=widths.device)
    size, first_byte, first_group = (
        each.repeat_interleave(sizes, output_size=nbytes)
        for each in (groups, sizes.cumsum(0) - sizes, groups.cumsum(0) - groups)
    )
    plane = (at - first_byte) // size
    return first_group + at - first_byte - plane * size, plane.to(torch.int32)
