"""Step-ahead's compiled kernels beside plain torch: squares of gradients, and displaced weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from dct_plugin.kernels.cpu import ISA_NAMES, CpuBackend
from dct_plugin.kernels.displacement import Displacement, SecondMoment, Squares
from dct_plugin.kernels.reference import ReferenceBackend

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
#: Rows and columns: less than a vector register, several blocks in a row, several tasks, one column.
SHAPES = [(1, 1), (7, 1), (5, 3), (3, 17), (64, 160), (2, 9_000), (1_100, 300), (1, 4_099)]


@pytest.fixture(params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend()
    if backend.set_isa(request.param) != request.param:
        pytest.skip(f"this machine has no {request.param}")
    yield backend
    backend.set_isa(ISA_NAMES[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_squares_add_up_as_in_plain_torch(
    kernels: CpuBackend, rows: int, columns: int, dtype: torch.dtype
) -> None:
    found = []
    for backend in (ReferenceBackend(), kernels, CpuBackend(threads=3)):
        torch.manual_seed(0)
        numel = rows * columns if columns > 1 else 5_000
        jobs = [
            Squares(torch.randn(numel).to(dtype), torch.rand(rows), torch.rand(columns)) for _ in range(2)
        ]
        backend.add_squares(jobs)
        backend.add_squares(jobs[:1])
        found.append(torch.cat([part for job in jobs for part in job[1:3]]))
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[1], found[2])


def test_squares_that_are_not_finite_are_seen(kernels: CpuBackend) -> None:
    gradient = torch.zeros(64)
    gradient[17] = math.inf
    job = Squares(gradient, torch.zeros(4), torch.zeros(16))
    kernels.add_squares([job])
    assert (job.rows.isinf().tolist(), job.columns.isinf().nonzero().tolist()) == ([0, 1, 0, 0], [[1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.5, math.inf])
@pytest.mark.parametrize(
    ("rows", "columns", "first"), [(r, c, f) for r, c in SHAPES for f in (0, 5) if r * c > 9]
)
def test_weights_are_displaced_as_in_plain_torch(
    kernels: CpuBackend, rows: int, columns: int, first: int, limit: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    numel = rows * columns - 2 * first
    weight, residual = torch.randn(numel).to(dtype), torch.randn(numel) * 10
    residual[0] = math.nan
    moment = SecondMoment(torch.rand(rows), torch.rand(columns), 0.3, first, 1.5, 1e-8)
    update = (torch.randn(3), 1, 0.5)
    for of, pending in ((moment, None), (None, None), (moment, update)):
        found = []
        for backend in (ReferenceBackend(), kernels, CpuBackend(threads=3)):
            out = torch.empty_like(weight)
            backend.displace([Displacement(weight, out, residual, -0.1, of, limit, pending)])
            found.append(out)
        for other in found[1:]:
            assert torch.equal(found[0].isnan(), other.isnan())
            assert torch.equal(found[0].nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_residual_weights_stay_bitwise(kernels: CpuBackend, dtype: torch.dtype) -> None:
    weight = torch.randn(1_000).to(dtype)
    out = torch.empty_like(weight)
    moment = SecondMoment(torch.rand(10), torch.rand(100), 1.0)
    kernels.displace([Displacement(weight, out, None, -0.1, moment)])
    assert torch.equal(out, weight)
    kernels.displace([Displacement(weight, out, torch.zeros(1_000), -0.1, moment)])
    assert torch.equal(out, weight)


@pytest.mark.parametrize("columns", [1, 4])
def test_an_empty_gradient_adds_nothing(kernels: CpuBackend, columns: int) -> None:
    job = Squares(torch.empty(0), torch.ones(0 if columns > 1 else 1), torch.ones(columns))
    kernels.add_squares([job])
    kernels.displace([Displacement(torch.empty(0), torch.empty(0), torch.empty(0), 1.0)])
    assert torch.cat(job[1:3]).eq(1).all()
