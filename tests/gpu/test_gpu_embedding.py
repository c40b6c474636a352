"""Tables on a GPU: the values of tables on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import DEVICE
from support.processes import run

pytest.importorskip("triton", reason="needs triton")

from dct_plugin.config import EmbeddingChannelConfig
from dct_plugin.embedding import ShardedTables
from dct_plugin.embedding.messages import VectorBlock, VectorMessages
from dct_plugin.embedding.vector_codec import VectorCodec
from dct_plugin.kernels import get_backend


def test_the_messages_of_an_exchange() -> None:
    config = EmbeddingChannelConfig.of({"error_bound": 0.1, "gradient_bound": 0.1})
    codec = VectorCodec(config, name="t", backend=get_backend)
    messages = VectorMessages(codec, 16)
    rows = [[300, 200], [400, 100]]
    x = [torch.randn(500, 16, device=DEVICE) for _ in rows]
    bounds = np.array([0.05, 0.1])
    blocks = [VectorBlock(each, count, None, bounds) for each, count in zip(x, rows, strict=True)]
    sent = messages.encode(blocks, 0)
    got, _ = messages.decode(sent.data, 0, sent.own, rows)
    assert got.device.type == torch.device(DEVICE).type
    assert float((got[500:] - x[1]).abs().max()) <= 0.1
    answers = messages.encode_gradients(x, 0, rows, [None, None], quantised=True)
    back, _ = messages.decode(answers.data, 0, answers.own, rows, [None, None])
    assert float((back[500:] - x[1]).abs().max()) <= 0.11


def _train(rank: int, world_size: int, device: str, config: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = EmbeddingChannelConfig.of(config)
    module = ShardedTables([300, 70, 500], 16, config=made).to(device)
    kept = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.stack(
            [torch.randint(rows, (200,), generator=generator) for rows in (300, 70, 500)], dim=1
        )
        module.shard.weight.grad = None
        out = module(ids.to(device))
        out.backward(torch.randn(out.shape, generator=generator).to(device))
        module.end_step()
        assert module.shard.weight.grad is not None
        kept += [out.detach().cpu(), module.shard.weight.grad.cpu()]
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"error_bound": 0.01, "gradient_bound": 0.05}, {"sparsity": 0.5}])
def test_tables_of_two_processes_on_one_device(config: dict[str, Any]) -> None:
    expected, found = run(2, _train, "cpu", config), run(2, _train, DEVICE, config)
    for mine, other in zip(found, expected, strict=True):
        for one, two in zip(mine, other, strict=True):
            # Sums are taken in another order there: of equal rows' gradients, and of squares, for bounds.
            assert torch.allclose(one, two, rtol=1e-4, atol=1e-4)
