"""The density of each tensor: tensors with a long mean residual send more entries, others send fewer.

The length of a residual is its root mean square in optimizer steps. With one density for all tensors, the
mean residual of the ranks is several steps long in some tensors, which is drift that all ranks share. In
others it is shorter than two: noise, which cancels out. So the density of a tensor is proportional to its
length. A higher density makes the length shorter, and all tensors together send as many entries as before.
The gain was measured (``docs/quality.md``, "Many compressors").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .residual_coefficients import DECAY

#: Optimizer steps between two changes, and the measurements that a tensor needs before its first one.
INTERVAL, MIN_MEASUREMENTS = 100, 3
#: Above this density, as in the start of a training, all tensors have the same one.
MAX_DENSITY = 0.2
#: The least and the greatest length that counts, relative to the mean.
LENGTH_LIMITS = (0.25, 4.0)


class TensorDensities:
    """The densities of a model's tensors, relative to that of all tensors; the same on all ranks."""

    def __init__(self) -> None:
        self._lengths: dict[str, tuple[int, float, int]] = {}
        """Number of entries, mean length and number of measurements of each tensor."""
        self._measured: list[tuple[Sequence[str], Sequence[int], Tensor]] = []
        """Names, sizes and lengths of tensors in this step, which counts if it is not skipped."""
        self._relative: dict[str, float] = {}
        """Density of each tensor, relative to that of all tensors."""

    def density(self, name: str, density: float) -> float:
        """Return the density of a tensor, if all tensors together have the density ``density``."""
        return density if density > MAX_DENSITY else min(1.0, density * self._relative.get(name, 1.0))

    def measure(self, names: Sequence[str], numels: Sequence[int], lengths: Tensor) -> None:
        """Note the lengths of residuals, in optimizer steps, averaged over the ranks (1-D, on any device)."""
        self._measured.append((names, numels, lengths))

    def end_step(self, step: int, *, skipped: bool) -> None:
        """Close an optimizer step, the ``step``-th of the training; a ``skipped`` one leaves no trace."""
        if not skipped:
            for names, numels, lengths in self._measured:
                for name, numel, length in zip(names, numels, lengths.tolist(), strict=True):
                    if math.isfinite(length) and length > 0.0:
                        _, before, count = self._lengths.get(name, (numel, length, 0))
                        self._lengths[name] = numel, DECAY * before + (1.0 - DECAY) * length, count + 1
            if step % INTERVAL == 0:
                self._set_densities()
        self._measured.clear()

    def _set_densities(self) -> None:
        known = {name: each[:2] for name, each in self._lengths.items() if each[2] >= MIN_MEASUREMENTS}
        if known:
            entries = sum(numel for numel, _ in known.values())
            mean = sum(numel * length for numel, length in known.values()) / entries
            limited = {
                n: min(max(length / mean, LENGTH_LIMITS[0]), LENGTH_LIMITS[1])
                for n, (_, length) in known.items()
            }
            total = sum(known[name][0] * length for name, length in limited.items()) / entries
            self._relative = {name: length / total for name, length in limited.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the lengths, and the densities that follow from them."""
        return {"lengths": dict(self._lengths), "shares": dict(self._relative)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; an empty state starts afresh."""
        self._measured.clear()
        self._lengths = {name: tuple(each) for name, each in state.get("lengths", {}).items()}
        self._relative = dict(state.get("shares", {}))
