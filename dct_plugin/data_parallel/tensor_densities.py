"""The density of each tensor: more entries are sent where what is not sent matters more.

With one density for all tensors, the ranks' mean residual is several optimizer steps long in some tensors
(drift, which all ranks share), and less than two in others (noise, which cancels out). So a tensor's density
follows that length, which falls as the density rises; the number of entries of all tensors together stays.
What it gains was measured (``docs/quality.md``, "Many compressors").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .residual_coefficients import MEMORY

#: Optimizer steps between two changes, and measurements that the first one waits for.
INTERVAL, LEAST = 100, 3
#: Densities above it are the same in all tensors: start, dense steps.
DENSEST = 0.2
#: The least and the greatest density of a tensor, relative to the mean.
SHARES = (0.25, 4.0)


class TensorDensities:
    """The densities of a model's tensors, relative to their mean; the same on all ranks."""

    def __init__(self) -> None:
        self._lengths: dict[str, tuple[int, float, int]] = {}
        """Each tensor's number of entries, mean length, and number of measurements."""
        self._measured: dict[str, tuple[int, float]] = {}
        """Lengths of this step, which may yet be taken back."""
        self._shares: dict[str, float] = {}

    def density(self, name: str, density: float) -> float:
        """Return the density of a tensor, where that of all tensors together is ``density``."""
        return density if density > DENSEST else min(1.0, density * self._shares.get(name, 1.0))

    def measure(self, names: Sequence[str], numels: Sequence[int], lengths: Sequence[float]) -> None:
        """Take in the lengths of residuals, in steps of the optimizer: the ranks' mean."""
        for name, numel, length in zip(names, numels, lengths, strict=True):
            if math.isfinite(length) and length > 0.0:
                self._measured[name] = (numel, length)

    def end_step(self, step: int, *, skipped: bool) -> None:
        """Close an optimizer step, ``step`` steps into the training; a ``skipped`` one leaves no trace."""
        if not skipped:
            for name, (numel, length) in self._measured.items():
                _, before, count = self._lengths.get(name, (numel, length, 0))
                self._lengths[name] = numel, MEMORY * before + (1.0 - MEMORY) * length, count + 1
            if step % INTERVAL == 0:
                self._divide()
        self._measured.clear()

    def _divide(self) -> None:
        known = {
            name: (numel, length) for name, (numel, length, count) in self._lengths.items() if count >= LEAST
        }
        if known:
            entries = sum(numel for numel, _ in known.values())
            mean = sum(numel * length for numel, length in known.values()) / entries
            shares = {
                name: min(max(length / mean, SHARES[0]), SHARES[1]) for name, (_, length) in known.items()
            }
            left = sum(known[name][0] * share for name, share in shares.items()) / entries
            self._shares = {name: share / left for name, share in shares.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the lengths, and the densities that follow from them."""
        return {"lengths": dict(self._lengths), "shares": dict(self._shares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; an empty state starts afresh."""
        self._measured.clear()
        self._lengths = {name: tuple(each) for name, each in state.get("lengths", {}).items()}
        self._shares = dict(state.get("shares", {}))
