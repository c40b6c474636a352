"""All entries, within a bound of the error."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import PayloadError
from ...kernels.embedding import get_embedding_kernels
from ...kernels.embedding_format import EmbeddingKernels, IntArray, Outgoing
from ...stream import backend_beside
from .compressor import ActivationCompressor, Written, add, rows_of, size_of_rows

#: Entries that share a code, or a row's where that has more.
_SEGMENT = 256
#: Picoseconds that a bit is worth (see ``EmbeddingKernels.encode``): the smallest code.
_BIT_COST = 1 << 20


class Bounded(ActivationCompressor):
    """``q = round(x / (2 * bound))``, then Rice or bit-packed codes, a parameter for every few rows.

    Source: dual-level adaptive lossy compression (Feng et al., SC 2024, arXiv:2407.04272), whose bound is
    absolute; here it is ``error_bound`` times the root mean square of the tensor, so that one setting serves
    activations and gradients of any scale. No entry that arrives is further off. A tensor with a non-finite
    entry decodes to NaN. The kernels work on the host.
    """

    exact = False

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 64 + 4 * shape.numel() + 4 * len(_segments(shape))

    def encode(self, parts: Sequence[Tensor]) -> Written:
        began = time.perf_counter()
        outgoing = []
        for part in parts:
            rows, lengths = rows_of(part).cpu(), _segments(part.shape)
            scale = float(rows.square().mean().sqrt()) if rows.numel() else 0.0
            bound = (self.config.error_bound or 0.0) * scale if math.isfinite(scale) else 0.0
            outgoing.append(Outgoing(rows.reshape(-1), lengths, np.full(len(lengths), bound)))
        written = self._kernels().encode(outgoing, _BIT_COST) if outgoing else []
        messages = [
            torch.empty(0, dtype=torch.uint8) if one.message is None else one.message for one in written
        ]
        there = [message.to(part.device) for message, part in zip(messages, parts, strict=True)]
        return self.written(there, [None] * len(there), parts, began)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> None:
        values = torch.empty(out.numel())
        (opened,) = self._kernels().decode([message[:-1].cpu()], [_segments(out.shape)], [values])
        if opened.fault is not None:
            raise PayloadError(opened.fault)
        add(out, values.to(out.device))

    def _kernels(self) -> EmbeddingKernels:
        return get_embedding_kernels(backend_beside(self.site.kernels, torch.device("cpu")))


def _segments(shape: torch.Size) -> IntArray:
    """Entries of each segment of a tensor: whole rows."""
    rows, width = size_of_rows(shape)
    together = max(1, _SEGMENT // max(width, 1))
    starts = np.arange(0, rows, together, dtype=np.int64)
    return np.asarray((np.minimum(starts + together, rows) - starts) * width, dtype=np.int64)
