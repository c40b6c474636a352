"""What a rank's own residual and gradient say about the mean of all ranks, measured for each tensor.

Residuals and gradients of several ranks share their drift, while their noise cancels out. So two numbers
differ from tensor to tensor, and are measured every :data:`INTERVAL` steps:

- the best linear predictor of the mean residual from the own one, ``<own, mean> / <own, own>``, at random
  positions;
- the size of the mean gradient, as it was reduced, beside that of the own one, ``sqrt(<mean, mean> / <own,
  own>)``. An optimizer that divides by a second moment divides by that of the mean.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: Optimizer steps between two measurements, positions of a residual that go into one, and the weight of older
#: measurements beside a new one.
INTERVAL = 10
SAMPLES = 256
MEMORY = 0.8

Products = dict[str, tuple[float, float]]


class ResidualCoefficients:
    """The coefficients of a model's streams, and the sizes of their mean gradients.

    Args:
        names: Streams that have one.
        residual_of: Returns the residual of a stream as it is now (fp32 [numel]); None if it keeps none.
        world_size: Ranks whose gradients are averaged.
        fixed: In (0, 1]: the coefficient of all streams; None: they are measured.
    """

    def __init__(
        self,
        names: Container[str],
        residual_of: Callable[[str], Tensor | None],
        *,
        world_size: int,
        fixed: float | None,
    ) -> None:
        self._names, self._residual_of, self._fixed = names, residual_of, fixed
        self._world_size = world_size
        self._residuals: Products = {}
        """``<own, own>`` and ``<own, mean>`` of residuals."""
        self._gradients: Products = {}
        """``<own, own>`` and ``<mean, mean>`` of gradients."""
        self._measured: Products = {}
        self._measured_gradients: Products = {}
        """Products of this step, which may yet be taken back."""
        self._seen: dict[str, Tensor] = {}
        """Squares of this rank's gradients in this step."""

    def of(self, name: str) -> float:
        """Return the share of the own residual by which a parameter is displaced."""
        if self._fixed is not None:
            return self._fixed
        own, mixed = self._residuals.get(name, (0.0, 0.0))
        return min(max(mixed / own, 0.0), 1.0) if own > 0.0 else 0.5 + 0.5 / self._world_size

    def mean_gradient(self, name: str) -> float:
        """Return the size of the ranks' mean gradient, where that of the own one is 1: from ``1 /
        sqrt(ranks)``, which is noise alone, to 1.
        """
        own, mean = self._gradients.get(name, (0.0, 0.0))
        return math.sqrt(min(max(mean / own, 1.0 / self._world_size), 1.0)) if own > 0.0 else 1.0

    def due(self, names: Iterable[str], step: int) -> list[str]:
        """Return those of ``names`` that are to be measured in this step and were not yet (micro-batches);
        the same on all ranks.
        """
        if self._fixed is not None or step % INTERVAL:
            return []
        return [name for name in names if name in self._names and name not in self._measured]

    def observe(self, name: str, gradient: Tensor, step: int) -> None:
        """See a gradient (1-D) of this rank that is about to be reduced."""
        if self.due([name], step):
            self._seen[name] = gradient.float().square().sum()

    def samples(self, names: Sequence[str], step: int, device: torch.device) -> Tensor:
        """Return residuals at random positions, the same on all ranks: fp32 [len(names) * SAMPLES]."""
        rows = []
        for name in names:
            residual = self._residual_of(name)
            if residual is None or not residual.numel():
                rows.append(torch.zeros(SAMPLES, device=device))
                continue
            seed = zlib.crc32(f"{name}:{step}".encode())
            where = torch.randint(residual.numel(), (SAMPLES,), generator=torch.Generator().manual_seed(seed))
            rows.append(residual[where.to(device)])
        return torch.cat(rows)

    def measure(self, names: Sequence[str], own: Tensor, mean: Tensor) -> None:
        """Take in what :meth:`samples` gave here and its mean over the ranks; it counts when the step is
        over.
        """
        own, mean = own.view(-1, SAMPLES).double(), mean.view(-1, SAMPLES).double()
        self._measured |= _finite(names, (own * own).sum(1), (own * mean).sum(1))

    def measure_gradients(self, names: Sequence[str], squares: Tensor) -> None:
        """Take in the sums of the squares of the ranks' mean gradients, fp32 [len(names)]."""
        nothing = squares.new_zeros(())
        own = torch.stack([self._seen.pop(name, nothing) for name in names])
        self._measured_gradients |= _finite(names, own, squares)

    def end_step(self, *, skipped: bool) -> None:
        """Close an optimizer step; a ``skipped`` one leaves no trace."""
        pairs = (self._measured, self._residuals), (self._measured_gradients, self._gradients)
        for measured, products in pairs:
            for name, (own, other) in () if skipped else measured.items():
                before = products.get(name, (0.0, 0.0))
                products[name] = (MEMORY * before[0] + own, MEMORY * before[1] + other)
            measured.clear()
        self._seen.clear()

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        for products in (self._residuals, self._gradients):
            products.update({n: (a * factor * factor, b * factor * factor) for n, (a, b) in products.items()})

    def state_dict(self) -> dict[str, Products]:
        """Return what the coefficients and sizes come from."""
        return {"products": dict(self._residuals), "gradients": dict(self._gradients)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; what it lacks starts afresh."""
        self._measured.clear()
        self._residuals, self._gradients = (
            {name: (own, other) for name, (own, other) in state.get(key, {}).items()}
            for key in ("products", "gradients")
        )


def _finite(names: Sequence[str], own: Tensor, other: Tensor) -> Products:
    """Return pairs of products by name, zeros in place of those that are not finite."""
    rows = zip(own.tolist(), other.tolist(), strict=True)
    return {n: row if math.isfinite(sum(row)) else (0.0, 0.0) for n, row in zip(names, rows, strict=True)}
