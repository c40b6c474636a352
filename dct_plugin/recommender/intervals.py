"""Means of paired differences, with Student's confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences with its confidence interval; ``half_width`` is None for a single pair."""

    mean: float
    half_width: float | None
    pairs: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if self.half_width is None else f" ±{self.half_width:.4f}")

    def inside(self, margin: float) -> bool | None:
        """Return whether the whole interval is in [-margin, margin]; None without an interval."""
        return None if self.half_width is None else abs(self.mean) + self.half_width <= margin


def paired(differences: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Mean of differences between runs of the same seed, and its interval by Student's t distribution.

    Raises:
        ValueError: There are none.
    """
    if not differences:
        raise ValueError("there are no differences to average")
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1:
        return Interval(mean, None, 1)
    from scipy.special import stdtrit

    quantile = float(stdtrit(count - 1, (1 + confidence) / 2))
    return Interval(mean, quantile * statistics.stdev(differences) / math.sqrt(count), count)
