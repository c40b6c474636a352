"""The passes of a module that run at displaced weights, and the steps that end them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..module_hooks import ModuleHook
from ..passes import around_backward_passes, around_passes, is_transforming
from .displaced_weights import DisplacedWeights, Event, State


class TrainingPasses:
    """Tells displaced weights which passes run, and when the weights change.

    A backward pass uses the weights that its forward pass used. Which forward pass it belongs to is not
    known: as long as more forward passes with gradients than backward passes were seen in a step, or a graph
    was kept, the same displaced weights are shown.

    Args:
        weights: The displaced weights.

    Attributes:
        reduced: Whether gradients were reduced since displaced weights were computed, so that new ones would
            be others.
        transformed: Whether a pass of this step ran within a transform of ``torch.func``.
    """

    def __init__(self, weights: DisplacedWeights) -> None:
        self._weights = weights
        self.reduced = self.transformed = False
        self._entered: list[State | bool] = []
        """For each forward pass that runs: the state to come back to after a pass without gradients, else
        whether it has gradients.
        """
        self._backward = 0
        """Depth of backward passes that run."""
        self._passes = 0
        """Forward passes with gradients less backward passes in this step."""
        self._kept = False
        """Whether a backward pass of this step has kept its graph."""
        self._saving: list[State] = []

    def register(self, module: torch.nn.Module) -> list[Any]:
        """Follow the passes of ``module``; show the weights where it or a part of it is saved or loaded.

        Returns:
            Handles that remove the hooks.
        """
        handles: list[Any] = [
            around_passes(module, self.before_forward, self.after_forward),
            around_backward_passes(self._around_backward),
        ]
        for part in module.modules():
            save, saved, load = (
                ModuleHook(lambda *_, function=function: function(), part)
                for function in (self._before_saving, self._after_saving, self.step)
            )
            handles += [
                part.register_state_dict_pre_hook(save),
                part.register_state_dict_post_hook(saved),
                part._register_load_state_dict_pre_hook(load, with_module=True),
            ]
        return handles

    @property
    def runs(self) -> bool:
        """True while a forward pass with gradients runs, and no backward pass within it."""
        return True in self._entered and not self._backward

    def before_forward(self, gradients: bool) -> None:
        """Show the weights of a forward pass."""
        if is_transforming():
            self.transformed = True
            self._entered.append(False)
        elif gradients and not torch.jit.is_tracing():
            self._weights.on(Event.FORWARD)
            self._passes += 1
            self._entered.append(True)
        else:
            self._entered.append(self._weights.hide())

    def after_forward(self) -> None:
        """Leave the weights as they were before a pass without gradients."""
        found = self._entered.pop() if self._entered else False
        if isinstance(found, State):
            self._weights.unhide(found)

    @contextmanager
    def _around_backward(self, keeps: bool) -> Iterator[None]:
        if is_transforming() or self._backward or True in self._entered:
            # Within another pass: of a transform, a recomputation, a force, Lightning's manual optimization.
            self._backward += 1
            try:
                yield
            finally:
                self._backward -= 1
            return
        self._weights.on(Event.BACKWARD)
        self._backward, failed = 1, True
        try:
            yield
            failed = False
        finally:
            self._backward = 0
            self._passes -= 1
            self._kept |= keeps
            is_open = self.reduced and (self._kept or self._passes > 0)
            # Where gradients were reduced the host has waited for the device.
            ends = Event.PAUSE if is_open else Event.BACKWARD_ENDS
            self._weights.on(ends, thorough=self.reduced, checks=not failed)

    def step(self) -> None:
        """Follow a change of the weights.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        self._saving.clear()
        try:
            self._weights.on(Event.STEP, thorough=True)
        finally:
            if not self._kept and self._passes <= 0:
                self._weights.drop()
            self._passes, self._kept, self.transformed = 0, False, False

    def _before_saving(self) -> None:
        # Hooks call this for a module and for all its parts.
        self._saving.append(self._weights.hide())

    def _after_saving(self) -> None:
        if self._saving:
            self._weights.unhide(self._saving.pop())
