"""Schedules: how sparsity changes over training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import DataParallelConfig


@dataclass(frozen=True)
class SparsitySchedule:
    """Dense first, then rising sparsity, then the target.

    The rise follows Deep Gradient Compression (Lin et al., ICLR 2018, section 3.3): the density falls
    exponentially from 1 to its target, so that early, fast-changing gradients are not delayed.

    Args:
        sparsity: Target share of entries dropped, in [0, 1).
        warmup_steps: Steps that go dense.
        ramp_steps: Steps of the exponential rise that follows.
    """

    sparsity: float
    warmup_steps: int = 0
    ramp_steps: int = 0

    @classmethod
    def of(cls, config: DataParallelConfig) -> SparsitySchedule:
        """The schedule of a section."""
        return cls(config.sparsity, config.dense_steps, config.ramp_steps)

    def starting(self, step: int) -> bool:
        """True while steps are dense or sparsity rises."""
        return step < self.warmup_steps + self.ramp_steps

    def density(self, step: int) -> float:
        """Share of entries to keep at ``step`` (from 0); 1.0 means dense."""
        if step < self.warmup_steps:
            return 1.0
        target = 1.0 - self.sparsity
        position = step - self.warmup_steps
        if position < self.ramp_steps:
            return float(target ** ((position + 1) / (self.ramp_steps + 1)))
        return target
