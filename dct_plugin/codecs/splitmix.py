"""Random numbers that follow from seed and position alone: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""

from __future__ import annotations

from torch import Tensor


def signed(value: int, bits: int = 64) -> int:
    """Return the signed number of so many bits that is ``value`` modulo 2**bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, signed(0xBF58476D1CE4E5B9)), (27, signed(0x94D049BB133111EB)))


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right; zeros come in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(counter: Tensor, seed: Tensor | int) -> Tensor:
    """Return 64 random bits for each number of ``counter``, int64 of its shape.

    Args:
        counter: int64.
        seed: int64 [] on the same device, from which nothing is read, or a signed number of 64 bits.
    """
    z = (counter * _GOLDEN).add_(seed)
    for shift, factor in _ROUNDS:
        z.bitwise_xor_(shift_right(z, shift)).mul_(factor)
    return z.bitwise_xor_(shift_right(z, 31))
