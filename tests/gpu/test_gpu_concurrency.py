"""Kernels beside others on a GPU: production forms many times, threads, streams, another current device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.production_form import alike, compressed, gradients

pytest.importorskip("triton", reason="needs triton")

from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import WRITTEN, TritonBackend

REFERENCE = ReferenceBackend(WRITTEN)
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
