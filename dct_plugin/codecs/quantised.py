"""Values of few bits, a scale per group: every entry of a tensor, where nothing is left out.

A group's ``2**bits`` levels are equally spaced and symmetric about zero. Rounded to nearest, the distance of
levels is the better, for each group, of two: the one that spans the largest magnitude, and the one that
serves normally distributed values best and clips the rest (Max, IRE Trans. Inf. Theory 1960, table II).
Plain torch, any device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import PayloadError
from .copies import to_device

#: Best distance of equally spaced levels for normal values of variance 1; more bits span the group.
_BEST_STEP = {1: 1.596, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569}
#: The same by number of bits, 0 to 10.
_BEST_STEPS = torch.tensor(
    [_BEST_STEP.get(bits, 0.0) for bits in range(11)], dtype=torch.float32, device="cpu"
)


class Quantiser(NamedTuple):
    """Settings: what encoder and decoder have to know of each other.

    Attributes:
        bits: Bits of a value, 1 to 8; 16 is bf16 without scales.
        group: Values that share a scale of bf16, a power of two of at least 8.

    Example:
        >>> quantiser = Quantiser(bits=4, group=64)
        >>> data = quantiser.encode(tokens)                    # tokens [rows, 64]: a scale per row
        >>> rows = quantiser.decode(data, tokens.numel()).view_as(tokens)
    """

    bits: int
    group: int = 128

    def nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` values."""
        if self.bits == 16:
            return 2 * numel
        return 2 * -(-numel // self.group) + self.bits * -(-numel // 8)

    def encode(self, x: Tensor) -> Tensor:
        """Return the values of ``x``, any shape and floating type, as uint8 [nbytes].

        Groups follow each other in memory: those of [rows, hidden] lie within a row if ``group`` divides
        ``hidden``. A group with a non-finite entry decodes to no finite entry.
        """
        flat = x.detach().reshape(-1)
        if self.bits == 16:
            return flat.to(torch.bfloat16).view(torch.uint8)
        numel = flat.numel()
        table = functional.pad(flat.to(torch.float32), (0, -numel % self.group)).view(-1, self.group)
        step = self._nearest(table)
        codes = _codes(table, step, 2**self.bits).to(torch.uint8)
        scales = step.to(torch.bfloat16).view(-1).view(torch.uint8)
        return torch.cat([scales, pack(codes.view(-1)[: 8 * -(-numel // 8)], self.bits)])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """Return fp32 [numel] of what :meth:`encode` wrote, uint8; more bytes may follow.

        Raises:
            PayloadError: There are fewer bytes than ``numel`` values take.
        """
        size = self.nbytes(numel)
        if data.numel() < size:
            raise PayloadError(f"{numel} values of {self.bits} bits take {size} bytes, got {data.numel()}")
        if self.bits == 16:
            return data[:size].clone().view(torch.bfloat16).to(torch.float32)
        groups = -(-numel // self.group)
        step = data[: 2 * groups].clone().view(torch.bfloat16).to(torch.float32)
        table = torch.zeros(groups, self.group, device=data.device, dtype=torch.float32)
        codes = unpack(data[2 * groups : size], self.bits)
        table.view(-1)[: codes.numel()] = codes
        table.sub_((2**self.bits - 1) / 2).mul_(step.unsqueeze(1))
        return table.view(-1)[:numel]

    def _nearest(self, table: Tensor) -> Tensor:
        """Return the distance of levels of each group, fp32 [groups, 1]."""
        levels = 2**self.bits
        if self.bits == 1:  # the mean magnitude is best whatever the distribution
            return _stored(table.abs().mean(dim=1, keepdim=True) * 2)
        spanning = _stored(table.abs().amax(dim=1, keepdim=True) * (2 / levels))
        if self.bits not in _BEST_STEP:
            return spanning
        best = _stored(table.square().mean(dim=1, keepdim=True).sqrt_() * _BEST_STEP[self.bits])
        return _better(table, levels, spanning, best)


def round_rows(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to levels as above, with bits of their own, which may stay on the device.

    Args:
        x: fp32 [rows, n], n not 0.
        bits: int64 [rows], 0 to 10; 0: the row becomes zeros.

    Returns:
        Whole numbers, int32 [rows, n], and the distance of levels, fp32 [rows, 1], of bf16; a value is
        ``(number + 0.5) * distance``.
    """
    levels = torch.exp2(bits.to(torch.float32)).unsqueeze(1)
    steps = to_device(_BEST_STEPS, x.device)[bits]
    best = torch.where(bits == 1, x.abs().mean(dim=1) * 2, x.square().mean(dim=1).sqrt_() * steps)
    spanning = x.abs().amax(dim=1, keepdim=True) * (2 / levels)
    step = _better(x, levels, _stored(spanning), _stored(best.unsqueeze(1)))
    numbers = (_codes(x, step, levels) - levels / 2).to(torch.int32)
    return numbers, torch.where(levels > 1, step, 0.0)


def _better(table: Tensor, levels: int | Tensor, spanning: Tensor, best: Tensor) -> Tensor:
    """Return the distance of levels, of two, that leaves the smaller squared error of each row."""

    def error(step: Tensor) -> Tensor:
        decoded = (_codes(table, step, levels) - (levels - 1) / 2).mul_(step)
        return decoded.sub_(table).square_().sum(dim=1, keepdim=True)

    return torch.where(error(best) < error(spanning), best, spanning)


def _stored(step: Tensor) -> Tensor:
    """Return ``step`` as the receiver will read it."""
    return step.to(torch.bfloat16).to(torch.float32)


def _codes(table: Tensor, step: Tensor, levels: int | Tensor) -> Tensor:
    """Return the number of each value's level, fp32; a step of zero has no levels."""
    scaled = table / step.clamp_min(torch.finfo(torch.float32).tiny)
    return scaled.add_(levels / 2).floor_().clamp_min_(0).clamp_max_(levels - 1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return uint8 [n], each below ``2**bits``, as uint8 [n * bits / 8], lowest bits first.

    n is a multiple of 8; of ``8 / bits`` where that is a whole number.
    """
    return _cut_anew(codes, bits, 8)


def unpack(data: Tensor, bits: int) -> Tensor:
    """Do the inverse of :func:`pack`."""
    return _cut_anew(data, 8, bits)


def _cut_anew(numbers: Tensor, bits: int, new_bits: int) -> Tensor:
    """Join numbers of ``bits`` bits, lowest first, and cut them into numbers of ``new_bits``; uint8 both."""
    if bits == new_bits:
        return numbers
    of_word = math.lcm(bits, new_bits)
    columns = numbers.view(-1, of_word // bits).to(torch.uint8 if of_word == 8 else torch.int64).unbind(dim=1)
    word = columns[0].clone()
    for place, column in enumerate(columns[1:], start=1):
        word |= column << (bits * place)
    parts = [word >> shift & (2**new_bits - 1) for shift in range(0, of_word, new_bits)]
    return torch.stack(parts, dim=1).to(torch.uint8).view(-1)
