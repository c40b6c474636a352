"""Embeddings on devices whose kernels write the messages: the host's values, and one wait per direction."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.host_reads import HostReads
from support.processes import run
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux only")

from dct_plugin import kernels
from dct_plugin.config import EmbeddingChannelConfig, KernelConfig, MetricsConfig
from dct_plugin.embedding import Bags, ShardedTables, embedding_exchange
from dct_plugin.errors import DesyncError
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import WRITTEN, TritonBackend
from dct_plugin.metrics import Metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu has this with a GPU"),
]
CARDINALITIES, DIM, STEPS = [30, 7, 50], 32, 5
LAYERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16": {"value_dtype": "bf16"},
    "bounded": {"error_bound": 0.01, "gradient_bound": 0.5},
    "threshold": {"sparsity": 0.5},
}
#: The one copy that the host waits for.
ONE_WAIT = ["codecs/copies.py:cpu"]


def tables(
    backend: str, layers: dict[str, Any], cardinalities: Sequence[int] = CARDINALITIES
) -> ShardedTables:
    kernels.register_backend("plain", lambda: ReferenceBackend(WRITTEN))
    kernels.register_backend("interpreted", TritonBackend)
    torch.manual_seed(0)
    config = EmbeddingChannelConfig.of(layers)
    metrics = Metrics(MetricsConfig(), rank=dist.get_rank(), world_size=dist.get_world_size())
    module = ShardedTables(
        cardinalities, DIM, config=config, kernels=KernelConfig(backend=backend), metrics=metrics
    )
    module.embedding_exchange.messages.codec.bit_cost = 0  # packed codes, as the device's
    return module


def waits(reads: HostReads) -> list[str]:
    """A look at what was copied is none."""
    return [place for place in reads.places if not place.endswith((":tolist", ":numpy"))]


@contextmanager
def backward_reads() -> Iterator[HostReads]:
    """Autograd's engine calls outside of the context that it is called in."""
    trip = embedding_exchange._RoundTrip
    reads, backward = HostReads(), trip.backward

    def watched(crossing: Any, gradient: Tensor) -> Tensor:
        with reads:
            return backward(crossing, gradient)

    trip.backward = watched  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        trip.backward = backward  # type: ignore[method-assign]


def _train(rank: int, world_size: int, backend: str, kind: str) -> tuple[list[Tensor], list[list[str]]]:
    module = tables(backend, LAYERS[kind])
    kept, waited = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        samples = 20 + 3 * step + rank
        columns = [torch.randint(rows, (samples,), generator=generator) for rows in CARDINALITIES]
        if step == 3 and rank == 1:  # more bits than the last messages had: some do not fit their frames
            module.shard.weight.data.mul_(300.0)
        if step == 4 and rank == 0:
            module.shard.weight.data[3, 1] = float("nan")
        module.shard.weight.grad = None
        with HostReads() as forward:
            out = module(torch.stack(columns, dim=1))
        gradient = torch.randn(out.shape, generator=generator)
        if step == 3 and rank == 0:
            gradient[0, :, 0] *= 1e4
        with backward_reads() as backward:
            out.backward(gradient)
        module.end_step()
        assert module.shard.weight.grad is not None
        kept += [out.detach(), module.shard.weight.grad.clone()]
        waited += [waits(forward), waits(backward)]
    assert module.metrics is not None
    classes = module.metrics.summary().classes
    assert {"embedding_ids", "embedding_forward", "embedding_backward"} <= classes.keys()
    return kept, waited


@pytest.mark.parametrize("kind", list(LAYERS))
def test_the_values_of_the_host_with_one_wait_per_direction(kind: str) -> None:
    expected, found = (run(2, _train, backend, kind) for backend in ("plain", "interpreted"))
    for (mine, waited), (other, _) in zip(found, expected, strict=True):
        for one, two in zip(mine, other, strict=True):
            assert torch.equal(one.isnan(), two.isnan())
            # Root mean squares are summed in another order: a bound's last bit may differ.
            off = 0.0 if kind != "bounded" else 1e-5 * float(two.nan_to_num().abs().max())
            assert float((one - two).nan_to_num().abs().max()) <= off
        if kind == "threshold":  # what crosses decides over sizes
            continue
        # The first exchange is one with sizes; in step 3 some messages are sent again.
        assert waited[2] == waited[4] == 2 * ONE_WAIT  # requests and vectors
        assert waited[3] == waited[5] == ONE_WAIT
    if kind == "bounded":
        assert max(len(waited[6]) for _, waited in found) > 2
        assert max(len(waited[7]) for _, waited in found) > 1


def _uneven(rank: int, world_size: int, backend: str) -> tuple[list[Tensor], list[int]]:
    """A rank without samples, one that asks for more than a frame holds, and several rows per sample: what a
    device does not write, or does not read.
    """
    module, kept, waited = tables(backend, {}, [30_000, 7000, 5000]), [], []
    for step, counts in enumerate([(5, 4), (5, 0), (300, 6), (5, 4), (6, 5)]):
        generator = torch.Generator().manual_seed(10 * step + rank)
        shape = (counts[rank], len(CARDINALITIES), 2)
        ids = torch.randint(3000, shape, generator=generator) * torch.tensor([[10], [2], [1]])
        with HostReads() as reads:
            kept.append(module(ids if step == 3 and rank == 1 else ids[..., 0]).detach())
        waited.append(len(waits(reads)))
    return kept, waited


def test_requests_that_are_not_a_devices_or_do_not_fit_their_frames() -> None:
    found, expected = (run(2, _uneven, backend) for backend in ("interpreted", "plain"))
    for (mine, _), (other, _) in zip(found, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
    (_, first), (_, second) = found
    assert first[1] == first[2] == first[4] == second[4] == 2  # requests, and vectors
    assert second[2] > 2  # a request that came again
    assert first[3] > 2  # several rows per sample, which the host reads


def _fail(rank: int, world_size: int) -> str:
    module = tables("interpreted", {})
    try:
        for step in range(3):
            ids = torch.zeros(4, 3, dtype=torch.int64)
            if step == 2 and rank == 1:
                ids[2, 1] = 7
            module(ids).sum().backward()
    except (IndexError, DesyncError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_with_an_impossible_id_tells_those_that_wait_for_its_frame() -> None:
    first, second = run(2, _fail)
    assert first.startswith("DesyncError: rank 0: rank(s) [1] failed while preparing this exchange")
    assert second.startswith("IndexError: tables: rank 1: id 7 is outside table 1")


def _bags(rank: int, world_size: int, backend: str) -> list[Tensor]:
    module = tables(backend, {})
    kept = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        lengths = torch.randint(1, 4, (5,), generator=generator)
        bags = [
            Bags(torch.randint(n, (int(lengths.sum()),), generator=generator), lengths) for n in CARDINALITIES
        ]
        kept.append(module(bags).detach())
    return kept


@pytest.mark.parametrize("backend", ["interpreted", "triton"])
def test_bags_of_rows_and_tables_of_the_host_in_a_job_of_a_gpu(backend: str) -> None:
    """Kernels for CUDA leave what is on the host to the host's."""
    for mine, other in zip(run(2, _bags, backend), run(2, _bags, "plain"), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
