"""``gaps8``: one byte per gap; 255 means "skip 255 entries and go on"."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import PayloadError
from .codec import IndexCodec, IndexEncoding, Positions


class Gaps8(IndexCodec):
    encoding = IndexEncoding.GAPS8

    def bound(self, nnz: int, numel: int) -> int:
        return nnz + (numel - nnz) // 255

    def section_sizes(self, param: int, nnz: int, numel: int) -> tuple[int, int]:
        return nnz, nnz + (numel - nnz) // 255

    def plan(self, positions: Positions) -> tuple[int, int]:
        return positions.nnz + int((positions.gaps // 255).sum()), 0

    def encode(self, positions: Positions, param: int) -> Tensor:
        gaps = positions.gaps
        last = torch.cumsum(gaps // 255 + 1, 0) - 1
        total = int(last[-1]) + 1 if gaps.numel() else 0
        out = torch.full((total,), 255, dtype=torch.uint8, device=gaps.device)
        out[last] = (gaps % 255).to(torch.uint8)
        return out

    def decode(self, data: Tensor, param: int, nnz: int, numel: int) -> Tensor:
        if nnz == 0:
            if data.numel():
                raise PayloadError("gaps8 index section holds bytes but no entries")
            return torch.empty(0, dtype=torch.int64, device=data.device)
        steps = data.to(torch.int64)
        terminal = steps != 255
        steps += terminal
        idx = (torch.cumsum(steps, 0) - 1)[terminal]
        if idx.numel() != nnz or not bool(terminal[-1]):
            raise PayloadError(f"gaps8 index section holds {idx.numel()} entries, header says {nnz}")
        if int(idx[-1]) >= numel:
            raise PayloadError(f"index {int(idx[-1])} is outside a tensor of {numel} entries")
        return idx
