"""Kernels beside others on a GPU: production forms many times, threads, streams, another current device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.gpu import NEEDS_GPU
from support.production_form import alike, compressed, gradients

pytest.importorskip("triton", reason="needs triton")

from benchmarks.host_work import LoopedPeers
from dct_plugin.config import DataParallelConfig, KernelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.reducer import Overlap
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import TritonBackend

pytestmark = NEEDS_GPU
REFERENCE = ReferenceBackend()
SEEDS = range(100)


def expected(seed: int) -> list[torch.Tensor]:
    return compressed(REFERENCE, gradients(seed, "cpu"))


def test_production_forms_have_the_bits_of_the_reference_a_hundred_times() -> None:
    backend = TritonBackend()
    for seed in SEEDS:
        assert alike(compressed(backend, gradients(seed, "cuda")), expected(seed)), seed


def test_two_threads_on_streams_of_their_own_do_not_meet() -> None:
    backend = TritonBackend()

    def run(seeds: range) -> list[list[torch.Tensor]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return [compressed(backend, gradients(seed, "cuda")) for seed in seeds]

    with ThreadPoolExecutor(2) as pool:
        even, odd = pool.map(run, (SEEDS[::2], SEEDS[1::2]))
    for seed in SEEDS:
        assert alike((odd if seed % 2 else even)[seed // 2], expected(seed)), seed


def test_a_stream_waits_for_a_long_backward_pass() -> None:
    backend, side = TritonBackend(), torch.cuda.Stream(priority=-1)
    matrix = torch.eye(4096, device="cuda")
    for seed in range(10):
        late, on_time = gradients(seed, "cuda"), gradients(seed, "cuda")
        for grad, _ in late:
            grad.zero_()
        torch.cuda.synchronize()
        product = matrix
        for _ in range(20):  # tens of milliseconds, after which the gradients are there
            product = product @ matrix
        for (grad, _), (source, _) in zip(late, on_time, strict=True):
            grad.copy_(source * product[0, 0])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = compressed(backend, late)
        torch.cuda.current_stream().wait_stream(side)
        assert alike(found, expected(seed)), seed


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    backend = TritonBackend()
    with torch.cuda.device(0):
        for seed in range(10):
            assert alike(compressed(backend, gradients(seed, "cuda:1")), expected(seed)), seed


def test_a_reduction_on_a_stream_of_its_own_waits_for_a_long_backward_pass() -> None:
    """The executor that torch DDP and Megatron submit buckets to, beside kernels that are still to come."""
    matrix, section = torch.eye(4096, device="cuda"), {"sparsity": 0.9, "feedback": "local"}
    config = DataParallelConfig.of(section)
    kernels = {"cuda": KernelConfig(backend="triton"), "cpu": KernelConfig(backend="reference")}
    reducers = {
        where: GradientReducer(config, LoopedPeers(0, range(2)), device=where, kernels=each)
        for where, each in kernels.items()
    }
    overlaps = {where: Overlap(reducer) for where, reducer in reducers.items()}
    for seed in range(10):
        sums = {}
        for where, reducer in reducers.items():
            sources = [grad.float().to(where) for grad, _ in gradients(seed, "cpu")]
            late = [torch.zeros_like(source) for source in sources]
            factor = torch.ones((), device=where)
            if where == "cuda":
                torch.cuda.synchronize()
                product = matrix
                for _ in range(20):  # tens of milliseconds, after which the gradients are there
                    product = product @ matrix
                factor = product[0, 0]
            for at, (grad, source) in enumerate(zip(late, sources, strict=True)):
                grad.copy_(source * factor)
                overlaps[where].submit(reducer.begin([(f"layer {at}", grad)], scale=0.5))
            overlaps[where].wait()
            reducer.end_step()
            sums[where] = [grad.cpu() for grad in late]
        assert alike(sums["cuda"], sums["cpu"]), seed


def test_torchfts_worker_waits_for_the_backward_pass_on_the_device_of_the_tensors() -> None:
    pytest.importorskip("torchft.coordination", reason="needs torchft")
    from dct_plugin.integrations.torchft.process_groups import _ThresholdedGroup

    where = torch.device("cuda", torch.cuda.device_count() - 1)
    backend, matrix, group = TritonBackend(), torch.eye(4096, device=where), SimpleNamespace(_failure=None)
    with ThreadPoolExecutor(1) as pool, torch.cuda.device(where):
        for seed in range(10):
            late = [(torch.zeros_like(grad), residual) for grad, residual in gradients(seed, str(where))]
            torch.cuda.synchronize()
            product = matrix
            for _ in range(20):
                product = product @ matrix
            for (grad, _), (source, _) in zip(late, gradients(seed, str(where)), strict=True):
                grad.copy_(source * product[0, 0])
            ready = torch.cuda.current_stream().record_event()
            found: list[torch.Tensor] = []
            work = [partial(lambda to, given: to.extend(compressed(backend, given)), found, late)]
            pool.submit(_ThresholdedGroup._run, group, work, ready, lambda: None).result()  # type: ignore[arg-type]
            assert group._failure is None
            assert alike(found, expected(seed)), seed
