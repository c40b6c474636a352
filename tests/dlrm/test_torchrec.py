"""The torchrec codec by itself, and in torchrec where that is installed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.processes import run

from dct_plugin.errors import DCTError, DesyncError
from dct_plugin.integrations.torchrec import codecs, dct_registry


def test_round_trip_keeps_the_largest_and_their_gradients() -> None:
    forward, backward, positions = codecs(0.75, chunk=16)
    x = torch.randn(8 * 16, generator=torch.Generator().manual_seed(0))
    message = forward.encode(x)
    assert message.numel() == forward.calc_quantized_size(x.numel()) == 8 * 3 * 4
    received = forward.decode(message)
    kept = received != 0
    rows, magnitude = kept.view(8, 16), x.abs().view(8, 16)
    assert (rows.sum(1) == 4).all()
    assert (magnitude.masked_fill(rows, 0).amax(1) <= magnitude.masked_fill(~rows, 9).amin(1)).all()
    torch.testing.assert_close(received[kept], x[kept], rtol=1e-3, atol=0)

    gradient = torch.randn(x.numel(), generator=torch.Generator().manual_seed(1)) * 1e-6
    message = backward.encode(gradient)
    assert message.numel() == backward.calc_quantized_size(x.numel()) == 8 * 2 * 4
    arrived = backward.decode(message)
    assert torch.equal(arrived != 0, kept)
    torch.testing.assert_close(arrived[kept], gradient[kept], rtol=1e-2, atol=0)
    assert positions.dense_bytes / positions.sent_bytes == pytest.approx(2 * 16 * 4 / (5 * 4))


def test_backward_messages_answer_the_newest_forward_ones() -> None:
    forward, backward, _ = codecs(0.5, chunk=4, in_flight=3)
    for _ in range(5):  # evaluations
        forward.decode(forward.encode(torch.randn(8)))
    first, second = torch.tensor([1.0, 2, 3, 4]), torch.tensor([4.0, 3, 2, 1, 9, 9, 0, 0])
    for x in (first, second):
        forward.decode(forward.encode(x))
    assert backward.decode(backward.encode(torch.ones(8))).tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert backward.decode(backward.encode(torch.ones(4))).tolist() == [0, 0, 1, 1]
    with pytest.raises(DesyncError, match="3 chunks does not answer"):
        backward.encode(torch.ones(12))


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="sparsity=1"):
        codecs(1.0)
    with pytest.raises(ValueError, match="chunk=512"):
        codecs(0.5, chunk=512)
    with pytest.raises(DCTError, match="100 entries does not divide into chunks of 256"):
        codecs(0.5)[0].calc_quantized_size(100)


def _train(rank: int, world_size: int, sparsity: float) -> dict[str, float]:
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    tables, dim, rows, batch = 4, 16, 50, 32
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    EmbeddingBagConfig(
                        name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{i}"]
                    )
                    for i in range(tables)
                ],
            )
            self.top = nn.Linear(tables * dim, 1)

        def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
            self.pooled = self.ebc(ids).values()
            return self.top(self.pooled)[:, 0]

    model = Model()
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=dct_registry(sparsity))
    placement = {f"t{i}": table_wise(rank=i % world_size, compute_kernel="dense") for i in range(tables)}
    plan = construct_module_sharding_plan(
        model.ebc, placement, sharder=sharder, local_size=world_size, world_size=world_size, device_type="cpu"
    )
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"ebc": plan}),
        sharders=[sharder],
    )
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, rows, (tables * batch,), generator=generator)
    features = KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(tables)],
        values=ids,
        lengths=torch.ones(tables * batch, dtype=torch.long),
    )
    losses = []
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
    label = (ids[:batch] % 2).float()
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(parallel(features), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    density = float((parallel.module.pooled != 0).float().mean())
    dist.barrier()
    return {"first": losses[0], "last": losses[-1], "density": density}


@pytest.mark.slow
def test_in_torchrec() -> None:
    pytest.importorskip(
        "torchrec",
        reason="torchrec is not installed; see integrations/torchrec.py for a set that works",
        exc_type=ImportError,
    )
    for result in run(2, _train, 0.75):
        assert result["density"] == pytest.approx(0.25, abs=0.01)
        assert result["last"] < result["first"]


def test_registry_says_how_to_install_torchrec() -> None:
    try:
        import torchrec  # noqa: F401
    except ImportError:
        with pytest.raises(DCTError, match=r"torchrec==1\.8\.0 fbgemm-gpu-cpu==1\.8\.0"):
            dct_registry(0.9)
    else:
        assert list(dct_registry(0.9)) == ["POOLED_EMBEDDINGS_ALL_TO_ALL"]
