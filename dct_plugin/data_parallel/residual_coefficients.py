"""The share of its own residual that a rank should expect to arrive, measured for each tensor.

It differs from tensor to tensor: the residuals of several ranks share their drift, while their noise cancels
out. The best linear predictor of the ranks' mean residual from the own one, ``<own, mean> / <own, own>``, is
measured at random positions every :data:`INTERVAL` steps.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

#: Optimizer steps between two measurements of the coefficients, positions of each tensor that go into one,
#: and the weight of older measurements beside a new one.
INTERVAL = 10
SAMPLES = 256
MEMORY = 0.8


class ResidualCoefficients:
    """The coefficients of a model's streams.

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
        self._first_guess = 0.5 + 0.5 / world_size
        self._products: dict[str, tuple[float, float]] = {}
        self._measured: dict[str, tuple[float, float]] = {}
        """Products of this step, which may yet be taken back."""

    def of(self, name: str) -> float:
        """Return the share of the own residual by which a parameter is displaced."""
        if self._fixed is not None:
            return self._fixed
        own, mixed = self._products.get(name, (0.0, 0.0))
        return min(max(mixed / own, 0.0), 1.0) if own > 0.0 else self._first_guess

    def due(self, names: Iterable[str], step: int) -> list[str]:
        """Return those of ``names`` that are to be measured in this step and were not yet (micro-batches);
        the same on all ranks.
        """
        if self._fixed is not None or step % INTERVAL:
            return []
        return [name for name in names if name in self._names and name not in self._measured]

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
        squares, mixed = (own * own).sum(1).tolist(), (own * mean).sum(1).tolist()
        for name, square, product in zip(names, squares, mixed, strict=True):
            finite = math.isfinite(square) and math.isfinite(product)
            self._measured[name] = (square, product) if finite else (0.0, 0.0)

    def end_step(self, *, skipped: bool) -> None:
        """Close an optimizer step; a ``skipped`` one leaves no trace."""
        if not skipped:
            for name, (own, mixed) in self._measured.items():
                before = self._products.get(name, (0.0, 0.0))
                self._products[name] = (MEMORY * before[0] + own, MEMORY * before[1] + mixed)
        self._measured.clear()

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        self._products = {
            name: (own * factor * factor, mixed * factor * factor)
            for name, (own, mixed) in self._products.items()
        }

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """Return what the coefficients come from."""
        return dict(self._products)

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore :meth:`state_dict`."""
        self._measured.clear()
        self._products = {name: (own, mixed) for name, (own, mixed) in state.items()}
