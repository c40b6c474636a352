"""The passes of a module that run at displaced weights, and the steps that end them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..module_hooks import ModuleHook
from ..passes import around_backward_passes, around_passes, is_transforming
from .displaced_weights import DisplacedWeights, Event, State

#: Returns from a forward pass that runs whether it has gradients.
_HAS_GRADIENTS = operator.itemgetter(1)


class TrainingPasses:
    """Tells displaced weights which passes run, and when the weights change.

    A backward pass uses the weights that its forward pass used. Which forward pass it belongs to is not
    known: as long as more forward passes with gradients than backward passes were seen in a step, or a graph
    was kept, the same displaced weights are shown.

    Args:
        weights: The displaced weights.

    Attributes:
        reduced: Whether gradients were reduced since displaced weights were computed. Then residuals, and
            with them new displaced weights, are others.
        transformed: Whether a pass of this step ran within a transform of ``torch.func``.
    """

    def __init__(self, weights: DisplacedWeights) -> None:
        self._weights = weights
        self.reduced = self.transformed = False
        self._entered: list[tuple[State, bool]] = []
        """The state before each forward pass that runs, and True if that pass has gradients."""
        self._backward = 0
        """Depth of backward passes that run."""
        self._passes = 0
        """Forward passes with gradients less backward passes in this step."""
        self._kept = False
        """True if a backward pass of this step has kept its graph."""
        self._idle = True
        """True if no pass was seen since the last step."""
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
            load = ModuleHook(self.step, part)
            handles += [
                part.register_state_dict_pre_hook(ModuleHook(self._before_saving, part)),
                part.register_state_dict_post_hook(ModuleHook(self._after_saving, part)),
                part._register_load_state_dict_pre_hook(load, with_module=True),
            ]
        return handles

    @property
    def runs(self) -> bool:
        """True while a forward pass with gradients runs, and no backward pass within it."""
        return self._is_inside and not self._backward

    @property
    def _is_inside(self) -> bool:
        return any(map(_HAS_GRADIENTS, self._entered))

    def before_forward(self, gradients: bool) -> None:
        """Show the weights of a forward pass."""
        found, trains = self._weights.state, gradients and not torch.jit.is_tracing()
        if is_transforming():
            self.transformed, trains = True, False
        elif trains:
            self._weights.on(Event.FORWARD, anew=not self.reduced)
            self._passes, self._idle = self._passes + 1, False
        else:
            self._weights.hide()
        self._entered.append((found, trains))

    def after_forward(self, failed: bool) -> None:
        """Leave the weights as they were before a pass without gradients, or before one that failed."""
        found, trained = self._entered.pop() if self._entered else (self._weights.state, False)
        if trained and failed:
            self._passes -= 1
            if found is not State.DISPLACED:
                self._weights.on(Event.PAUSE, checks=False)
        elif not trained and not is_transforming():
            self._weights.unhide(found)

    @contextmanager
    def _around_backward(self, keeps: bool) -> Iterator[None]:
        if is_transforming() or self._backward or self._is_inside:
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
            self._passes, self._idle = self._passes - 1, False
            self._kept |= keeps
            ends = Event.PAUSE if self._kept or self._passes > 0 else Event.BACKWARD_ENDS
            # Where gradients were reduced the host has waited for the device.
            self._weights.on(ends, thorough=self.reduced, checks=not failed)

    def step(self, *_: Any) -> None:
        """Follow a change of the weights.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        self._saving.clear()
        try:
            self._weights.on(Event.STEP, thorough=True)
        finally:
            if not (self._kept or self._passes > 0 or self._idle):
                self._weights.drop()
            self._passes, self._kept, self._idle, self.transformed = 0, False, True, False

    def _before_saving(self, *_: Any) -> None:
        # Hooks call this for a module and for all its parts.
        self._saving.append(self._weights.hide())

    def _after_saving(self, *_: Any) -> None:
        if self._saving:
            self._weights.unhide(self._saving.pop())
