"""``block16``: a u32 count per block of 65,536 entries, then a 16-bit offset in its block per kept entry."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import PayloadError
from .codec import IndexCodec, IndexEncoding, Positions

BLOCK = 65536


class Block16(IndexCodec):
    encoding = IndexEncoding.BLOCK16

    def size(self, nnz: int, numel: int) -> int:
        return 4 * (-(-numel // BLOCK)) + 2 * nnz

    def encode(self, positions: Positions, param: int) -> Tensor:
        blocks = -(-positions.numel // BLOCK)
        counts = torch.bincount(positions.idx >> 16, minlength=blocks).to(torch.int32)
        low = positions.idx & 0xFFFF
        offsets = torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16)
        return torch.cat([counts.view(torch.uint8), offsets.view(torch.uint8)])

    def decode(self, data: Tensor, param: int, nnz: int, numel: int) -> Tensor:
        blocks = -(-numel // BLOCK)
        counts = data[: 4 * blocks].clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        if (blocks and int(counts.max()) > BLOCK) or int(counts.sum()) != nnz:
            raise PayloadError(f"block16 counts do not add up to nnz {nnz}")
        low = data[4 * blocks :].clone().view(torch.int16).to(torch.int64) & 0xFFFF
        base = torch.arange(blocks, dtype=torch.int64, device=data.device) << 16
        idx = base.repeat_interleave(counts) + low
        if nnz and (int(idx[-1]) >= numel or not bool((idx[1:] > idx[:-1]).all())):
            raise PayloadError("block16 offsets are not ascending or lie past the last entry")
        return idx
