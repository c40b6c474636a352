"""The drop-in for facebookresearch/dlrm's all-to-all, against what that one does."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run
from torch import Tensor

from examples.facebook_dlrm import CompressedAllToAll

pytestmark = pytest.mark.slow

DIM, BATCH = 4, 7  # samples do not divide evenly
TABLES = [2, 1, 3]


def vectors(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(BATCH, DIM, generator=generator).requires_grad_() for _ in range(TABLES[rank])]


def _exchange(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, float]:
    tables = TABLES[:world_size]
    host = ModuleType("extend_distributed")
    exchange = CompressedAllToAll(tables[rank], DIM, config)
    exchange.install(host)
    inputs = vectors(rank)
    outputs = host.alltoall(inputs, tables).wait()  # type: ignore[attr-defined]
    share, more = divmod(BATCH, world_size)
    sizes = [share + (r < more) for r in range(world_size)]
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    everything = [torch.stack([t[mine] for t in vectors(r)], dim=1).flatten(1) for r in range(world_size)]
    assert [tuple(o.shape) for o in outputs] == [tuple(e.shape) for e in everything]
    error = max(float((o - e).abs().max()) for o, e in zip(outputs, everything, strict=True))
    # A gradient that tells samples, tables and entries apart
    torch.cat(outputs, dim=1).mul(rank + 1.0).sum().backward()
    owners = torch.arange(world_size).repeat_interleave(torch.tensor(sizes)) + 1.0
    wrong = max(float((t.grad - owners.unsqueeze(1)).abs().max()) for t in inputs if t.grad is not None)
    zeros = float((torch.cat(outputs, dim=1) == 0).float().mean())
    dist.barrier()
    return {"error": error, "wrong_gradient": wrong, "zeros": zeros}


@pytest.mark.parametrize("world_size", [2, 3])
def test_exact_without_layers(world_size: int) -> None:
    for result in run(world_size, _exchange, {}):
        assert result == {"error": 0.0, "wrong_gradient": 0.0, "zeros": 0.0}


def test_bounded_and_thresholded() -> None:
    for result in run(2, _exchange, {"error_bound": 0.05}):
        assert 0 < result["error"] <= 0.05 * (1 + 1e-5)
        assert result["wrong_gradient"] == 0.0  # straight through
    for result in run(2, _exchange, {"sparsity": 0.5, "value_dtype": "fp32"}):
        assert 0.2 < result["zeros"] < 0.8
        assert result["wrong_gradient"] == 2.0 or result["wrong_gradient"] == 1.0  # masked entries get none
