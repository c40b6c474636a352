"""``nonfinite_action: "skip"``: DeepSpeed skips, and counts, the steps whose gradient is not finite."""

from __future__ import annotations

from typing import Any

from ..host.nonfinite import PoisonedSteps
from ..host.patches import Function, Patches
from .part import EngineContext, EnginePart


class SkippedSteps(EnginePart):
    """The search for non-finite gradients before an optimizer step.

    Args:
        context: The engine.
        transactional: Whether a skipped step is rolled back.
    """

    def __init__(self, context: EngineContext, *, transactional: bool) -> None:
        self._optimizer, self._steps = context.engine.optimizer, context.steps
        self._transactional = transactional
        module = context.engine.module
        self._poisoned = PoisonedSteps(
            context.config.data_parallel,
            lambda: ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None),
            agree=True,  # experts' gradients are not everybody's
        )
        self._searches = False

    def install(self, patches: Patches) -> None:
        """Patch the optimizer; one of DeepSpeed's that can search by itself is told to."""
        if hasattr(self._optimizer, "check_grad_overflow") and self._transactional:
            patches.replace(self._optimizer, "check_grad_overflow", True)
        self._searches = self._poisoned.skips and not hasattr(self._optimizer, "overflow")
        if self._searches:
            patches.replace(self._optimizer, "overflow", False)
            patches.intercept(self._optimizer, "step", self._step)

    def before_step(self) -> None:
        if self._searches:
            self._optimizer.overflow = self._poisoned.found(self._steps.step)

    def _step(self, original: Function, *args: Any, **keywords: Any) -> Any:
        return None if self._optimizer.overflow else original(*args, **keywords)
