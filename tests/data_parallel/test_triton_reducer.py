"""Ranks whose kernels leave everything on the device: the reference's bits, and one look at it in a step."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.host_reads import HostReads
from support.processes import logged, run
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("triton", reason="triton is for Linux only")

from support.launches import counted_launches

from dct_plugin import DCTState, dct_hook, kernels
from dct_plugin.codecs import stats
from dct_plugin.compression.feedback import unpacked
from dct_plugin.config import DataParallelConfig, DCTConfig, KernelConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer, Shard, exact_updates, plan
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.errors import DesyncError, PayloadError
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import TritonBackend
from dct_plugin.metrics import Metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu has this with a GPU"),
]
#: Two buckets.
SIZES = ({"embedding": 2_100, "bias": 64}, {"layer": 1_501, "empty": 0})
STEPS = 4
#: A step looks once at what all of its buckets left behind.
ONE_LOOK = ["codecs/copies.py:cpu"]


#: What streams remember besides, by the kind of exchange.
REMEMBERED: dict[str, dict[str, Any]] = {
    "direct": {},
    "two_phase": {"residual_dtype": "bf16"},
    "reduce_scatter": {"residual_dtype": "int8"},
}


class _Plain(ReferenceBackend):
    """The reference, with as much room in payloads as on a device."""

    most_kept = staticmethod(TritonBackend.most_kept)


def settings(name: str, **more: Any) -> tuple[DataParallelConfig, KernelConfig]:
    kernels.register_backend("plain", _Plain)
    kernels.register_backend("interpreted", TritonBackend)
    # A threshold that is not measured again lets a larger gradient's entries pass, up to the capacity.
    options = {"sparsity": 0.95, "min_numel": 1000, "expert": {"threshold": "fixed"}, **more}
    config = DataParallelConfig(**options)
    return config, KernelConfig(backend=name)


def gradients(rank: int, step: int, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """In step 3, for which no threshold is measured, three times as large on rank 1."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    factor = 3.0 if step == 3 and rank == 1 else 1.0
    return {n: factor * torch.randn(size, generator=generator) for n, size in sizes.items()}


