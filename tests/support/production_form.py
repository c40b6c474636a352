"""The form in which gradients are compressed in production: a batch, residuals beside what they become."""

from __future__ import annotations

import torch
from torch import Tensor

from dct_plugin.codecs.payload import payload_bound
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.kernels import Backend, Job

_NUMELS = (66_000, 5_000, 64)


def gradients(seed: int, device: str, numels: tuple[int, ...] = _NUMELS) -> list[tuple[Tensor, Tensor]]:
    """Return gradients in bf16, and residuals."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for numel in numels:
        grad, residual = torch.randn(numel, generator=made).bfloat16(), torch.randn(numel, generator=made)
        found.append((grad.to(device), 0.5 * residual.to(device)))
    return found


def compressed(backend: Backend, tensors: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return payloads, new residuals and cleared gradients, on the CPU."""
    written = []
    with backend.batched():
        for grad, residual in tensors:
            numel, capacity = grad.numel(), grad.numel() // 20 + 1
            room = payload_bound(numel, capacity, ValueDtype.INT8)
            out = torch.zeros(room, dtype=torch.uint8, device=grad.device)
            left = torch.empty_like(residual)
            options = {"residual_out": left, "capacity": capacity, "value_dtype": ValueDtype.INT8}
            stats = backend.compress(Job(grad, residual, 2.0, out, clear=True, **options))  # type: ignore[arg-type]
            written.append((stats, out, left, grad))
    return [t.cpu() for stats, out, *others in written for t in (out[: stats.nbytes], *others)]


def alike(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether all bits are the same."""
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )
