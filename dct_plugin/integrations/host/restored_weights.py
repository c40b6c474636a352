"""Weights that a script restores in mid-training, after a spike of the loss or by early stopping."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dct_plugin.console import logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.passes import Handle, ModuleHook, around_passes, remove

from .replica_checksums import checksum
from .steps import OptimizerSteps


class RestoredWeights:
    """Drops what a rank has not sent of tensors whose weights ``load_state_dict`` has changed.

    It belongs to a run that the script has abandoned. Weights that are only replaced for an evaluation
    (averaged ones) are the same again at the next training pass, and keep their residuals.

    Args:
        steps: The optimizer steps. Weights that are loaded before the first one are the start of the run.
        reducers: Those of the gradients.
        weights: Returns the weights of this rank by name.
    """

    def __init__(
        self,
        steps: OptimizerSteps,
        reducers: Iterable[GradientReducer],
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> None:
        self._steps, self._reducers, self._weights = steps, reducers, weights
        self._before: dict[str, Tensor] = {}
        """Checksums of the weights before they were loaded."""
        self._passes: list[Handle] = []
        """Follows the passes up to the first one with gradients after that."""

    def watch(self, model: nn.Module) -> list[Any]:
        """Follow ``load_state_dict`` of a model; return handles of the hooks."""
        self._model = weakref.ref(model)
        handles: list[Any] = [
            part._register_load_state_dict_pre_hook(ModuleHook(self._before_loading, part), with_module=True)
            for part in model.modules()
        ]
        return [*handles, Handle(functools.partial(remove, self._passes))]

    def _before_loading(self, *_: Any) -> None:
        model = self._model()
        if self._steps.has_stepped and not self._before and model is not None:
            self._before = {name: checksum(weight) for name, weight in self._weights()}
            self._passes.append(around_passes(model, self._before_forward))

    def _before_forward(self, gradients: bool) -> None:
        if not gradients:
            return
        remove(self._passes)
        before, self._before = self._before, {}
        changed = [n for n, w in self._weights() if n in before and not torch.equal(checksum(w), before[n])]
        for reducer in self._reducers if changed and self._steps.has_stepped else ():
            reducer.undo(changed, lost=True)
            if reducer.group.group_rank == 0:
                logger.warning(
                    f"dct: step {reducer.group.step}: load_state_dict has changed the weights of "
                    f"{len(changed)} tensors: what the steps before had left unsent of them is dropped"
                )
