"""Every way of writing positions has room at every size and sparsity."""

from __future__ import annotations

import pytest
import torch

from dct_plugin.codecs.index import ANY_POSITIONS, IndexEncoding
from dct_plugin.codecs.payload import payload_bound
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.kernels import Job, get_backend


@pytest.mark.parametrize("encoding", [None, *ANY_POSITIONS], ids=lambda code: code.label if code else "auto")
@pytest.mark.parametrize("numel", [1, 5, 300, 5000, 70_000])
def test_a_chosen_encoding_has_room(encoding: IndexEncoding | None, numel: int) -> None:
    """The room was that of the smallest encoding, whichever was asked for."""
    kernels = get_backend(torch.device("cpu"))
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    for sparsity in (0.0, 0.3, 0.5, 0.99):
        wanted = max(1, round((1 - sparsity) * numel))
        tau = kernels.exact_threshold(gradient, None, wanted) if sparsity else 0.0
        payload = torch.empty(payload_bound(numel, wanted, ValueDtype.FP32, encoding), dtype=torch.uint8)
        residual = torch.zeros(numel)
        job = Job(gradient, residual, tau, payload, capacity=wanted, encoding=encoding)
        stats = kernels.compress(job)
        received = torch.zeros(numel)
        assert kernels.decode_add(payload[: stats.nbytes], received) == wanted
        assert torch.equal(received + residual, gradient)
