"""Error-bounded codes on a GPU: the host's bytes and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run

pytest.importorskip("triton", reason="needs triton")

from dct_plugin.config import EmbeddingChannelConfig
from dct_plugin.embedding import ShardedTables
from dct_plugin.embedding.messages import VectorBlock, VectorMessages
from dct_plugin.embedding.vector_codec import VectorCodec
from dct_plugin.kernels import get_backend
from dct_plugin.kernels.embedding_format import Outgoing
from dct_plugin.kernels.triton.embedding import TritonCodeKernels

HOST, DEVICE = get_backend("cpu").embedding_kernels(), TritonCodeKernels()


def outgoing(lengths: list[int], bounds: list[float], seed: int) -> Outgoing:
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    return Outgoing(x, np.array(lengths, dtype=np.int64), np.array(bounds), kind=1)


def test_codes_of_all_ranks() -> None:
    parts = [
        outgoing([100_000, 0, 7, 30_000], [0.01, 1.0, 1e-9, 10.0], 1),
        outgoing([70_001], [0.1], 2),
        outgoing([300, 5], [0.1, 0.1], 3),
    ]
    parts[2].x[17] = float("inf")
    on_device = [part._replace(x=part.x.cuda()) for part in parts]
    coded = DEVICE.encode(on_device, 0, decoded=True)
    for mine, other in zip(coded, HOST.encode(parts, 0, decoded=True), strict=True):
        assert torch.equal(mine.message.cpu(), other.message)
        assert mine.finite == other.finite
        assert mine.decoded is None or torch.equal(mine.decoded.cpu(), other.decoded)
    outs = [torch.empty(part.x.numel(), device="cuda") for part in parts]
    payloads = [each.message[:-1] for each in coded]
    payloads[1] = payloads[1].clone()
    payloads[1][1000] ^= 1
    found = DEVICE.decode(payloads, [part.lengths for part in parts], outs)
    assert [each.fault is None for each in found] == [True, False, True]
    assert torch.equal(outs[0], coded[0].decoded)
    assert bool(outs[2].isnan().all())


def test_the_messages_of_an_exchange() -> None:
    config = EmbeddingChannelConfig.of({"error_bound": 0.1, "gradient_bound": 0.1})
    codec = VectorCodec(config, name="t", backend=get_backend, host=lambda: HOST)
    messages = VectorMessages(codec, 16)
    rows = [[300, 200], [400, 100]]
    x = [torch.randn(500, 16, device="cuda") for _ in rows]
    bounds = np.array([0.05, 0.1])
    blocks = [VectorBlock(each, count, None, bounds) for each, count in zip(x, rows, strict=True)]
    sent = messages.encode(blocks, 0)
    got, _ = messages.decode(sent.data, 0, sent.own, rows)
    assert got.is_cuda
    assert float((got[500:] - x[1]).abs().max()) <= 0.1
    answers = messages.encode_gradients(x, 0, rows, [None, None], quantised=True)
    back, _ = messages.decode(answers.data, 0, answers.own, rows, [None, None])
    assert float((back[500:] - x[1]).abs().max()) <= 0.11


def _train(rank: int, world_size: int, device: str, config: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = EmbeddingChannelConfig.of(config)
    module = ShardedTables([300, 70, 500], 16, config=made).to(device)
    module.embedding_exchange.messages.codec.bit_cost = 0  # packed codes, as the device's
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
    expected, found = run(2, _train, "cpu", config), run(2, _train, "cuda", config)
    for mine, other in zip(found, expected, strict=True):
        for one, two in zip(mine, other, strict=True):
            # Sums are taken in another order there: of equal rows' gradients, and of squares, for bounds.
            assert torch.allclose(one, two, rtol=1e-4, atol=1e-4)
