"""Schedules: how sparsity changes over training."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SparsitySchedule:
    """Dense first, then rising sparsity, then the target.

    The rise follows Deep Gradient Compression (Lin et al., ICLR 2018, section 3.3): the density falls
    exponentially from 1 to its target, so that early, fast-changing gradients are not delayed. Or it falls
    with a power of the step, which suits runs whose length is not known: a longer run has a longer rise.

    Args:
        sparsity: Target share of entries dropped, in [0, 1).
        warmup_steps: Steps that go dense.
        ramp_steps: Steps of the rise that follows.
        by_power: The density falls with a power of the step; needs ``warmup_steps``.
    """

    sparsity: float
    warmup_steps: int = 0
    ramp_steps: int = 0
    by_power: bool = False

    def starting(self, step: int) -> bool:
        """True while steps are dense or sparsity rises."""
        return step < self.warmup_steps + self.ramp_steps

    def rest(self, step: int) -> str:
        """Return how the start goes on at ``step``, in words."""
        if step < self.warmup_steps:
            return f"dense steps go on until step {self.warmup_steps}"
        end = self.warmup_steps + self.ramp_steps
        return f"sparsity rises until step {end}" if step < end else "the start is over"

    def density(self, step: int) -> float:
        """Share of entries to keep at ``step`` (from 0); 1.0 means dense."""
        if step < self.warmup_steps:
            return 1.0
        target = 1.0 - self.sparsity
        position = step - self.warmup_steps
        if position < self.ramp_steps:
            share = (position + 1) / (self.ramp_steps + 1)
            if self.by_power and self.warmup_steps:
                end = self.warmup_steps + self.ramp_steps + 1
                share = math.log((step + 1) / self.warmup_steps) / math.log(end / self.warmup_steps)
            return float(target**share)
        return target