def _reduce(rank: int, world_size: int, name: str, exchange: str) -> tuple[dict[str, Any], list[list[str]]]:
    scattered = exchange == "reduce_scatter"
    config, backend = settings(name, exchange="auto" if scattered else exchange, **REMEMBERED[exchange])
    metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
    reducer = GradientReducer(config, kernels=backend, metrics=metrics)
    kept: dict[str, Any] = {}
    looks = []
    for step in range(STEPS):
        with HostReads() as reads:
            for sizes in SIZES:
                entries = gradients(rank, step, sizes)
                if exchange != "direct":  # gradients of several types
                    entries = {n: t.bfloat16() if n == "embedding" else t for n, t in entries.items()}
                kept |= {f"{n} {step}": tensor for n, tensor in entries.items()}
                if scattered:
                    halves = {n: [Shard(0, 0, s // 2), Shard(1, s // 2, s)] for n, s in sizes.items()}
                    parts = [(n, t, halves[n]) for n, t in entries.items()]
                    reducer.begin_scatter(parts, scale=0.5).finish()
                else:
                    reducer.begin(list(entries.items()), scale=1 / 3).finish()
            reducer.finish()
            reducer.end_step()
        # A look at what was copied is none.
        looks.append([read for read in reads.places if not read.endswith((":tolist", ":numpy"))])
    if scattered:  # what others own is left unspecified
        kept = {key: t.tensor_split([t.numel() // 2])[rank] for key, t in kept.items()}
    kept |= {n: unpacked(state["residual"]) for n, state in reducer.state_dict()["streams"].items()}
    classes = metrics.summary().classes
    kept |= {
        f"{n} sent": torch.tensor([v or 0.0 for v in (c.density, c.tau, c.refreshes)])
        for n, c in classes.items()
    }
    kept["gradient held back"] = torch.tensor(classes["gradient"].held_back)
    return kept, looks


@pytest.mark.parametrize("exchange", REMEMBERED)
def test_triton_kernels_reduce_to_the_same_bits_with_one_look_in_a_step(exchange: str) -> None:
    expected, found = (run(2, _reduce, name, exchange) for name in ("plain", "interpreted"))
    for (mine, looks), (other, _) in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        assert [key for key in mine if not torch.equal(mine[key], other[key])] == []
        assert looks[1:] == [ONE_LOOK] * 3
    held_back = [kept["gradient held back"].item() for kept, _ in found]
    assert held_back[1] > held_back[0]  # of the larger gradients


def _reduce_small(rank: int, world_size: int, name: str) -> tuple[dict[str, Any], list[list[str]]]:
    config, backend = settings(name, exchange="direct", min_numel=2000)
    reducer, kept, looks = GradientReducer(config, kernels=backend), {}, []
    for step in range(3):
        with HostReads() as reads:
            entries = gradients(rank, step, {"large": 2100, "norm": 1500, "bias": 64})
            reducer.begin(list(entries.items()), scale=1 / 3).finish()
            reducer.finish()
            reducer.end_step()
        kept |= {f"{n} {step}": tensor for n, tensor in entries.items()}
        looks.append([read for read in reads.places if not read.endswith((":tolist", ":numpy"))])
    return kept, looks


def test_small_tensors_of_three_ranks_go_to_owners_in_slots_too() -> None:
    expected, found = (run(3, _reduce_small, name) for name in ("plain", "interpreted"))
    for (mine, looks), (other, _) in zip(found, expected, strict=True):
        assert [key for key in mine if not torch.equal(mine[key], other[key])] == []
        assert looks[1:] == [ONE_LOOK] * 2


def _reduce_with_a_small_table(rank: int, world_size: int, name: str) -> tuple[dict[str, Any], int]:
    """The second bucket's sizes replace the first one's in every step."""
    before, plan.CAPACITY = plan.CAPACITY, 1
    try:
        config, backend = settings(name, exchange="two_phase")
        reducer, kept = GradientReducer(config, kernels=backend), {}
        for step in range(2):
            for sizes in (SIZES[0], SIZES[0], SIZES[1]):
                entries = gradients(rank, step, sizes)
                reducer.all_reduce(list(entries.items()))
                kept |= {f"{n} {step}": tensor for n, tensor in entries.items()}
            reducer.end_step()
        return kept, len(getattr(reducer.exchanges, "_capacities", ()))
    finally:
        plan.CAPACITY = before


def test_sizes_of_few_sets_of_tensors_are_remembered() -> None:
    """All ranks forget the same ones, and exchange sizes again."""
    expected, found = (run(2, _reduce_with_a_small_table, name) for name in ("plain", "interpreted"))
    for (mine, remembered), (other, _) in zip(found, expected, strict=True):
        assert remembered == 1
        assert [key for key in mine if not torch.equal(mine[key], other[key])] == []


#: Of weights: the ranks' boundary cuts the second one.
WEIGHTS = {"first": 1200, "cut": 900, "small": 64, "last": 336}


def _update(
    rank: int, world_size: int, name: str, dtype: torch.dtype, sizes: dict[str, int], steps: int = STEPS
) -> tuple[Any, list[list[str]], list[str]]:
    """Masters that drift, much faster in step 3, in which thresholds are not measured."""
    kernels.register_backend("plain", _Plain)
    kernels.register_backend("interpreted", TritonBackend)
    parameters = {"sparsity": 0.95, "value_dtype": "int8"}
    config = DataParallelConfig(min_numel=100, expert={"threshold": "fixed"}, parameters=parameters)
    updates = ParameterUpdates(config, kernels=KernelConfig(backend=name))
    generator = torch.Generator().manual_seed(5)
    half = sum(sizes.values()) // 2
    working = torch.randn(2 * half, generator=generator).to(dtype)
    master = working[rank * half : (rank + 1) * half].float().clone()
    looks, launched = [], []
    for step in range(steps):
        master += (9.0 if step == 3 else 1e-2) * torch.randn(2 * half, generator=generator)[:half]
        entries, mine, start = [], {}, 0
        for weight, numel in sizes.items():
            shards = shards_in(start, numel, half)
            entries.append((weight, working[start : start + numel], shards))
            for shard in shards:
                if shard.owner == rank:
                    first = start + shard.start - rank * half
                    mine[weight] = master[first : first + shard.stop - shard.start]
            start += numel
        with HostReads() as reads, counted_launches() as names:
            updates.update(entries, mine.__getitem__)
        updates.end_step()
        looks.append([read for read in reads.places if not read.endswith((":tolist", ":numpy"))])
        launched.append(sorted(names))
    return (working, updates.state_dict()["streams"]), looks, launched[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_updates_of_weights_look_once(dtype: torch.dtype) -> None:
    """With the bits of the reference, in a step with far larger changes, too."""
    expected, found = (run(2, _update, name, dtype, WEIGHTS) for name in ("plain", "interpreted"))
    for (mine, looks, _), (other, _, _) in zip(found, expected, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[0], found[0][0][0])
        assert mine[1] == other[1]
        assert looks[1:] == [ONE_LOOK] * 3
    if dtype == torch.bfloat16:  # twice as many tensors take as many launches
        twice = {f"{name} {i}": max(64, size // 3) for name, size in WEIGHTS.items() for i in range(2)}
        more = run(2, _update, "interpreted", dtype, twice, 3)
        assert [launches for _, _, launches in more] == [launches for _, _, launches in found]


def _update_exactly(
    rank: int, world_size: int, name: str, together: int = 1 << 24
) -> tuple[Any, list[list[str]]]:
    """Updates that grow beyond their slots in step 2; in step 3 one weight turns round. *together*: the most
    entries of owners whose messages are added together.
    """
    exact_updates._TOGETHER = together
    config, backend = settings(name, parameters="exact")
    updates, looks, each = ParameterUpdates(config, kernels=backend), [], 700
    numel = each * world_size
    generator = torch.Generator().manual_seed(5)
    working = torch.randn(numel, generator=generator).bfloat16()
    own = working[rank * each :][:each]
    for step, scale in enumerate((1e-3, 1e-3, 3e-2, 1e-3)):
        before = own.clone()
        own += scale * torch.randn(numel, generator=generator)[rank * each :][:each].bfloat16()
        own[:3] = torch.tensor([-1.5 if step == 3 else 1.5, -0.0, float("nan")])
        entries = [("weights", working, shards_in(0, numel, each))]
        with HostReads() as reads:
            updates.update(entries, {"weights": before}.__getitem__)
        updates.end_step()
        looks.append([read for read in reads.places if not read.endswith((":tolist", ":numpy"))])
    return working.view(torch.int16).clone(), looks


def test_exact_updates_look_once() -> None:
    expected, *others = (
        run(3, _update_exactly, *form) for form in (("plain",), ("interpreted",), ("interpreted", 1000))
    )
    for (mine, looks), (other, _) in zip(itertools.chain(*others), expected * 2, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine, expected[0][0])
        # In step 2 the rests of two messages came behind their slots, each with a look.
        assert looks[1:] == [ONE_LOOK, ONE_LOOK + ["kernels/triton/backend.py:cpu"] * 2, ONE_LOOK]


def _launched(rank: int, world_size: int) -> list[int]:
    """Kernels that a step launches with a bucket of two tensors, and with one of five."""
    launched = []
    for tensors in (2, 5):
        config, backend = settings("interpreted", exchange="direct", min_numel=100)
        reducer = GradientReducer(config, kernels=backend)
        sizes = {f"{at}": (400, 30, 260, 1)[at % 4] for at in range(tensors)}
        for step in range(2):  # the second one's messages travel in slots
            with counted_launches() as names:
                reducer.all_reduce(list(gradients(rank, step, sizes).items()), scale=0.5)
            reducer.end_step()
        launched.append(len(names))
    return launched


def test_a_bucket_takes_as_many_launches_whatever_the_number_of_tensors() -> None:
    for few, many in run(2, _launched):
        assert few == many < 40


def _warm_up(rank: int, world_size: int) -> tuple[list[list[str]], list[str]]:
    """Two buckets in four steps that sum densely, in one of which a gradient of rank 1 is not finite."""
    config, backend = settings("interpreted", warmup_steps=4)
    reducer = GradientReducer(config, kernels=backend)
    looks = []
    with logged() as lines:
        for step in range(4):
            with HostReads() as reads:
                for sizes in SIZES:
                    entries = gradients(rank, step, sizes)
                    if step == 2 and rank == 1 and "layer" in entries:
                        entries["layer"][5] = float("inf")
                    reducer.begin(list(entries.items()), scale=0.5).finish()
                reducer.end_step()
            looks.append([read for read in reads.places if not read.endswith((":tolist", ":numpy"))])
    return looks, lines


def test_warm_up_steps_look_once_and_name_what_is_not_finite() -> None:
    for rank, (looks, lines) in enumerate(run(2, _warm_up)):
        look = ["transport/lost_ranks.py:cpu"]  # while other ranks may be lost
        assert looks[1] == looks[2] == look
        assert looks[3] == ([] if rank == 1 else look)  # said once
        assert len(lines) == rank
        assert all("rank 1: the gradient of layer is not finite in step 2" in line for line in lines)


def _train(rank: int, world_size: int, name: str) -> tuple[list[torch.Tensor], list[int]]:
    """torch DDP with several buckets, and how often figures were copied to the host in a step."""
    config, backend = settings(name)
    copies, copied = 0, stats.to_host

    def counted(figures: torch.Tensor) -> torch.Tensor:
        nonlocal copies
        copies += 1
        return copied(figures)

    stats.to_host = counted
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 32)]
    model = torch.nn.Sequential(*layers)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
    wrapped.register_comm_hook(DCTState(DCTConfig(data_parallel=config, kernels=backend)), dct_hook)
    optimizer, looks = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        copies = 0
        (wrapped(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        looks.append(copies)
    return [parameter.detach() for parameter in model.parameters()], looks


def test_ddp_looks_once_at_the_end_of_the_backward_pass() -> None:
    """Buckets are laid out anew after the first step: in the third their messages' sizes are known."""
    expected, found = run(2, _train, "plain"), run(2, _train, "interpreted")
    for (mine, looks), (other, _) in zip(found, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
        assert looks[2] == 1


def damaging(gather: Callable[..., None]) -> Callable[..., None]:
    def damaged(received: torch.Tensor) -> None:
        received.chunk(2)[1][200] ^= 0x55
        gather(received)

    return damaged


def _fail(rank: int, world_size: int, how: str) -> str:
    config, backend = settings("interpreted", exchange="two_phase" if how == "two_phase" else "direct")
    reducer = GradientReducer(config, kernels=backend)
    try:
        for step in range(2):
            entries = gradients(rank, step, SIZES[0])
            if step == 1 and rank == 1:
                if how == "damage":
                    reducer.group.exchange.gather_into = damaging(  # type: ignore[method-assign]
                        reducer.group.exchange.gather_into
                    )
                elif how == "add-on":  # the others wait for slots, and this rank has none yet
                    reducer.add_ons.before_compression = None  # type: ignore[method-assign,assignment]
                else:
                    reducer.group.streams["embedding"].encode = None  # type: ignore[assignment]
            reducer.all_reduce(list(entries.items()))
            reducer.end_step()
    except (DesyncError, PayloadError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("how", ["damage", "direct", "two_phase", "add-on"])
def test_a_failing_rank_and_a_damaged_slot_are_named(how: str) -> None:
    first, second = run(2, _fail, how)
    if how == "damage":
        assert first == second.replace("rank 1: ", "rank 0: ")
        assert first.startswith("PayloadError: rank 0: message from rank 1 of the group: payload checksum")
    else:
        assert first.startswith("DesyncError: rank 0: rank(s) [1] failed while preparing this exchange")
        assert second.startswith("TypeError")
