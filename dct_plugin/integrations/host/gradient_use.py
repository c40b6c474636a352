"""The use of reduced gradients by one optimizer, as a state machine."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Use(enum.Enum):
    """A state of the gradients of one optimizer."""

    IDLE = "no gradients were reduced since the last step"
    REDUCED = "gradients were reduced, and wait for the optimizer"
    USED = "the optimizer has made its step"
    SKIPPED = "the optimizer's step has left them out"
    CLEARED = "the script has cleared them without a step"


class Event(enum.Enum):
    """An event that changes the use of gradients."""

    REDUCE = "gradients are reduced"
    STEP = "optimizer.step() has returned"
    LEAVE_OUT = "the scaler, or the check of gradients, leaves the step out"
    CLEAR = "gradients are found to be cleared"
    CLOSE = "residuals have followed"


#: The next state; pairs that are not here leave the state as it is.
TRANSITIONS = {
    (Use.IDLE, Event.REDUCE): Use.REDUCED,
    (Use.REDUCED, Event.STEP): Use.USED,
    (Use.REDUCED, Event.LEAVE_OUT): Use.SKIPPED,
    (Use.REDUCED, Event.CLEAR): Use.CLEARED,
    # A loaded state takes their place.
    (Use.REDUCED, Event.CLOSE): Use.IDLE,
    # A step in a backward pass, for each gradient that is ready; or a closure.
    (Use.USED, Event.REDUCE): Use.REDUCED,
    # The scaler's finding is known later than the call of the step.
    (Use.USED, Event.LEAVE_OUT): Use.SKIPPED,
    (Use.USED, Event.CLOSE): Use.IDLE,
    (Use.SKIPPED, Event.CLOSE): Use.IDLE,
    # A step without gradients counts, and changes nothing.
    (Use.CLEARED, Event.STEP): Use.SKIPPED,
    (Use.CLEARED, Event.REDUCE): Use.REDUCED,
    (Use.CLEARED, Event.CLOSE): Use.IDLE,
}


class OptimizerGradients:
    """The reduced gradients of one optimizer's parameters.

    Args:
        optimizer: The optimizer; None for parameters that no known optimizer has.

    Attributes:
        use: What became of the gradients.
        reduced: By name, the parameters whose gradients were reduced since the last step.
        covered: True if a second residual was there when they were reduced.
        asked: True if a gradient scaler has looked at them.
        overflow: Returns what the scaler found out for a step that it leaves to the optimizer (fused ones).
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.use = Use.IDLE
        self.reduced: dict[str, Tensor] = {}
        self.covered = self.asked = False
        self.overflow: Callable[[], Tensor] | None = None

    def note(self, event: Event) -> None:
        """Follow an event."""
        self.use = TRANSITIONS.get((self.use, event), self.use)
        if self.use is Use.IDLE:
            self.reduced, self.asked, self.overflow = {}, False, None

    def add(self, named: dict[str, Tensor], *, covered: bool) -> None:
        """Note that gradients of parameters, by name, were reduced, with a second residual (``covered``) or
        without.
        """
        self.covered = covered and (self.covered or not self.reduced)
        self.reduced |= named
        self.note(Event.REDUCE)

    def is_cleared(self, *, zeros: bool) -> bool:
        """Return whether no optimizer can use the gradients any more; ``zeros`` count as cleared ones."""
        for each in self.reduced.values():
            if each.grad is not None and (not zeros or bool(local_part(each.grad).any())):
                return False
        return True

    def is_decided(self, updated: bool) -> bool:
        """Return whether the scaler, which was ``updated`` or not, has made or left out the step."""
        left_out = self.use is Use.REDUCED and self.asked and updated
        return left_out or self.use in (Use.USED, Use.SKIPPED)

    def is_left_out(self) -> bool:
        """Return whether the scaler has left out a step that is decided."""
        return self.use is Use.REDUCED or (self.overflow is not None and bool(self.overflow().any()))


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, and the values of a sparse one."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    own = tensor if local is None else local()
    return own._values() if own.is_sparse else own
