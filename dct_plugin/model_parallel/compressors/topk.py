"""The largest entries of each tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels import SMALLEST_TAU, Tau
from ...stream import Encoded
from ...thresholds import wanted
from .entries import KeptEntries


class TopK(KeptEntries):
    """Exactly the wanted number of entries of every tensor, ranked anew (MCBench, Bian et al., MLSys 2024).

    There is no state. Of equal magnitudes at the limit those are taken that a round trip over the tensor
    meets first.
    """

    def _entries(self, numel: int, value_dtype: object) -> int:
        return wanted(self.density, numel)

    def _taus(self, encoded: Encoded, flats: Sequence[Tensor]) -> Sequence[Tau]:
        return [
            self._stream.backend(flat.device).exact_threshold(flat, None, wanted(self.density, flat.numel()))
            if flat.numel()
            else SMALLEST_TAU
            for flat in flats
        ]
