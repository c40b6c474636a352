"""The moment before a backward pass adds to gradients: then it shows whether the script has cleared them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dct_plugin.data_parallel.module_hooks import ModuleHook

from ..host.steps import OptimizerSteps


class NextPass:
    """Has a step end or be rejected before the next backward pass of a model adds to its gradients.

    Scripts clear gradients before the forward pass or after it, so the first gradient decides.

    Args:
        steps: The steps.
        accumulates: Called if neither is so: the pass adds to gradients that were reduced.
    """

    def __init__(self, steps: OptimizerSteps, accumulates: Callable[[], None]) -> None:
        self._steps, self._accumulates = steps, accumulates
        self._forward: list[Any] = []
        self._accumulators: list[Any] = []
        """Handles of hooks that wait for the first gradient."""

    def watch(self, model: nn.Module) -> None:
        """Follow the forward passes of ``model``, before all hooks that it has."""
        self._remove(self._forward)
        hook = ModuleHook(lambda *_: self._before_forward(), model)
        self._forward.append(model.register_forward_pre_hook(hook, prepend=True))

    def unwatch(self) -> None:
        """Undo :meth:`watch`."""
        self._remove(self._forward)
        self._remove(self._accumulators)

    def backward_done(self) -> None:
        """Wait for the next pass from now on, if forward passes are not followed."""
        if not self._forward:
            self._expect()

    def _before_forward(self) -> None:
        self._steps.end_due()
        if torch.is_grad_enabled():
            self._expect()

    def _expect(self) -> None:
        if self._steps.awaits_optimizer and not self._accumulators:
            for parameter in self._steps.reduced:
                accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
                self._accumulators.append(accumulator.register_prehook(self._begin))

    def _begin(self, *_: Any) -> None:
        if self._accumulators:
            self._remove(self._accumulators)
            self._steps.end_or_reject()
            if self._steps.steps.open:
                self._accumulates()

    @staticmethod
    def _remove(handles: list[Any]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
