"""Step-ahead error feedback: training passes of an engine run at displaced weights."""

from __future__ import annotations

import logging
from typing import Any

from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.step_ahead.add_on import StepAheadAddOn
from dct_plugin.data_parallel.step_units import units_of

from ..host.patches import Function, Patches
from .part import EnginePart
from .path import GradientPath
from .support import is_pipeline

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
        add_on = path.reducer.add_on(StepAheadAddOn)
        if updates is None:
            self.ahead = add_on.prepare(pairs, unit_of, unit=unit)
        else:
            self.ahead = add_on.prepare(pairs, unit_of, unit=unit, pending_of=updates.pending_of)

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
