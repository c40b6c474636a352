"""Residuals in bf16 and int8: compiled kernels equal the reference, rounding errs nowhere on average."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import same_bits
from torch import Tensor

from dct_plugin.kernels import Backend
from dct_plugin.kernels.backend import PACK_BLOCK, PACK_EXPONENTS
from dct_plugin.kernels.cpu import ISA_NAMES, CpuBackend
from dct_plugin.kernels.reference import ReferenceBackend

REFERENCE = ReferenceBackend()
SIZES = [0, 1, 63, 64, 65, 1000, 4097, 300_001]


def packed(values: Tensor, dtype: torch.dtype, seed: int, kernels: Backend) -> tuple[Tensor, Tensor | None]:
    blocks = -(-values.numel() // PACK_BLOCK)
    out = torch.empty(values.numel(), dtype=dtype)
    exponents = torch.empty(blocks, dtype=torch.int8) if dtype == torch.int8 else None
    kernels.pack(values, out, exponents, seed)
    return out, exponents


def back(what: tuple[Tensor, Tensor | None], kernels: Backend = REFERENCE) -> Tensor:
    values = torch.empty(what[0].numel())
    kernels.unpack(*what, values)
    return values


@given(
    numel=st.sampled_from(SIZES),
    dtype=st.sampled_from([torch.bfloat16, torch.int8]),
    exponent=st.sampled_from([0, 0, -45, -38, -34, 4, 30, 38]),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
    special=st.sampled_from([None, 0.0, float("inf"), -3.4e38, 1e-45]),
    seed=st.integers(-(2**40), 2**40),
    isa=st.sampled_from(ISA_NAMES),
    threads=st.sampled_from([1, 2]),
)
@settings(max_examples=150, deadline=None)
def test_compiled_kernels_equal_the_reference(
    numel: int,
    dtype: torch.dtype,
    exponent: int,
    spread: float,
    special: float | None,
    seed: int,
    isa: str,
    threads: int,
) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator)
    values *= 10.0**exponent * torch.exp(spread * torch.randn(numel, generator=generator))
    if special is not None:
        values[::7] = special
    compiled = CpuBackend(threads)
    compiled.set_isa(isa)
    expected, found = (packed(values, dtype, seed, kernels) for kernels in (REFERENCE, compiled))
    compiled.set_isa(ISA_NAMES[-1])
    assert same_bits(found[0], expected[0])
    assert found[1] is None or torch.equal(found[1], expected[1])  # type: ignore[arg-type]
    kept = back(expected)
    assert same_bits(back(found, compiled), kept)
    assert kept.isfinite().all()
    if expected[1] is not None and numel:
        least, most = PACK_EXPONENTS
        assert least <= int(expected[1].min()) <= int(expected[1].max()) <= most
    # What was packed once stays what it is.
    assert torch.equal(back(packed(kept, dtype, seed + 1, REFERENCE)), kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_rounding_is_to_a_neighbour_and_right_on_average(dtype: torch.dtype) -> None:
    values = torch.randn(64 * 40, generator=torch.Generator().manual_seed(3))
    total, rounds = torch.zeros(values.numel(), dtype=torch.float64), 4000
    if dtype == torch.int8:
        step = 2.0 ** (values.view(-1, PACK_BLOCK).abs().amax(1).log2().floor() - 6)
        step = step.repeat_interleave(PACK_BLOCK)
    else:
        step = 2.0 ** (values.abs().log2().floor() - 7)
    for seed in range(rounds):
        found = back(packed(values, dtype, seed, CPU))
        assert bool(((found - values).abs() < 2 * step).all())
        total += found
    error = (total / rounds - values) / step
    assert float(error.abs().max()) < 5 / rounds**0.5  # of one entry, five standard deviations
    assert abs(float(error.mean())) < 3 / (rounds * values.numel()) ** 0.5


CPU = CpuBackend(1)


def test_random_numbers_follow_from_seed_and_position() -> None:
    values = torch.full((200_000,), 0.3)
    first, again, other = (packed(values, torch.int8, seed, CPU)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert 0.2 < float((first != other).float().mean()) < 0.6
    up = (first > first.min()).float() - 0.5
    for lag in (1, 2, 8, 64, 4096):
        assert abs(float((up[lag:] * up[:-lag]).mean()) - float(up.mean()) ** 2) < 0.003
