"""Compressions that backends are compared on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from dct_plugin.codecs.index import MAX_NUMEL
from dct_plugin.codecs.payload import payload_bound
from dct_plugin.codecs.stats import Stats
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.kernels import Job
from dct_plugin.kernels.backend import Backend
from dct_plugin.kernels.reference import ReferenceBackend

GRAD_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, 16, 33, 255, 256, 257, 4095, 4097, 12345, 65535, 65536, 65537]
REFERENCE = ReferenceBackend()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@dataclass
class Case:
    """Arguments of one compression."""

    grad: Tensor
    residual: Tensor | None
    in_place: bool
    tau: float
    capacity: int | None
    start: int
    value_dtype: ValueDtype
    clear: bool

    def run(self, backend: Backend, device: str = "cpu") -> tuple[Stats, Tensor, Tensor | None]:
        """Stats, payload and residual afterwards, on the host; checks that inputs are left alone."""
        grad = self.grad.to(device, copy=True)
        residual = None if self.residual is None else self.residual.to(device, copy=True)
        left = residual if self.in_place else torch.full_like(grad, 5.0, dtype=torch.float32)
        bound = payload_bound(grad.numel(), None if self.tau == 0 else self.capacity, self.value_dtype)
        guard = 64
        out = torch.full((bound + guard,), 0xA5, dtype=torch.uint8, device=device)
        stats = backend.compress(
            Job(
                grad,
                residual,
                self.tau,
                out[:bound],
                residual_out=None if self.in_place else left,
                capacity=MAX_NUMEL if self.capacity is None else self.capacity,
                start=self.start,
                value_dtype=self.value_dtype,
                clear=self.clear,
            )
        )
        assert bool((out[bound:] == 0xA5).all()), "wrote past the end"
        assert same_bits(grad.cpu(), torch.zeros_like(self.grad) if self.clear else self.grad)
        if not self.in_place and residual is not None:
            assert self.residual is not None
            assert same_bits(residual.cpu(), self.residual)
        return stats, out[: stats.nbytes].cpu(), None if left is None else left.cpu()


@st.composite
def cases(draw: st.DrawFn, sizes: Sequence[int] = SIZES) -> Case:
    numel = draw(st.sampled_from(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    exponent = draw(st.sampled_from([0, 0, 0, -44, -38, -7, 4, 30, 37]))
    grad = torch.randn(numel, generator=generator) * 10.0**exponent
    if draw(st.integers(0, 3)) == 0:
        grad[torch.rand(numel, generator=generator) < 0.8] = draw(st.sampled_from([0.0, -0.0]))
    grad = grad.to(draw(st.sampled_from(GRAD_DTYPES)))
    grad = torch.where(torch.isfinite(grad), grad, torch.ones_like(grad))
    residual = None
    if draw(st.integers(0, 4)):
        residual = torch.randn(numel, generator=generator) * 10.0 ** draw(st.sampled_from([0, 0, -44, 5, 37]))
        if draw(st.integers(0, 5)) == 0:
            residual = -grad.float()
    if numel and draw(st.integers(0, 9)) == 0:
        bad = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        grad[draw(st.integers(0, numel - 1))] = bad
    density = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 0.95, 1.0]))
    kept = int(density * numel)
    tau = REFERENCE.exact_threshold(grad, residual, kept) if kept else math.inf
    if density == 1.0 and draw(st.booleans()):
        tau = 0.0
    return Case(
        grad,
        residual,
        in_place=draw(st.booleans()),
        tau=tau,
        capacity=draw(st.sampled_from([None, None, 0, 1, kept // 2, 2 * kept + 1])),
        start=draw(st.integers(0, numel + 3)),
        value_dtype=draw(st.sampled_from(list(ValueDtype))),
        clear=draw(st.booleans()),
    )


def agree(
    case: Case, one: Backend, other: Backend, device: str = "cpu"
) -> tuple[Tensor, tuple[int, int, int, bool]]:
    """Both give the same figures, payload and residual, the other one on ``device``; payload and figures."""
    expected, found = case.run(one), case.run(other, device)
    assert found[0].counts == expected[0].counts
    assert same_bits(found[1], expected[1])
    if expected[2] is not None:
        assert found[2] is not None
        assert same_bits(found[2], expected[2])
    return expected[1], expected[0].counts
