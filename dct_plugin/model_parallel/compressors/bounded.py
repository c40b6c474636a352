"""All entries, within a bound of the error."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...config.model_parallel import BoundMethod
from ...errors import PayloadError
from ...kernels import embedding as kernels
from ...kernels.embedding import IntArray, Outgoing
from .compressor import ActivationCompressor, Written, add, rows_of, size_of_rows

#: Entries that share a code, or a row's where that has more.
_SEGMENT = 256
#: Picoseconds that a bit is worth (see ``kernels.embedding.encode``): the smallest code.
_BIT_COST = 1 << 20


class Bounded(ActivationCompressor[BoundMethod]):
    """``q = round(x / (2 * bound))``, then Rice or bit-packed codes, a parameter for every few rows.

    Source: dual-level adaptive lossy compression (Feng et al., SC 2024, arXiv:2407.04272), whose bound is
    absolute; here it is ``error_bound`` times the root mean square of the tensor, so that one setting serves
    activations and gradients of any scale. No entry that arrives is further off. A tensor with a non-finite
    entry decodes to NaN. The host writes and reads the codes.
    """

    exact = False

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 64 + 4 * shape.numel() + 4 * len(_segments(shape))

    def encode(self, parts: Sequence[Tensor]) -> Written:
        began = time.perf_counter()
        outgoing = []
        for part in parts:
            lengths = _segments(part.shape)
            rows = rows_of(part).cpu()
            scale = rows.square().mean().sqrt() if rows.numel() else rows.new_zeros(())
            bound = torch.where(scale.isfinite(), self.config.error_bound * scale.to(torch.float64), 0.0)
            outgoing.append(Outgoing(rows.reshape(-1), lengths, bound.repeat(len(lengths)).numpy()))
        messages = []
        for one, part in zip(kernels.encode(outgoing, _BIT_COST), parts, strict=True):
            assert one.message is not None
            messages.append(one.message.to(part.device))
        return self.written(messages, [None] * len(messages), parts, began)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> None:
        values = torch.empty(out.numel(), dtype=torch.float32, device="cpu")
        (fault,) = kernels.decode([message[:-1].cpu()], [_segments(out.shape)], [values])
        if fault is not None:
            raise PayloadError(fault)
        add(out, values.to(out.device))


def _segments(shape: torch.Size) -> IntArray:
    """Return the entries of each segment of a tensor: whole rows."""
    rows, width = size_of_rows(shape)
    together = max(1, _SEGMENT // max(width, 1))
    starts = np.arange(0, rows, together, dtype=np.int64)
    return np.asarray((np.minimum(starts + together, rows) - starts) * width, dtype=np.int64)
