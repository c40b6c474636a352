"""``bitmap``: one bit per entry, least significant bit first."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import PayloadError
from .codec import IndexCodec, IndexEncoding, Positions


class Bitmap(IndexCodec):
    encoding = IndexEncoding.BITMAP

    def size(self, nnz: int, numel: int) -> int:
        return -(-numel // 8)

    def encode(self, positions: Positions, param: int) -> Tensor:
        idx = positions.idx
        out = torch.zeros(-(-positions.numel // 8), dtype=torch.uint8, device=idx.device)
        # Every position occurs once, so adding bits is setting bits.
        return out.index_add_(0, idx >> 3, (1 << (idx & 7)).to(torch.uint8))

    def decode(self, data: Tensor, param: int, nnz: int, numel: int) -> Tensor:
        used = data.nonzero().reshape(-1)
        shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
        bits = (data[used].unsqueeze(1) >> shifts) & 1
        row, bit = bits.nonzero(as_tuple=True)
        idx = used[row] * 8 + bit
        if idx.numel() != nnz:
            raise PayloadError(f"bitmap holds {idx.numel()} set bits, header says {nnz}")
        if nnz and int(idx[-1]) >= numel:
            raise PayloadError("bitmap has a bit set past the last entry")
        return idx
