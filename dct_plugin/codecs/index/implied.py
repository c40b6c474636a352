"""``dense`` and ``shared_mask``: no index section, as the positions are known without one."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ...errors import PayloadError
from .codec import IndexEncoding, KnownSizeCodec, Positions

NO_POSITIONS = "a shared_mask payload holds no positions; decode it with the payload that does"


class _Implied(KnownSizeCodec):
    bounds_choice = False

    def size(self, nnz: int, numel: int) -> int:
        return 0

    def encode(self, positions: Positions, param: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=positions.idx.device)


class Dense(_Implied):
    """Every entry is kept."""

    encoding = IndexEncoding.DENSE

    def can_hold(self, nnz: int, numel: int) -> bool:
        return nnz == numel

    def section_sizes(self, param: int, nnz: int, numel: int) -> tuple[int, int]:
        return (0, 0) if nnz == numel else (0, -1)

    def decode(self, data: Tensor, param: int, nnz: int, numel: int) -> Tensor:
        return torch.arange(numel, dtype=torch.int64, device=data.device)


class SharedMask(_Implied):
    """The positions are those of an earlier payload, which both ends hold."""

    encoding = IndexEncoding.SHARED_MASK

    def can_hold(self, nnz: int, numel: int) -> bool:
        return False

    def decode(self, data: Tensor, param: int, nnz: int, numel: int) -> NoReturn:
        raise PayloadError(NO_POSITIONS)
