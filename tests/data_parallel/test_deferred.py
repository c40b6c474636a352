"""A backend whose figures stay on its device: the same bits, and one read per message round."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.deferred_backend import DeferredBackend, OnDevice
from support.processes import run

pytest.importorskip("triton", reason="the looped transport is beside the counts of Triton's kernels")

from benchmarks.host_work import LoopedPeers
from dct_plugin import Compressor
from dct_plugin.config import DataParallelConfig, KernelConfig, MetricsConfig, PipelineConfig, TensorConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.errors import DesyncError
from dct_plugin.kernels import register_backend
from dct_plugin.metrics import Metrics
from dct_plugin.model_parallel import ActivationStream, CompressedCollectives, FixedMessages
from dct_plugin.transport import slots
from dct_plugin.transport.exchange import Exchange
from dct_plugin.transport.slots import Slots

SIZES = {"embedding": 60_000, "layer": 40_001, "head": 5_000, "bias": 64, "empty": 0}
EXCHANGES = ("direct", "reduce_scatter", "two_phase")


def tensor(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def kernels(name: str) -> KernelConfig:
    register_backend("deferred", DeferredBackend)
    return KernelConfig(backend=name)


def same(mine: Any, other: Any) -> bool:
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(same(mine[key], other[key]) for key in mine)
    return torch.equal(mine, other) if isinstance(mine, torch.Tensor) else bool(mine == other)


def _reduce(rank: int, world_size: int, backend: str, exchange: str) -> dict[str, Any]:
    """Six steps with a poisoned one that is skipped, and a changed loss scale."""
    config = DataParallelConfig(sparsity=0.95, exchange="auto" if exchange == "reduce_scatter" else exchange)
    metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
    reducer = GradientReducer(config, kernels=kernels(backend), transactional=True, metrics=metrics)
    arrived, reads = {}, []
    for step in range(6):
        entries = {name: tensor(size, 100 * rank + step) for name, size in SIZES.items()}
        if step == 3 and rank == 1:
            entries["layer"][7] = float("nan")
        before = OnDevice.reads
        if exchange == "reduce_scatter":
            halves = {n: [Shard(0, 0, size // 2), Shard(1, size // 2, size)] for n, size in SIZES.items()}
            reducer.reduce_scatter([(name, t, halves[name]) for name, t in entries.items()])
        else:
            reducer.all_reduce(list(entries.items()))
        reducer.end_step(skipped=step == 3, loss_scale=2.0 if step == 4 else None)
        reads.append(OnDevice.reads - before)
        arrived |= {f"{name} {step}": t.nan_to_num(nan=-1.0) for name, t in entries.items()}
    total = metrics.summary()
    sent = {name: (c.sent_bytes, c.density, c.tau, c.refreshes) for name, c in total.classes.items()}
    return {"arrived": arrived, "state": reducer.state_dict(), "sent": sent, "reads": reads}


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_reducer_reads_once_per_round_and_gives_the_same_bits(exchange: str) -> None:
    expected = run(2, _reduce, "reference", exchange)
    found = run(2, _reduce, "deferred", exchange)
    for mine, other in zip(found, expected, strict=True):
        assert same(mine["arrived"], other["arrived"])
        assert same(mine["state"], other["state"])
        for name, (sent, *figures) in mine["sent"].items():
            fewest, *expected_figures = other["sent"][name]
            assert figures == expected_figures
            assert fewest <= sent <= 4 * fewest  # slots have room for the largest messages
        assert mine["reads"] == [1] * 6
        assert other["reads"] == [0] * 6


@pytest.mark.parametrize("residual_dtype", ["fp32", "bf16"])
def test_a_changed_loss_scale_scales_residuals_where_they_lie(residual_dtype: str) -> None:
    """Exactly, without a copy to the host; torch's gradient scaler changes it every so many steps."""
    reducers = [
        GradientReducer(
            DataParallelConfig(sparsity=0.95, feedback="local", residual_dtype=residual_dtype),
            LoopedPeers(0, range(2)),
            kernels=kernels("deferred"),
            transactional=True,
        )
        for _ in range(2)
    ]
    for reducer in reducers:
        reducer.all_reduce([("layer", tensor(40_001, 0))])
        reducer.end_step()
    plain, scaled = (reducer.group.streams["layer"].residual for reducer in reducers)
    assert plain is not None
    assert scaled is not None
    before, held = OnDevice.reads, scaled._newest
    for scale in (1024.0, 1.0, 65536.0):
        reducers[1].rescale(scale)
    assert OnDevice.reads == before
    assert scaled._newest is held
    assert torch.equal(scaled.current, 65536.0 * plain.current)


def _slot_sizes(rank: int, world_size: int, exchange: str) -> list[tuple[int, bool, list[int], list[int]]]:
    """Each event is on one rank alone: large gradients and transactions on rank 1, NaN on rank 2, metrics on
    rank 0.
    """
    config = DataParallelConfig(
        sparsity=0.95, exchange=exchange, min_numel=1000, expert={"threshold": "fixed"}
    )
    metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size) if rank == 0 else None
    reducer = GradientReducer(config, kernels=kernels("deferred"), transactional=rank == 1, metrics=metrics)
    sizes = []

    class Recorded(Slots):
        def send(self, exchange: Exchange) -> None:
            arriving = [end - begin for begin, end in self.bounds]
            sizes.append((self.received.numel(), self.layout.equal, self.layout.sizes_to, arriving))
            super().send(exchange)

    slots.Slots = Recorded  # type: ignore[misc]
    for step in range(8):
        for bucket in ("first", "second"):
            entries = [(f"{bucket} {n}", tensor(size, 10 * rank + step)) for n, size in SIZES.items()]
            factor = 5.0 if (rank, step) in ((1, 3), (1, 6)) else 1.0
            for _, gradient in entries:
                gradient *= factor
            if (rank, step) == (2, 4):
                entries[1][1][7] = float("nan")
            reducer.begin(entries).finish()
        reducer.finish()
        reducer.end_step(skipped=step == 4)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
