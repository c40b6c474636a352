"""``dense``: no index section, as every entry is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from .codec import IndexCodec, IndexEncoding, Positions


class Dense(IndexCodec):
    encoding = IndexEncoding.DENSE
    bounds_choice = False

    def can_hold(self, nnz: int, numel: int) -> bool:
        return nnz == numel

    def size(self, nnz: int, numel: int) -> int:
        return 0

    def section_sizes(self, param: int, nnz: int, numel: int) -> tuple[int, int]:
        return (0, 0) if nnz == numel else (0, -1)

    def encode(self, positions: Positions, param: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=positions.idx.device)

    def decode(self, data: Tensor, param: int, nnz: int, numel: int) -> Tensor:
        return torch.arange(numel, dtype=torch.int64, device=data.device)
