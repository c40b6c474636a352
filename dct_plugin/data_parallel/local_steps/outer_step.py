"""The progress that ranks exchange, and how the common weights move by its mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...config.data_parallel import LocalStepsConfig
from ..add_on import ReducerContext
from ..plan import Entries
from .training import Optimizers, TrainedWeights


class OuterStep:
    """The whole progress of the last steps, by whose mean an outer optimizer moves the common weights.

    The outer optimizer is SGD with Nesterov momentum.

    Args:
        context: The reducer.
        weights: Those of this rank, and the common ones.
        optimizers: Those of this rank.

    Attributes:
        saved: The tensors of a saved state that all ranks have, by kind and name.
        exchanges: Exchanges so far, int64 [].
    """

    option: ClassVar[str] = "local_steps"
    """The option that asks for it."""
    keeps_unsent: ClassVar[bool] = False
    """True if progress may be left that did not cross at the last exchange."""
    buffers_every: ClassVar[int] = 1
    """Exchanges of progress from one of the buffers to the next."""
    lost: ClassVar[str] = "what ranks had trained since the last exchange, and the outer momentum, are lost"
    """The words for what is lost if a training starts without the saved states of the ranks."""

    def __init__(self, context: ReducerContext, weights: TrainedWeights, optimizers: Optimizers) -> None:
        self._weights, self._rule = weights, context.config.local_steps or LocalStepsConfig()
        common = weights.common.items() if self._rule.outer_momentum else ()
        self.saved: dict[str, dict[str, Tensor]] = {"momentum": {n: torch.zeros_like(w) for n, w in common}}
        self.exchanges = torch.zeros((), dtype=torch.int64)

    @property
    def number(self) -> int:
        """Number of the next exchange, or of the one that is under way."""
        return int(self.exchanges)

    def restore(self) -> None:
        """Take over what was loaded into the saved tensors."""

    def shorten(self, names: Sequence[str]) -> float:
        """Return the factor of a rank's gradients until its optimizer uses them."""
        return 1.0

    def end_step(self) -> None:
        """Close an optimizer step."""

    def close(self) -> None:
        """Leave the optimizers as they were."""

    def entries(self, *, last: bool) -> Entries:
        """Return what this rank brings into an exchange, by name; :meth:`take_over` expects the mean there.

        Args:
            last: Whether nothing is to be left unsent.
        """
        pairs = zip(self._weights.common.items(), self._weights.own(), strict=True)
        return [(name, own.sub_(common)) for (name, common), own in pairs]

    def take_over(self) -> None:
        """Move the common weights by the mean progress, and continue from them."""
        rule, common, mean = self._rule, list(self._weights.common.values()), self._weights.own()
        if momentum := list(self.saved["momentum"].values()):
            torch._foreach_mul_(momentum, rule.outer_momentum)
            torch._foreach_add_(momentum, mean)
            torch._foreach_add_(mean, momentum, alpha=rule.outer_momentum)
        torch._foreach_add_(common, mean, alpha=rule.outer_lr)
        torch._foreach_copy_(mean, common)
