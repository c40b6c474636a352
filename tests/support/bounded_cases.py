"""What error-bounded codes are tested with."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from dct_plugin.kernels.embedding import Outgoing

segments = st.lists(
    st.tuples(
        st.integers(0, 60),  # entries
        st.floats(1e-30, 1e4),  # bound
        st.floats(1e-12, 1e6),  # scale of the entries
        st.floats(0, 1),  # share of zeros
    ),
    min_size=1,
    max_size=6,
)


def drawn(shape: list[tuple[int, float, float, float]], seed: int) -> Outgoing:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for count, bound, scale, zeros in shape:
        x = torch.randn(count, generator=generator) * scale
        x[torch.rand(count, generator=generator) < zeros] = 0.0
        half = torch.randint(-9, 9, (count,), generator=generator).to(torch.float32) * bound
        parts.append(torch.where(torch.rand(count, generator=generator) < 0.2, half, x))  # ties
    return outgoing(torch.cat(parts), [s[0] for s in shape], [s[1] for s in shape])


def outgoing(x: Tensor, lengths: list[int], bounds: list[float]) -> Outgoing:
    return Outgoing(x, np.array(lengths, dtype=np.int64), np.array(bounds, dtype=np.float64))
