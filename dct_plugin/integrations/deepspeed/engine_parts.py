"""Parts of an engine that do not depend on the ZeRO stage: step-ahead passes, and skipped steps."""

from __future__ import annotations

import logging
from typing import Any

from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.step_ahead.add_on import StepAheadAddOn
from dct_plugin.data_parallel.step_units import units_of

from ..host.nonfinite import PoisonedSteps
from ..host.patching import Function, Patches
from .engine import EngineContext, EnginePart, is_pipeline
from .path import GradientPath

logger = logging.getLogger("dct_plugin")


class DisplacedPasses(EnginePart):
    """The displacement of an engine's weights in its training passes.

    Args:
        path: The path of the engine's gradients.
        updates: Exchanges updates of the engine's weights; None if they are not thresholded.

    Attributes:
        ahead: Displaces and restores the weights.

    Raises:
        ConfigError: The step of the engine's optimizer is not known.
    """

    def __init__(self, path: GradientPath, updates: ParameterUpdates | None) -> None:
        self._engine, self._optimizer = path.engine, path.optimizer
        self._groups = len(path.optimizer.param_groups)
        groups = path.named_parameters()
        unit_of = units_of(path.optimizer, [[parameter for _, parameter in group] for group in groups])
        unit = 1.0 / (path.scale * path.reducer.group_size)
        pairs = [pair for group in groups for pair in group]
        add_on = path.reducer.add_ons.of(StepAheadAddOn)
        pending: dict[str, Any] = {} if updates is None else {"pending_of": updates.pending_of}
        self.ahead = add_on.prepare(pairs, unit_of, unit=unit, **pending)

    def install(self, patches: Patches) -> None:
        if is_pipeline(self._engine):
            # The passes of several micro-batches overlap: the weights are displaced from the start of
            # train_batch to the optimizer's step in it.
            patches.intercept(self._engine, "train_batch", self._train_batch)
        else:
            self.ahead.attach(self._engine.module)

    def before_step(self) -> None:
        self.ahead.restore()
        groups = len(self._optimizer.param_groups)
        if groups != self._groups and self._engine.global_rank == 0:
            logger.warning(
                "dct: parameters of groups that were added to the optimizer after deepspeed.initialize get "
                "local error feedback; initialize again for step-ahead"
            )
        self._groups = groups

    def close(self) -> None:
        self.ahead.detach()

    def _train_batch(self, original: Function, *args: Any, **keywords: Any) -> Any:
        self.ahead.forget()
        self.ahead.displace()
        try:
            return original(*args, **keywords)
        finally:
            self.ahead.restore()


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
