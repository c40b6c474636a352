"""Gradients that are not finite, where each rank has its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..stream_group import StreamGroup


class SharedNonfinite:
    """Lets a gradient that is not finite on one rank be so on all ranks, as under plain training.

    It does so before a step that ends in an exchange of progress: a script that leaves out such steps then
    leaves them out on all ranks. A rank alone would let the others wait.

    Args:
        group: The ranks.
    """

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self.seen: list[Tensor] = []
        """Gradients of this pass, 1-D, the same ones on all ranks."""

    def see(self, gradients: Iterable[Tensor]) -> None:
        """Note gradients."""
        self.seen += [gradient for gradient in gradients if gradient.numel()]

    def share(self) -> None:
        """Make the first entry of a gradient NaN if it is not finite on another rank; a collective."""
        seen, self.seen = self.seen, []
        # On a CPU the largest magnitude takes twenty times as long as a sum.
        poison = 0.0 * torch.stack([gradient.sum(dtype=torch.float32) for gradient in seen])
        with self._group.recorded("gradient_local"):
            self._group.exchange.all_reduce(poison)
        for gradient, value in zip(seen, poison, strict=True):
            gradient[:1] += value
