"""Streams and reducers with CUDA tensors: nccl with one rank, gloo with several processes on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpu import DEVICE, DRY, NEEDS_GPU
from support.processes import run
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("triton", reason="needs triton")

from benchmarks.no_gpu import device_ids
from dct_plugin import Compressor, kernels
from dct_plugin.compression.feedback import unpacked
from dct_plugin.config import DataParallelConfig, KernelConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import TritonBackend
from dct_plugin.transport import Exchange

#: What streams remember besides a residual in fp32.
REMEMBERED: list[dict[str, Any]] = [{}, {"residual_dtype": "int8"}]
SIZES = {"embedding": 60_000, "layer": 40_001, "head": 5_000, "bias": 64, "empty": 0}


def gradient(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


class _Plain(ReferenceBackend):
    """The reference, with as much room in payloads as on a device."""

    most_kept = staticmethod(TritonBackend.most_kept)


def plain() -> KernelConfig:
    """The reference on the CPU, with as much room as Triton has."""
    kernels.register_backend("plain", _Plain)
    return KernelConfig(backend="plain")


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("remembered", REMEMBERED, ids=str)
def test_a_stream_has_the_bits_of_the_cpu(
    dtype: torch.dtype, transactional: bool, remembered: dict[str, Any]
) -> None:
    one = Compressor(sparsity=0.95, transactional=transactional, kernels=plain(), **remembered)
    other = Compressor(sparsity=0.95, transactional=transactional, **remembered)
    for step in range(5):
        grad = gradient(30_000, step, dtype)
        if step == 3:
            grad[5] = float("nan")
        expected, found = one.compress(grad), other.compress(grad.cuda())
        assert found.data.device.type == torch.device(DEVICE).type
        assert expected.to_bytes() == found.to_bytes()
        for stream in (one, other):
            stream.end_step(skipped=transactional and step == 3)
    states = one.state_dict(), other.state_dict()
    residuals = [unpacked(state["residual"]) for state in states]
    assert torch.equal(*residuals)
    assert states[0]["threshold"] == states[1]["threshold"]


def _reduce(rank: int, world_size: int, device: str, exchange: str, dtype: torch.dtype) -> dict[str, Any]:
    config = DataParallelConfig(sparsity=0.95, exchange="auto" if exchange == "owners" else exchange)
    reducer = GradientReducer(config, device=device, kernels=plain() if device == "cpu" else None)
    arrived: dict[str, Any] = {}
    for step in range(4):
        entries = {n: gradient(size, 100 * rank + step, dtype).to(device) for n, size in SIZES.items()}
        if exchange == "owners":
            halves = {n: [Shard(0, 0, size // 2), Shard(1, size // 2, size)] for n, size in SIZES.items()}
            reducer.reduce_scatter([(name, t, halves[name]) for name, t in entries.items()], scale=0.5)
            own = {name: t[halves[name][rank].start : halves[name][rank].stop] for name, t in entries.items()}
            entries = own
        else:
            reducer.all_reduce(list(entries.items()), scale=0.5)
        reducer.end_step()
        arrived |= {f"{name} {step}": t.cpu() for name, t in entries.items()}
    residuals = {name: state["residual"] for name, state in reducer.state_dict()["streams"].items()}
    return arrived | residuals


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["direct", "two_phase", "owners"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_processes_on_one_device_have_the_bits_of_two_on_the_cpu(
    exchange: str, dtype: torch.dtype
) -> None:
    expected, found = run(2, _reduce, "cpu", exchange, dtype), run(2, _reduce, DEVICE, exchange, dtype)
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine)
    if exchange != "owners":
        assert all(torch.equal(found[0][f"layer {s}"], found[1][f"layer {s}"]) for s in range(4))


def _update(rank: int, world_size: int, device: str, dtype: torch.dtype) -> Tensor:
    """Working weights after masters have drifted; the ranks' boundary cuts the second one."""
    config = DataParallelConfig.of(
        {"min_numel": 100, "parameters": {"sparsity": 0.95, "value_dtype": "int8"}}
    )
    updates = ParameterUpdates(config, device=device, kernels=plain() if device == "cpu" else None)
    sizes = {"first": 30_000, "cut": 20_000, "small": 64, "last": 9936}
    half = sum(sizes.values()) // 2
    working = gradient(2 * half, 0, dtype).to(device)
    master = working[rank * half : (rank + 1) * half].float().clone()
    for step in range(4):
        master += (9.0 if step == 3 else 1e-2) * gradient(half, 1 + step + 10 * rank).to(device)
        entries, mine, start = [], {}, 0
        for name, numel in sizes.items():
            shards = shards_in(start, numel, half)
            entries.append((name, working[start : start + numel], shards))
            for shard in (each for each in shards if each.owner == rank):
                first = start + shard.start - rank * half
                mine[name] = master[first : first + shard.stop - shard.start]
            start += numel
        updates.update(entries, mine.__getitem__)
        updates.end_step()
    return working.cpu()


def _update_exactly(rank: int, world_size: int, device: str, dtype: torch.dtype) -> Tensor:
    """Working weights after masters have drifted, a little and far."""
    updates = ParameterUpdates(DataParallelConfig.of(parameters="exact"), device=device)
    half = 50_000 if DRY else 1_100_000
    working = gradient(2 * half, 0, dtype).to(device)
    own = working[rank * half : (rank + 1) * half]
    master = own.float().clone()
    for step in range(4):
        before = own.clone()
        master += (9.0 if step == 3 else 1e-3) * gradient(half, 1 + step + 10 * rank).to(device)
        own.copy_(master)
        updates.update([("all", working, shards_in(0, 2 * half, half))], {"all": before}.__getitem__)
        updates.end_step()
    return working.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_updates_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    expected, found = (run(2, _update_exactly, device, dtype) for device in ("cpu", DEVICE))
    for each in (*expected, *found):
        assert torch.equal(each.view(torch.int16), expected[0].view(torch.int16))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_of_weights_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    expected, found = (run(2, _update, device, dtype) for device in ("cpu", DEVICE))
    assert all(torch.equal(each, expected[0]) for each in (*expected, *found))


class _OneRank:
    """A process group of this process alone."""

    def __enter__(self) -> None:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


@NEEDS_GPU
def test_nccl_with_one_rank() -> None:
    with _OneRank():
        exchange = Exchange(None, torch.device(DEVICE))
        message = torch.arange(100, dtype=torch.uint8, device=DEVICE)
        (back,) = exchange.all_to_all([message], 7)
        assert torch.equal(back, message)
        reducer = GradientReducer(DataParallelConfig(sparsity=0.95), device=DEVICE)
        grad = gradient(5000, 1).cuda()
        expected = grad.clone() * 0.5
        reducer.all_reduce([("weight", grad)], scale=0.5)
        assert torch.equal(grad, expected)


def _train(rank: int, world_size: int, with_hook: bool, sparsity: float) -> tuple[list[Tensor], list[float]]:
    from dct_plugin import DCTState, dct_hook

    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)]
    model = torch.nn.Sequential(*layers).cuda()
    wrapped = DistributedDataParallel(model, device_ids=device_ids())
    if with_hook:
        section = {"data_parallel": {"sparsity": sparsity, "value_dtype": "fp32", "min_numel": 0}}
        wrapped.register_comm_hook(DCTState(section), dct_hook)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(8):
        x = gradient(64 * 32, 10 * step + rank).view(32, 64).cuda()
        loss = (wrapped(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return [parameter.detach().cpu() for parameter in model.parameters()], losses


@pytest.mark.slow
def test_ddp_training() -> None:
    """At sparsity 0 as without the hook; at 0.9 the same weights on both ranks, and it learns."""
    dense, exact, sparse = (run(2, _train, *form) for form in ((False, 0.0), (True, 0.0), (True, 0.9)))
    for one, other in zip(dense[0][0], exact[0][0], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    for one, other in zip(sparse[0][0], sparse[1][0], strict=True):
        assert torch.equal(one, other)
    assert sparse[0][1][-1] < sparse[0][1][0]
