"""Optimizer steps: loss scale before a reduction, commit or rollback after a step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dct_plugin.data_parallel import GradientReducer

logger = logging.getLogger("dct_plugin")


class StepLink:
    """Ties a reducer to the steps of a DeepSpeed optimizer.

    Under dynamic loss scaling (fp16) an optimizer learns only in ``step()``, after all gradients were
    reduced, that they overflowed; it then skips the step and lowers the scale. The reducer must follow:
    residuals and thresholds are rolled back, and rescaled when the scale has changed.

    Args:
        reducer: Transactional where ``may_roll_back`` is set.
        optimizer: DeepSpeed's optimizer wrapper (attributes ``overflow`` and ``loss_scale``), or a torch
            optimizer.
        may_roll_back: Whether a skipped step is taken back (fp16). In fp32 and bf16 only non-finite gradients
            skip a step, which never enter a residual; what the finite tensors had sent in that step is lost
            with its batch.
    """

    def __init__(self, reducer: GradientReducer, optimizer: Any, *, may_roll_back: bool) -> None:
        self.reducer = reducer
        self.optimizer = optimizer
        self.may_roll_back = may_roll_back
        self.reductions = 0

    def before_reduction(self) -> None:
        """Gradients come now."""
        self.reductions += 1

    def after_step(self) -> None:
        """The optimizer stepped, or skipped the step."""
        reducer = self.reducer
        if self.reductions == 0 and reducer.step == 0 and reducer.rank == 0:
            logger.warning(
                "dct: an optimizer step was made without passing gradients to dct; is the all-reduce of "
                "gradients switched off, or done by the script itself?"
            )
        reducer.end_step(
            skipped=self.may_roll_back and bool(getattr(self.optimizer, "overflow", False)),
            loss_scale=float(self.optimizer.loss_scale) if self.may_roll_back else None,
        )
        if reducer.metrics is not None:
            reducer.metrics.step(reducer.step)
