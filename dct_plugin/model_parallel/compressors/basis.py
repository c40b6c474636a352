"""The bases of compressors that send coordinates of rows in a few directions."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ...codecs.quantised import Quantiser

#: The code of a basis that crosses: 8 bits an entry, with a scale for as many entries.
BASIS = Quantiser(bits=8, group=64)


def random_basis(name: str, hidden: int, rank: int) -> Tensor:
    """Return an orthonormal basis, fp32 [hidden, rank], that depends on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.linalg.qr(torch.randn(hidden, rank, generator=generator))[0].contiguous()
