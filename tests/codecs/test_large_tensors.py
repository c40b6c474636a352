"""Tensors of more than 2^31 entries: their positions, and one that takes memory only where it has entries."""

from __future__ import annotations

import mmap

import psutil
import pytest
import torch

from dct_plugin.codecs.index import MAX_NUMEL
from dct_plugin.codecs.payload import payload_bound
from dct_plugin.kernels import Job, get_backend

SIGN = 2**31
#: At block boundaries, around the sign bit of 32-bit integers, and far apart.
KEPT = [0, 5, 65_535, 65_536, SIGN - 65_536, SIGN - 2, SIGN - 1, SIGN, SIGN + 1, SIGN + 65_536, SIGN + 70_000]


def test_a_tensor_beyond_32_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="is outside 0"):
        get_backend("cpu", "cpu").encode_indices(torch.tensor([1]), MAX_NUMEL + 1)


def untouched(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory where they are written to; all others are read from one page of zeros."""
    if psutil.virtual_memory().available < 2**32:
        pytest.skip("too little memory to be sure of")
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


@pytest.mark.slow
def test_a_whole_tensor() -> None:
    """Of bf16, through the compiled kernels; pages that nothing is written to take no memory."""
    numel = SIGN + 70_001
    gradient = untouched(numel, torch.bfloat16)
    positions = torch.tensor(KEPT)
    gradient[positions] = values = torch.arange(1.0, len(KEPT) + 1).bfloat16()
    capacity = 100
    out = torch.empty(payload_bound(numel, capacity, 1), dtype=torch.uint8)
    backend = get_backend("cpu", "cpu")
    stats = backend.compress(Job(gradient, None, 0.5, out, capacity=capacity, value_dtype=1))
    assert (stats.nnz, stats.above, stats.nonfinite) == (len(KEPT), len(KEPT), False)
    total = untouched(numel, torch.float32)
    assert backend.decode_add(out[: stats.nbytes], total) == len(KEPT)
    assert torch.equal(total[positions], values.float())
    assert float(backend.sample_threshold(gradient, None, 1e-9, 1000, seed=1)) > 0.0
