"""Payloads have room at every size and sparsity."""

from __future__ import annotations

import pytest
import torch

from dct_plugin.codecs.payload import payload_bound
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.kernels import Job, get_backend


@pytest.mark.parametrize("numel", [1, 5, 300, 5000, 70_000])
def test_payloads_have_room(numel: int) -> None:
    kernels = get_backend(torch.device("cpu"))
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    for sparsity in (0.0, 0.3, 0.5, 0.99):
        wanted = max(1, round((1 - sparsity) * numel))
        tau = kernels.exact_threshold(gradient, None, wanted) if sparsity else 0.0
        payload = torch.empty(payload_bound(numel, wanted, ValueDtype.FP32), dtype=torch.uint8)
        residual = torch.zeros(numel)
        job = Job(gradient, residual, tau, payload, capacity=wanted)
        stats = kernels.compress(job)
        received = torch.zeros(numel)
        assert kernels.decode_add(payload[: stats.nbytes], received) == wanted
        assert torch.equal(received + residual, gradient)
