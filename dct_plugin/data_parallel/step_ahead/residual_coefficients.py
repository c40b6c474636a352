"""Two ratios between a rank's own tensors and their mean over the ranks, measured for each tensor.

Residuals and gradients of several ranks share their drift, and their noise cancels out in the mean. How much
of each there is differs from tensor to tensor. So the ranks measure every :data:`INTERVAL` steps:

- the *coefficient* of the residual, ``<own, mean> / <own, own>`` at some positions. The coefficient times
  the own residual is the best linear prediction of the ranks' mean residual;
- the *gradient ratio*, ``sqrt(<mean, mean> / <own, own>)``: the size of the mean gradient, after its
  reduction, relative to the size of the own one. Optimizers divide by the second moment of the mean gradient.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..plan import Entries

#: Optimizer steps between two measurements, and positions of a residual in each measurement.
INTERVAL, SAMPLES = 10, 256
#: Factor of the older measurements when a new one comes.
DECAY = 0.8

#: Two inner products of each tensor.
Products = dict[str, tuple[float, float]]


@dataclass
class ResidualCoefficients:
    """The coefficients of a model's residuals, and the ratios of its gradients.

    Args:
        names: Streams that are measured.
        residual_of: Returns the residual of a stream as it is now (fp32 [numel]); None if it keeps none.
        world_size: Ranks whose gradients are averaged.
        fixed: The coefficient of all streams, in (0, 1]; None: coefficients are measured.
    """

    names: Container[str]
    residual_of: Callable[[str], Tensor | None]
    world_size: int
    fixed: float | None
    read: Callable[[Tensor], Tensor] = Tensor.cpu
    """Copies to the host what the ranks have summed."""
    _residuals: Products = field(default_factory=dict)
    """``<own, own>`` and ``<own, mean>`` of residuals."""
    _gradients: Products = field(default_factory=dict)
    """``<own, own>`` and ``<mean, mean>`` of gradients."""
    _measured: list[tuple[Sequence[str], Tensor]] = field(default_factory=list)
    """Products of residuals in this step, which counts if it is not skipped; on their device."""
    _measured_gradients: list[tuple[Sequence[str], Tensor]] = field(default_factory=list)
    """Products of gradients in this step."""
    _own_squares: dict[str, Tensor] = field(default_factory=dict)
    """The sums of the squares of this rank's gradients in this step."""

    def of(self, name: str) -> float:
        """Return the coefficient of a residual, in [0, 1]; before it is measured, between 0.5 and 1."""
        if self.fixed is not None:
            return self.fixed
        own, mixed = self._residuals.get(name, (0.0, 0.0))
        return min(max(mixed / own, 0.0), 1.0) if own > 0.0 else 0.5 + 0.5 / self.world_size

    def agreement(self) -> float:
        """Return how much the ranks' residuals have in common, the mean over the tensors: the number of ranks
        if they are equal, 1 if they are independent (not measured, too), less if they cancel out.
        """
        ratios = [mixed / own for own, mixed in self._residuals.values() if own > 0.0]
        return self.world_size * sum(ratios) / len(ratios) if ratios else 1.0

    def gradient_ratio(self, name: str) -> float:
        """Return the size of the ranks' mean gradient relative to the own one: from ``1 / sqrt(ranks)`` if
        gradients are noise alone, to 1 if they are equal.
        """
        own, mean = self._gradients.get(name, (0.0, 0.0))
        return math.sqrt(min(max(mean / own, 1.0 / self.world_size), 1.0)) if own > 0.0 else 1.0

    def due(self, names: Iterable[str]) -> list[str]:
        """Return the names to measure in a step that measures, the same on all ranks. It measures a tensor
        once, in its first micro-batch.
        """
        measured = {name for names, _ in self._measured for name in names}
        return [name for name in names if name in self.names and name not in measured]

    def observe(self, entries: Entries) -> None:
        """Note the sizes of gradients (1-D) of this rank before they are reduced, if they are :meth:`due`."""
        due = set(self.due(name for name, _ in entries))
        self._own_squares |= {name: each.float().square().sum() for name, each in entries if name in due}

    def samples(self, names: Sequence[str], step: int, device: torch.device) -> Tensor:
        """Return residuals at positions that are the same on all ranks, evenly spaced from a random one on:
        fp32 [len(names) * SAMPLES], with zeros for entries that a tensor lacks.
        """
        rows, zeros = [], torch.zeros(SAMPLES, dtype=torch.float32, device=device)
        for name in names:
            residual = self.residual_of(name)
            numel = 0 if residual is None else residual.numel()
            seed, most = zlib.crc32(f"{name}:{step}".encode()), numel // SAMPLES
            # An odd one, each time another one, does not keep to a few columns of a matrix.
            stride = max(1, (most - 1 - seed % (most // 2 + 1)) | 1)
            span = (SAMPLES - 1) * stride + 1
            first = seed % max(1, numel - span + 1)
            if residual is not None:
                rows.append(residual[first : first + span : stride])
            rows.append(zeros[numel:])
        return torch.cat(rows)

    def measure(self, names: Sequence[str], own: Tensor, mean: Tensor) -> None:
        """Measure coefficients from this rank's :meth:`samples` and their mean over the ranks."""
        own, mean = own.view(-1, SAMPLES).double(), mean.view(-1, SAMPLES).double()
        self._measured.append((names, torch.stack([(own * own).sum(1), (own * mean).sum(1)])))

    def measure_gradients(self, names: Sequence[str], squares: Tensor) -> None:
        """Measure gradient ratios from the sums of the squares of the mean gradients, fp32 [len(names)]."""
        nothing = squares.new_zeros(())
        own = torch.stack([self._own_squares.pop(name, nothing) for name in names])
        self._measured_gradients.append((names, torch.stack([own, squares])))

    def end_step(self, *, skipped: bool) -> None:
        """Close an optimizer step; a ``skipped`` one leaves no trace."""
        pairs = (self._measured, self._residuals), (self._measured_gradients, self._gradients)
        for measured, products in pairs:
            for names, figures in () if skipped else measured:
                for name, own, other in zip(names, *self.read(figures).tolist(), strict=True):
                    before, is_finite = products.get(name, (0.0, 0.0)), math.isfinite(own + other)
                    new = (own, other) if is_finite else (0.0, 0.0)
                    products[name] = (DECAY * before[0] + new[0], DECAY * before[1] + new[1])
            measured.clear()
        self._own_squares.clear()

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        for products in (self._residuals, self._gradients):
            products.update({n: (a * factor * factor, b * factor * factor) for n, (a, b) in products.items()})

    def state_dict(self) -> dict[str, Products]:
        """Return the products from which coefficients and ratios follow."""
        return {"products": dict(self._residuals), "gradients": dict(self._gradients)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Products that it lacks are measured anew."""
        self.end_step(skipped=True)
        self._residuals, self._gradients = (
            {name: (own, other) for name, (own, other) in state.get(key, {}).items()}
            for key in ("products", "gradients")
        )
