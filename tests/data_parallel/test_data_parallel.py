"""Gradient reduction between real gloo processes."""

from __future__ import annotations

import gc
import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.deferred_backend import DeferredBackend
from support.processes import launch, run

from dct_plugin import Compressor, kernels
from dct_plugin.codecs.message import MessageWriter
from dct_plugin.config import DataParallelConfig, DCTConfig
from dct_plugin.data_parallel import GradientReducer, Shard, plan
from dct_plugin.errors import DesyncError
from dct_plugin.kernels import Backend
from dct_plugin.metrics import Metrics

pytestmark = pytest.mark.slow

SIZES = {"embedding": 60_000, "layer": 40_001, "head": 5_000, "bias": 64, "empty": 0}


kernels.register_backend("deferred", DeferredBackend)


class Ranks(NamedTuple):
    """Starts ranks with certain kernels; see :mod:`support.processes`."""

    run: Callable[..., list[Any]]
    launch: Callable[..., list[Any]]


@pytest.fixture(params=["cpu", "deferred"], ids=["lengths on the host", "lengths on a device"])
def on(request: pytest.FixtureRequest) -> Ranks:
    """The C kernels, and kernels whose lengths and figures stay on a device until they are asked for."""
    return Ranks(partial(run, DCT_KERNELS=request.param), partial(launch, DCT_KERNELS=request.param))


def tensors(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in SIZES.items()}


def reducer(**settings: Any) -> GradientReducer:
    return GradientReducer(DataParallelConfig.of(settings))


# -- all_reduce ----------------------------------------------------------


def _sum_of_everything(rank: int, world_size: int, exchange: str, dtype: torch.dtype) -> dict[str, Any]:
    """At any sparsity: what arrived plus what all ranks (and owners) kept is what was put in."""
    engine = reducer(sparsity=0.95, exchange=exchange, value_dtype="fp32")
    put_in = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    arrived = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    for step in range(4):
        mine = tensors(rank, step, dtype)
        for other in range(world_size):
            for name, tensor in tensors(other, step, dtype).items():
                put_in[name] += tensor.double()
        engine.all_reduce(list(mine.items()))
        for name, tensor in mine.items():
            arrived[name] += tensor.double()
        engine.end_step()
    kept = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    for key, stream in engine.group.streams.items():
        name, _, part = key.partition("[")
        residual = stream.residual.current.double() if stream.residual is not None else None
        if residual is None:
            continue
        start = int(part.split(":")[0]) if part else 0
        kept[name][start : start + residual.numel()] += residual
    for tensor in kept.values():
        dist.all_reduce(tensor)
    return {
        "error": {n: float((put_in[n] - arrived[n] - kept[n]).abs().max()) for n in SIZES if SIZES[n]},
        "arrived": arrived,
    }


@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_lost_and_ranks_agree(on: Ranks, world_size: int, exchange: str) -> None:
    results = on.run(world_size, _sum_of_everything, exchange, torch.float32)
    for result in results:
        assert max(result["error"].values()) < 1e-4
        for name in SIZES:
            assert torch.equal(result["arrived"][name], results[0]["arrived"][name])


