"""``rice``: Golomb-Rice code of the gaps, quotient in unary (zeros, then a one), then the ``k`` low bits.

Bits fill bytes from the least significant one up. Source: Rice and Plaunt, IEEE Trans. Communications 19
(1971).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ...errors import PayloadError
from .codec import IndexCodec, IndexEncoding, Positions

MAX_PARAM = 30


def candidates(nnz: int, numel: int) -> list[int]:
    """Return the parameters that are tried, ascending: floor(log2 of the mean gap) and its two neighbours."""
    if nnz == 0:
        return [0]
    b = ((numel - nnz) // nnz).bit_length()
    return sorted({min(max(k, 0), MAX_PARAM) for k in (b - 2, b - 1, b)})


class Rice(IndexCodec):
    encoding = IndexEncoding.RICE
    max_param = MAX_PARAM
    bounds_choice = False  # a logarithm

    def bound(self, nnz: int, numel: int) -> int:
        # With k = b, where 2**b exceeds the mean gap, the unary parts add less than one bit per entry to the
        # k + 1 others, and b <= log2(numel / nnz) + 1. The result grows with nnz, so it covers every smaller
        # number of entries too.
        return math.ceil(nnz * (math.log2(numel / nnz) + 3) / 8) + 1 if nnz else 0

    def section_sizes(self, param: int, nnz: int, numel: int) -> tuple[int, int]:
        codes = nnz * (param + 1)
        return -(-codes // 8), -(-(codes + ((numel - nnz) >> param)) // 8)

    def plan(self, positions: Positions) -> tuple[int, int]:
        nnz, gaps = positions.nnz, positions.gaps
        costs = [(nnz * (k + 1) + int((gaps >> k).sum()), k) for k in candidates(nnz, positions.numel)]
        bits, k = min(costs)
        return -(-bits // 8), k

    def encode(self, positions: Positions, param: int) -> Tensor:
        gaps, k = positions.gaps, param
        end = torch.cumsum((gaps >> k) + (1 + k), 0)
        total_bits = int(end[-1]) if gaps.numel() else 0
        out = torch.zeros(-(-total_bits // 8), dtype=torch.uint8, device=gaps.device)
        start = end - (1 + k)  # position of the terminating 1
        code = (1 | ((gaps & ((1 << k) - 1)) << 1)) << (start & 7)
        first = start >> 3
        for byte in range((k + 1 + 7 + 7) // 8):
            part = ((code >> (8 * byte)) & 0xFF).to(torch.uint8)
            # Codes share bytes but no bits: adding is setting. The last code's upper bytes may lie past the
            # end and are 0.
            out.index_add_(0, (first + byte).clamp_(max=max(out.numel() - 1, 0)), part)
        return out

    def decode(self, data: Tensor, param: int, nnz: int, numel: int) -> Tensor:
        k = param
        # A code can only be followed from its start: the walk runs on the host.
        bits = np.unpackbits(data.cpu().numpy(), bitorder="little")
        text, at = bits.tobytes(), 0
        found: list[int] = []
        while len(found) < nnz and (one := text.find(1, at)) >= 0:
            found.append(one)
            at = one + 1 + k
        if len(found) < nnz or at > bits.size:
            raise PayloadError(f"rice index section holds {len(found)} entries, header says {nnz}")
        if bits.size - at >= 8 or bits[at:].any():
            raise PayloadError("rice index section has trailing bits")
        ones = np.array(found, dtype=np.int64)
        quotient = np.diff(ones, prepend=-1 - k) - 1 - k
        if nnz and int(quotient.max()) > numel >> k:
            raise PayloadError(f"rice gap is outside a tensor of {numel} entries")
        gaps = quotient << k
        for place in range(k):
            gaps |= bits[ones + 1 + place].astype(np.int64) << place
        idx = np.cumsum(gaps + 1) - 1
        if nnz and int(idx[-1]) >= numel:
            raise PayloadError(f"index {int(idx[-1])} is outside a tensor of {numel} entries")
        return torch.from_numpy(idx).to(data.device)