def test_slots_have_one_size_at_both_ends_whatever_happened_on_a_rank(exchange: str) -> None:
    """nccl checks no sizes. They follow from what both ends know of the largest message."""
    exchanges = list(zip(*run(3, _slot_sizes, exchange), strict=True))
    assert len(exchanges) == 8 * 2 * (2 if exchange == "two_phase" else 1)
    for ranks in exchanges:
        assert len({equal for _, equal, _, _ in ranks}) == 1
        if ranks[0][1]:
            assert len({total for total, *_ in ranks}) == 1
        else:
            for (sender, (_, _, leaving, _)), (receiver, (_, _, _, arriving)) in itertools.permutations(
                enumerate(ranks), 2
            ):
                assert leaving[receiver] == arriving[sender]
    totals = [ranks[0][0] for ranks in exchanges]
    assert totals == 8 * totals[: len(totals) // 8]


def _reduce_buckets(rank: int, world_size: int, exchange: str, deviates: str) -> Any:
    """Two buckets a step, which are completed together, as torch DDP does. In step 3 the ranks that deviate
    reduce tensors of other names.
    """
    config = DataParallelConfig(sparsity=0.9, exchange=exchange)
    backend = "reference" if deviates == "all, lengths on the host" else "deferred"
    reducer = GradientReducer(config, kernels=kernels(backend))
    arrived = []
    try:
        for step in range(5):
            for bucket in ("first", "second"):
                own = f"other {bucket}" if step == 3 and (rank == 1 or "all" in deviates) else bucket
                own = own if deviates in own or "all" in deviates else bucket
                entries = {name: tensor(20_000, 10 * rank + step) for name in (own, f"{bucket} layer")}
                reducer.begin(list(entries.items())).finish()
                arrived += entries.values()
            reducer.finish()
            reducer.end_step()
    except DesyncError as error:
        return str(error)
    return arrived


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
def test_a_rank_with_other_tensors_is_named_on_all_ranks(exchange: str) -> None:
    """It would exchange lengths while the others send slots."""
    for deviates in ("first", "second"):
        texts = run(3, _reduce_buckets, exchange, deviates)
        for rank, others in enumerate(([1], [0, 2], [1])):
            assert texts[rank].startswith(f"rank {rank}: rank(s) {others} are exchanging other tensors")
    found, expected = (run(2, _reduce_buckets, exchange, who) for who in ("all", "all, lengths on the host"))
    assert all(torch.equal(one, other) for one, other in zip(found[0], expected[0], strict=True))


def _activations(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    comm = CompressedCollectives()
    found: dict[str, Any] = {}
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"):
        stream = ActivationStream(
            TensorConfig.of(forward={"method": "threshold", "sparsity": 0.8}),
            name=kind,
            rank=rank,
            kernels=kernels(backend),
        )
        for step in range(3):
            x = tensor(4096, 10 * rank + step).view(8, 512).requires_grad_()
            before = OnDevice.reads
            out = getattr(comm, kind)(x, stream)
            forward = OnDevice.reads - before
            out.square().sum().backward()
            stream.end_step()
            found |= {f"{kind} {step}": out.detach(), f"{kind} {step} gradient": x.grad}
            assert (forward, OnDevice.reads - before) == ((1, 2) if backend == "deferred" else (0, 0)) or (
                kind == "all_reduce" and OnDevice.reads - before <= 1  # whose backward sends nothing
            )
        found[f"{kind} state"] = stream.state_dict()
    return found


@pytest.mark.slow
def test_activations_are_read_once_per_round_and_have_the_same_bits() -> None:
    for mine, other in zip(run(2, _activations, "deferred"), run(2, _activations, "reference"), strict=True):
        assert same(mine, other)


def test_messages_of_known_size_are_read_once() -> None:
    found = []
    for name in ("deferred", "reference"):
        stream = ActivationStream(
            PipelineConfig.of(forward={"method": "threshold", "sparsity": 0.9}), kernels=kernels(name)
        )
        messages = FixedMessages(stream)
        before = OnDevice.reads
        _, mask, encoded = messages.encode(tensor(5000, 1), 0)
        assert OnDevice.reads - before == (name == "deferred")
        stream.end_step()
        found.append((mask.content, encoded.totals().nnz, encoded.totals().tau, stream.state_dict()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_a_compressor_reads_once_per_tensor() -> None:
    deferred, reference = (
        Compressor(sparsity=0.9, feedback="local", kernels=kernels(name))
        for name in ("deferred", "reference")
    )
    for step in range(5):
        gradient = tensor(20_000, step)
        before = OnDevice.reads
        payload = deferred.compress(gradient)
        assert OnDevice.reads - before == 1
        assert payload.to_bytes() == reference.compress(gradient).to_bytes()
    assert same(deferred.state_dict(), reference.state_dict())
