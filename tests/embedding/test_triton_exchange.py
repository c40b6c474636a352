"""Embedding tables beside Triton's kernels: the values of the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.host_reads import HostReads
from support.processes import run
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux only")

from dct_plugin import kernels
from dct_plugin.config import EmbeddingChannelConfig, KernelConfig
from dct_plugin.embedding import Bags, ShardedTables
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import TritonBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu has this with a GPU"),
]
CARDINALITIES, DIM = [30, 7, 50], 32
LAYERS: list[dict[str, Any]] = [
    {},
    {"value_dtype": "bf16"},
    {"error_bound": 0.01, "gradient_bound": 0.5},
    {"sparsity": 0.5},
]


def _train(rank: int, world_size: int) -> list[list[Tensor]]:
    """Return the results of every layer, with either kind of kernels."""
    kernels.register_backend("plain", ReferenceBackend)
    kernels.register_backend("interpreted", TritonBackend)
    found = []
    for layers in LAYERS:
        for backend in ("plain", "interpreted"):
            torch.manual_seed(0)
            config = EmbeddingChannelConfig.of(layers)
            module = ShardedTables(
                CARDINALITIES, DIM, config=config, kernels=KernelConfig(backend=backend), name=backend
            )
            module.embedding_exchange.messages.codec.bit_cost = 0  # whatever the exchange took
            found.append(kept := [])
            for step in range(4):
                generator = torch.Generator().manual_seed(10 * step + rank)
                samples = 20 + 3 * step + rank
                columns = [torch.randint(rows, (samples,), generator=generator) for rows in CARDINALITIES]
                ids: Tensor | list[Bags] = torch.stack(columns, dim=1)
                if step == 2:
                    lengths = torch.randint(1, 4, (5,), generator=generator)
                    drawn = (
                        torch.randint(n, (int(lengths.sum()),), generator=generator) for n in CARDINALITIES
                    )
                    ids = [Bags(each, lengths) for each in drawn]
                if step == 3 and rank == 0:
                    module.shard.weight.data[3, 1] = float("nan")
                module.shard.weight.grad = None
                out = module(ids)
                out.backward(torch.randn(out.shape, generator=generator))
                module.end_step()
                assert module.shard.weight.grad is not None
                kept += [out.detach(), module.shard.weight.grad.clone()]
    return found


def _places(rank: int, world_size: int) -> list[str]:
    """Return where the library reads tensors in a step under a threshold, but for the exchange itself."""
    kernels.register_backend("interpreted", TritonBackend)
    config = EmbeddingChannelConfig.of({"sparsity": 0.5})
    module = ShardedTables(CARDINALITIES, DIM, config=config, kernels=KernelConfig(backend="interpreted"))
    ids = torch.arange(6 * len(CARDINALITIES)).view(6, -1) % 7
    with HostReads() as reads:
        out = module(ids)
        out.backward(torch.ones_like(out))
    inside = ("embedding/embedding_exchange", "embedding/messages", "embedding/vector", "kernels/reference")
    return [place for place in reads.places if place.startswith((*inside, "codecs/copies.py:cpu"))]


def test_ranks_under_a_threshold_cost_no_waits() -> None:
    two, *_ = run(2, _places)
    three, *_ = run(3, _places)
    assert two == three


def test_the_values_of_the_reference() -> None:
    for found in run(2, _train):
        for expected, interpreted in zip(found[::2], found[1::2], strict=True):
            for one, other in zip(expected, interpreted, strict=True):
                assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
