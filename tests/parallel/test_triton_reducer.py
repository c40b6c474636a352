"""Two ranks whose kernels leave everything on the device: the reference's bits, and three looks at it."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from support.host_reads import HostReads
from support.processes import run

pytest.importorskip("triton", reason="triton is for Linux only")

from dct_plugin import kernels
from dct_plugin.config import DataParallelConfig, KernelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton_backend import WRITTEN, TritonBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu has this with a GPU"),
]
SIZES = {"embedding": 9_000, "layer": 4_001, "head": 2_000, "bias": 64, "empty": 0}
#: Copies to the host per reduction, besides the sizes on nccl. Answers are opened one owner after the other.
READS = {
    "direct": {"codecs/stats.py:cpu": 1, "kernels/triton_backend.py:cpu": 1},
    "two_phase": {"codecs/stats.py:cpu": 2, "kernels/triton_backend.py:cpu": 3},
}


def _reduce(rank: int, world_size: int, name: str, exchange: str) -> tuple[dict[str, Any], list[str]]:
    kernels.register_backend("plain", lambda: ReferenceBackend(WRITTEN))
    kernels.register_backend("interpreted", TritonBackend)
    config = DataParallelConfig(sparsity=0.95, exchange=exchange)  # type: ignore[arg-type]
    reducer = GradientReducer(config, kernels=KernelConfig(backend=name))
    kept: dict[str, Any] = {}
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * rank + step)
        entries = {n: torch.randn(size, generator=generator).bfloat16() for n, size in SIZES.items()}
        with HostReads() as reads:
            reducer.all_reduce(list(entries.items()), scale=0.5)
            reducer.end_step()
        kept |= {f"{n} {step}": tensor for n, tensor in entries.items()}
    kept |= {n: state["residual"] for n, state in reducer.state_dict()["streams"].items()}
    return kept, reads.places


@pytest.mark.parametrize("exchange", sorted(READS))
def test_triton_kernels_reduce_to_the_same_bits(exchange: str) -> None:
    expected, found = (run(2, _reduce, name, exchange) for name in ("plain", "interpreted"))
    for (mine, reads), (other, _) in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine)
        # Figures of what is sent and headers of what arrives: none per tensor.
        looks = [read for read in reads if not read.endswith((":tolist", ":numpy"))]  # at what was copied
        assert Counter(looks) == READS[exchange]
