"""Checksums of tensors, to find out whether they changed or differ between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
#: Entries that are summed at once, in 16 bytes of memory each.
_CHUNK = 2**20


def checksum(weight: Tensor) -> Tensor:
    """Return the sum of a tensor's bit patterns, each mixed with its position: int64, on its device."""
    real = torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight
    flat = real.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start, words in enumerate(flat.view(_WORDS[flat.element_size()]).split(_CHUNK)):
        # Odd factors, so that no single difference vanishes.
        first = 2 * start * _CHUNK + 1
        factors = torch.arange(first, first + 2 * words.numel(), 2, device=flat.device)
        total += (words * factors).sum()
    return total