def _exchanges_switched(rank: int, world_size: int, before: str, after: str) -> float:
    """The largest entry that is lost, as all entries are sent after a restart with another exchange."""
    first, then = (
        reducer(sparsity=0.9, exchange="auto" if each == "owners" else each, value_dtype="fp32")
        for each in (before, after)
    )
    put_in, arrived = torch.zeros(5000), torch.zeros(5000)
    for step in range(5):
        gradient = tensors(rank, step)["head"]
        put_in += gradient
        first.all_reduce([("head", gradient)])
        arrived += gradient
        first.end_step()
    then.load_state_dict(first.state_dict())
    then.flush()
    gradient.zero_()
    bounds = [5000 * each // world_size for each in range(world_size + 1)]
    if after == "owners":
        shards = [Shard(owner, *each) for owner, each in enumerate(itertools.pairwise(bounds))]
        then.reduce_scatter([("head", gradient, shards)])
    else:
        then.all_reduce([("head", gradient)])
    dist.all_reduce(put_in)
    return float((put_in - arrived - gradient)[bounds[rank] : bounds[rank + 1]].abs().max())


@pytest.mark.parametrize(
    ("before", "after"), [("direct", "two_phase"), ("two_phase", "direct"), ("two_phase", "owners")]
)
def test_nothing_is_lost_where_a_restart_exchanges_in_another_way(before: str, after: str) -> None:
    assert max(run(3, _exchanges_switched, before, after)) < 1e-4


def _answers(rank: int, world_size: int) -> tuple[float, float]:
    metrics = Metrics(DCTConfig().metrics, rank=rank, world_size=world_size)
    config = DataParallelConfig(sparsity=0.99, exchange="two_phase", expert={"server_density": 1.5})
    engine = GradientReducer(config, metrics=metrics)
    for step in range(30):
        engine.all_reduce(list(tensors(rank, step).items()))
        engine.end_step()
        metrics.step(step)
    classes = metrics.summary().classes
    return classes["gradient"].density, classes["gradient_answer"].density


def test_owners_answer_at_a_density_of_their_own(on: Ranks) -> None:
    for up, down in on.run(2, _answers):
        assert (up, down) == (pytest.approx(0.01, rel=0.2), pytest.approx(0.015, rel=0.2))


def _dense(rank: int, world_size: int, exchange: str, dtype: torch.dtype) -> bool:
    engine = reducer(sparsity=0.0, exchange=exchange, value_dtype="fp32")
    for step in range(2):
        mine = tensors(rank, step, dtype)
        expected = {name: tensor.clone() for name, tensor in mine.items()}
        engine.all_reduce(list(mine.items()), scale=1.0 / world_size)
        for name, tensor in expected.items():
            dist.all_reduce(tensor)
            tensor.mul_(1.0 / world_size)
            if world_size == 2:
                assert torch.equal(mine[name], tensor), name
            else:
                assert mine[name].allclose(
                    tensor, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6
                ), name
    return True


@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparsity_zero_is_the_dense_all_reduce_bitwise_on_two_ranks(
    on: Ranks, exchange: str, dtype: torch.dtype
) -> None:
    assert all(on.run(2, _dense, exchange, dtype))


def test_sparsity_zero_is_the_dense_all_reduce_on_four_ranks(on: Ranks) -> None:
    assert all(on.run(4, _dense, "auto", torch.float32))


def _small(rank: int, world_size: int, dtype: torch.dtype) -> tuple[dict[str, Any], float, float]:
    metrics = Metrics(DCTConfig().metrics, rank=rank, world_size=world_size)
    config = DataParallelConfig.of({"sparsity": 0.9, "exchange": "direct", "min_numel": 2000})
    engine = GradientReducer(config, metrics=metrics)
    sizes = {f"{kind}{i}": size for i in range(10) for kind, size in (("norm", 300), ("weight", 9000))}
    results = {}
    for step in range(2):
        ranks = [torch.Generator().manual_seed(100 * step + r) for r in range(world_size)]
        drawn = [{n: torch.randn(s, generator=g).to(dtype) for n, s in sizes.items()} for g in ranks]
        mine = {name: tensor.clone() for name, tensor in drawn[rank].items()}
        reduction = engine.begin(list(mine.items()), scale=1.0 / world_size)
        if step:
            reduction.post()
        reduction.finish()
        engine.end_step()
        for name, tensor in mine.items():
            if name.startswith("norm"):
                mean = sum(one[name].double() for one in drawn) / world_size
                torch.testing.assert_close(
                    tensor.double(), mean, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
                )
        results |= {f"{name} {step}": tensor for name, tensor in mine.items()}
    small = metrics.summary().classes["gradient_small"]
    return results, small.sent_bytes, small.dense_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_tensors_are_exact_and_send_what_a_ring_does(dtype: torch.dtype) -> None:
    ranks = run(4, _small, dtype)
    sent, dense = (sum(found[which] for found in ranks) for which in (1, 2))
    assert dense == 2 * 10 * 300 * dtype.itemsize * 2 * 3  # steps, tensors, entries, bytes; 2 (P - 1) / P
    assert sent < (1.05 if dtype == torch.float32 else 1.1) * dense
    for results, _, _ in ranks:
        for name, tensor in results.items():
            assert torch.equal(tensor, ranks[0][0][name]), name


def _reduce_scatter(rank: int, world_size: int) -> bool:
    engine = reducer(sparsity=0.0, value_dtype="fp32", min_numel=100)
    size = 10_001
    shards = [
        Shard(r, size * r // world_size, size * (r + 1) // world_size) for r in reversed(range(world_size))
    ]
    mine = torch.randn(size, generator=torch.Generator().manual_seed(rank))
    expected = mine.clone()
    dist.all_reduce(expected)
    engine.reduce_scatter([("w", mine, shards)], scale=0.5)
    own = next(s for s in shards if s.owner == rank)
    assert mine[own.start : own.stop].allclose(expected[own.start : own.stop] * 0.5, rtol=1e-6, atol=1e-6)

    thresholded = reducer(sparsity=0.9, value_dtype="fp32", min_numel=100)
    total = torch.zeros(size)
    for step in range(3):
        mine = torch.randn(size, generator=torch.Generator().manual_seed(10 * step + rank))
        total += mine
        thresholded.reduce_scatter([("w", mine, shards)])
        total_arrived = torch.zeros(size)
        total_arrived[own.start : own.stop] = mine[own.start : own.stop]
        dist.all_reduce(total_arrived)
        total -= total_arrived / world_size  # every rank subtracts its share of what arrived anywhere
    kept = thresholded.group.streams["w"].residual.current.clone()  # type: ignore[union-attr]
    dist.all_reduce(total)
    dist.all_reduce(kept)
    assert total.allclose(kept, atol=1e-4)
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter_gives_owners_their_sums(on: Ranks, world_size: int) -> None:
    assert all(on.run(world_size, _reduce_scatter))


def _poisoned(rank: int, world_size: int, exchange: str, kept_in: str) -> dict[str, Any]:
    config = DataParallelConfig.of(sparsity=0.9, exchange=exchange, residual_dtype=kept_in)
    engine = GradientReducer(config, transactional=True)
    engine.all_reduce(list(tensors(rank, 0).items()))
    engine.end_step()
    before = {name: s.residual.current.clone() for name, s in engine.group.streams.items()}  # type: ignore[union-attr]
    mine = tensors(rank, 1)
    if rank == world_size - 1:
        mine["layer"][7] = float("inf")
    engine.all_reduce(list(mine.items()))
    overflow = not all(bool(t.isfinite().all()) for t in mine.values())
    engine.end_step(skipped=True)
    streams: Any = engine.group.streams
    same = all(torch.equal(before[name], streams[name].residual.current) for name in before)
    finite = all(bool(stream.residual.current.isfinite().all()) for stream in streams.values())
    engine.end_step(loss_scale=0.5)
    halved = all(torch.equal(before[name] / 2, streams[name].residual.current) for name in before)
    return {"overflow": overflow, "same": same, "finite": finite, "halved": halved}


@pytest.mark.parametrize(
    ("exchange", "kept_in"), [("direct", "fp32"), ("two_phase", "fp32"), ("two_phase", "int8")]
)
def test_overflow_reaches_every_rank_and_leaves_residuals(on: Ranks, exchange: str, kept_in: str) -> None:
    for result in on.run(2, _poisoned, exchange, kept_in):
        assert result == {"overflow": True, "same": True, "finite": True, "halved": True}


@contextmanager
def _chunks_of(kept: int) -> Iterator[None]:
    """With messages of so many entries; the process serves other tests afterwards."""
    with patch.object(Backend, "message_entries", kept):
        yield


def test_a_plan_is_cut_between_tensors_and_leaves_no_scraps() -> None:
    sizes = (60_000, 2_000, 70_000, 64, 64)
    items = [
        plan.PlannedTensor(f"{n}", torch.zeros(size), [Shard(0, 0, size)], size < 100)
        for n, size in enumerate(sizes)
    ]

    def cut(kept: int, density: float) -> list[list[int]]:
        for each in items:
            each.sparsity = plan.Sparsity(1.0 if each.small else density)
        pieces = plan.ReductionPlan("direct", items, compared=["0"]).chunks(kept)
        assert len({piece.fingerprint for piece in pieces}) == len(pieces)
        return [[each.tensor.numel() for each in piece.tensors] for piece in pieces]

    assert cut(1000, 0.01) == [list(sizes)]
    assert cut(600, 0.01) == [[60_000], [2_000, 70_000, 64, 64]]
    assert cut(600, 0.1) == [[60_000], [2_000, 70_000, 64, 64]]
    assert cut(100, 0.1) == [[60_000], [2_000], [70_000], [64, 64]]
    assert plan.ReductionPlan("direct", []).chunks(100)[0].tensors == []
    for parts, chunks in ((8, 4), (32, 2)):  # a message for each part
        each = 60_000 // parts
        shards = [Shard(n, n * each, (n + 1) * each) for n in range(parts)]
        kept, zeros = plan.Sparsity(0.01), torch.zeros(60_000)
        four = [plan.PlannedTensor(f"{n}", zeros, shards, False, kept) for n in range(4)]
        assert len(plan.ReductionPlan("two phases", four).chunks(400)) == chunks, parts


def test_owners_of_plans_that_are_gone_are_not_kept() -> None:
    """A job may have more buckets than plans are remembered."""
    for bucket in range(1500):
        tensor = plan.PlannedTensor(f"kept {bucket}", torch.zeros(64), [Shard(0, 0, 64)], False)
        owners = plan.ReductionPlan("sum", [tensor]).owners
        owners.spans(range(1))
        owners.largest_messages(range(1))
        if not bucket:
            first = weakref.ref(owners)
    gc.collect()
    assert first() is None


def _in_pieces(rank: int, world_size: int, kept: int, kind: str) -> tuple[list[torch.Tensor], int]:
    engine = reducer(sparsity=0.9, exchange="direct" if kind == "direct" else "two_phase")
    found: list[torch.Tensor] = []
    start, chunks = engine.exchanges.start, []

    def counted(*arguments: Any) -> Any:
        exchange = start(*arguments)
        chunks.extend(exchange.chunks)
        return exchange

    engine.exchanges.start = counted  # type: ignore[method-assign]
    with _chunks_of(kept):
        for step in range(3):
            mine = tensors(rank, step)
            if kind == "reduce_scatter":
                shards = {name: plan.shards_of(name, len(t), world_size) for name, t in mine.items()}
                engine.reduce_scatter([(name, t, shards[name]) for name, t in mine.items()])
                own = [
                    mine[n][s.start : s.stop] for n, each in shards.items() for s in each if s.owner == rank
                ]
                found += [part.clone() for part in own]
            else:
                engine.all_reduce(list(mine.items()))
                found += mine.values()
            engine.end_step()
    found += [s.residual.current for s in engine.group.streams.values() if s.residual is not None]
    return found, len(chunks)


@pytest.mark.parametrize("kind", ["direct", "two_phase", "reduce_scatter"])
def test_messages_in_pieces_change_no_bit(on: Ranks, kind: str) -> None:
    whole, pieces = on.run(3, _in_pieces, 10**9, kind), on.run(3, _in_pieces, 3000, kind)
    for (first, few), (second, many) in zip(whole, pieces, strict=True):
        assert many >= 2 * few
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _fails_on_the_way(rank: int, world_size: int, exchange: str) -> tuple[str, bool]:
    """One rank fails when some of its messages are on their way; afterwards all go on."""
    engine, mine, text = reducer(sparsity=0.9, exchange=exchange), tensors(rank, 0), ""
    with _chunks_of(3000):
        engine.all_reduce(list(mine.items()))
        if rank == 1:
            mine["layer"] = torch.randn(SIZES["layer"] + 1)
        try:
            engine.all_reduce(list(mine.items()))
        except (DesyncError, ValueError) as error:
            text = str(error)
        again = torch.full((10_000,), float(rank + 1))
        engine.all_reduce([("more", again)])
    dist.barrier()
    return text, bool((again[again != 0] == 6.0).all())


@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
def test_a_rank_that_fails_on_the_way_is_named_and_all_can_go_on(exchange: str) -> None:
    outcomes = run(3, _fails_on_the_way, exchange)
    assert "40001" in outcomes[1][0]
    assert all("rank(s) [1] failed while preparing" in outcomes[rank][0] for rank in (0, 2))
    assert all(right for _, right in outcomes)


def _warm_up(rank: int, world_size: int) -> list[float]:
    engine = reducer(sparsity=0.99, warmup_steps=2)
    shares = []
    for step in range(4):
        mine = tensors(rank, step)
        expected = mine["layer"].clone()
        engine.all_reduce(list(mine.items()))
        dist.all_reduce(expected)
        if step < 2:
            assert torch.equal(mine["layer"], expected)
        shares.append(float((mine["layer"] != 0).float().mean()))
        engine.end_step()
    return shares


def test_warm_up_is_dense(on: Ranks) -> None:
    for shares in on.run(2, _warm_up):
        assert shares[0] > 0.99
        assert shares[1] > 0.99
        assert shares[2] < 0.05
        assert shares[3] < 0.05


def _in_bucket(rank: int, world_size: int, layout: str) -> None:
    engine = reducer(sparsity=0.99, warmup_steps=1)
    bucket = torch.randn(2508, generator=torch.Generator().manual_seed(rank))
    apart = layout == "apart" or (layout == "apart on rank 1" and rank == 1)
    starts = [1008, 0] if apart else [0, 1000]
    first, second = (bucket[start : start + 1000] for start in starts)
    others = [bucket[1000:1008], bucket[2008:]] if apart else [bucket[2000:]]
    as_before, expected = [each.clone() for each in others], torch.cat([first, second])
    engine.all_reduce([("first", first), ("second", second)], scale=0.5)
    dist.all_reduce(expected)
    assert torch.equal(torch.cat([first, second]), 0.5 * expected)
    assert all(map(torch.equal, others, as_before))


@pytest.mark.parametrize("layout", ["adjoined", "apart", "apart on rank 1"])
def test_a_bucket_is_summed_densely_where_it_lies_and_nothing_beside_it(layout: str) -> None:
    run(3, _in_bucket, layout)


# -- failures ---


def _one_fails(rank: int, world_size: int, exchange: str) -> None:
    engine = reducer(sparsity=0.9, exchange=exchange)
    mine = tensors(rank, 0)
    engine.all_reduce(list(mine.items()))
    if rank == 1:
        mine["layer"] = torch.randn(SIZES["layer"] + 1)  # its stream refuses another size
        engine.group.streams["layer"].name = "layer"
    engine.all_reduce(list(mine.items()))


@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
def test_a_failing_rank_stops_the_others_with_its_name(on: Ranks, exchange: str) -> None:
    outcomes = on.launch(3, _one_fails, exchange)
    assert [kind for kind, _ in outcomes] == ["error"] * 3
    # With slots the ranks compare their tensors before this rank meets its own error.
    assert "40001" in outcomes[1][1] or "rank(s) [0, 2] are exchanging other tensors" in outcomes[1][1]
    for rank in (0, 2):
        assert "DesyncError" in outcomes[rank][1]
        assert "[1]" in outcomes[rank][1]


def _other_order(rank: int, world_size: int) -> None:
    entries = list(tensors(rank, 0).items())
    reducer(sparsity=0.9).all_reduce(entries[::-1] if rank == 2 else entries)


def test_ranks_out_of_step_are_told_apart(on: Ranks) -> None:
    for rank, (kind, text) in enumerate(on.launch(3, _other_order)):
        assert kind == "error"
        assert "DesyncError" in text
        assert "[2]" in text if rank != 2 else "[0, 1]" in text


# -- metrics ---


def _profiled(rank: int, world_size: int) -> set[str]:
    engine = reducer(sparsity=0.9)
    with torch.profiler.profile() as profile:
        engine.all_reduce(list(tensors(rank, 0).items()))
    return {event.key for event in profile.key_averages() if event.key.startswith("dct.")}


def test_a_profiler_sees_the_parts_of_a_reduction(on: Ranks) -> None:
    assert on.run(2, _profiled) == [{"dct.select", "dct.exchange", "dct.decode"}] * 2


def _warm_up_then_metrics(rank: int, world_size: int, path: str) -> None:
    metrics_section = {"path": path, "every": 1, "tensors": True}
    section = {"data_parallel": {"warmup_steps": 1, "sparsity": 0.9}, "metrics": metrics_section}
    config = DCTConfig.parse(section)
    metrics = Metrics(config.metrics, rank=rank, world_size=world_size)
    engine = GradientReducer(config.data_parallel, metrics=metrics)
    before = []
    for step in range(3):
        time.sleep(0.02 * rank)  # the other rank waits
        engine.all_reduce(list(tensors(rank, step).items()))
        engine.end_step()
        engine.group.metrics.step(engine.group.step)  # type: ignore[union-attr]
        before.append(engine.group.exchange.counters()[0])
    engine.group.metrics.close()  # type: ignore[union-attr]


def test_metrics_add_up_to_the_bytes_sent(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run(2, _warm_up_then_metrics, str(path))
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if "event" not in row]
    first = [row for row in rows if row["step"] == 1]
    later = [row for row in rows if row["step"] == 3]
    assert {row["class"] for row in first} == {"gradient_warmup", "gradient"}
    assert next(row for row in first if row["class"] == "gradient_warmup")["density"] == 1.0
    assert [row["is_start"] for row in first + later] == [True] * len(first) + [False] * len(later)
    assert all(row["waited_ms"] <= row["exchange_ms"] for row in rows)
    by_class = {row["class"]: row for row in later}
    gradient = by_class["gradient"]
    assert gradient["density"] == pytest.approx(0.1, rel=0.2)
    assert gradient["dense_bytes"] == 4 * (60_000 + 40_001 + 5_000)
    assert gradient["dense_bytes"] / gradient["sent_bytes"] == pytest.approx(
        4 / (0.1 * (16 + 4.8) / 8), rel=0.2
    )
    assert by_class["gradient_small"]["density"] is None or by_class["gradient_small"]["density"] == 1.0
    for key in ("tau", "refreshes", "select_ms", "encode_ms", "exchange_ms", "decode_ms"):
        assert gradient[key] >= 0
    of_tensors = [row for cls, row in by_class.items() if cls.startswith("gradient/tensor/")]
    assert len(of_tensors) == 3
    assert all(row["density"] == pytest.approx(0.1, rel=0.5) and row["tau"] > 0 for row in of_tensors)
    assert gradient["dense_bytes"] == sum(row["dense_bytes"] for row in of_tensors)


def _load_between_reduction_and_step(rank: int, world_size: int) -> list[float]:
    """A single rank pays the residuals of a checkpoint of several; then other states are loaded."""
    reducer = GradientReducer(DataParallelConfig(sparsity=0.9, min_numel=1))
    stream = Compressor(sparsity=0.9, name="a")
    stream.encode(torch.zeros(4), MessageWriter(torch.device("cpu")))
    assert stream.residual is not None
    stream.residual.add(torch.ones(4))
    state = {"step": 3, "loss_scale": 1.0, "streams": {"a": stream.state_dict()}}

    def reduced() -> float:
        gradient = torch.zeros(4)
        reducer.all_reduce([("a", gradient)])
        return float(gradient[0])

    paid = []
    for loaded in ({**state, "streams": {}}, state):
        reducer.load_state_dict(state)
        paid.append(reduced())
        reducer.load_state_dict(loaded)
        reducer.end_step()
        paid.append(reduced())
        reducer.end_step()
    return paid


def test_a_state_loaded_between_reduction_and_step_is_not_touched_by_it(on: Ranks) -> None:
    assert on.run(1, _load_between_reduction_and_step) == [[1.0, 0.0, 1.0, 1.0]]
