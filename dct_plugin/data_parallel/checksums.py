"""Checksums of tensors, to find out whether they changed or differ between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

#: Words of 8 bytes in a row of the matrix that is summed.
_ROW = 1024


def checksum(weight: Tensor) -> Tensor:
    """Return the sum of a tensor's words of 8 bytes, each times twice its position plus one, modulo 2**64:
    int64, on its device. Bytes after the last whole row of words are words themselves.

    Sums of rows and of columns give it without temporary memory of the tensor's size. The factors are odd,
    so that no single difference vanishes.
    """
    real = torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight
    flat = real.detach().contiguous().view(-1).view(torch.uint8)
    rows = flat.numel() // (8 * _ROW)
    whole, rest = flat[: rows * 8 * _ROW], flat[rows * 8 * _ROW :]
    if whole.storage_offset() % 8:
        whole = whole.clone()
    words = whole.view(torch.int64).view(rows, _ROW)
    first = 2 * words.numel()
    return (
        _weighted(words.sum(1), 0, 2 * _ROW) + _weighted(words.sum(0), 1, 2) + _weighted(rest, first + 1, 2)
    )


def _weighted(numbers: Tensor, first: int, step: int) -> Tensor:
    """Return the sum of numbers times ``first``, ``first + step`` and so on: int64."""
    stop = first + step * numbers.numel()
    return (numbers * torch.arange(first, stop, step, device=numbers.device)).sum()
