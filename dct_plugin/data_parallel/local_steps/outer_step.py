"""The progress that ranks exchange, and how the common weights move by its mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...config.data_parallel import LocalStepsConfig
from ..add_on import ReducerContext
from ..plan import Entries
from .training import Optimizers, TrainedWeights


class OuterStep:
    """The progress of the last steps, by whose mean an outer optimizer moves the common weights.

    The outer optimizer is SGD with Nesterov momentum. The tensors may cross in turn, a fragment of the model
    in each exchange, and the mean may come some steps later (Douillard et al., *Streaming DiLoCo*, 2025,
    section 2). A rank then adds what it has trained since to the new common weights; it is not mixed with
    them, which lost quality (docs/quality.md).

    Args:
        context: The reducer.
        weights: Those of this rank, and the common ones.
        optimizers: Those of this rank.

    Attributes:
        saved: The tensors of a saved state that all ranks have, by kind and name.
        exchanges: Exchanges so far, and local steps before the last one, int64 [2].
        buffers_every: Exchanges of progress from one of the buffers to the next.
        delay: Steps for which the mean is on its way.
    """

    option: ClassVar[str] = "local_steps"
    """The option that asks for it."""
    keeps_unsent: ClassVar[bool] = False
    """True if progress may be left that did not cross at the last exchange."""
    lost: ClassVar[str] = "what ranks had trained since the last exchange, and the outer momentum, are lost"
    """The words for what is lost if a training starts without the saved states of the ranks."""

    def __init__(self, context: ReducerContext, weights: TrainedWeights, optimizers: Optimizers) -> None:
        self._weights, self._rule = weights, context.config.local_steps or LocalStepsConfig()
        common = weights.common.items() if self._rule.outer_momentum else ()
        self.saved: dict[str, dict[str, Tensor]] = {"momentum": {n: torch.zeros_like(w) for n, w in common}}
        self.exchanges = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.buffers_every, self.delay = self._rule.fragments, self._rule.delay
        names = list(weights.common)
        self._fragments = [names[first :: self.buffers_every] for first in range(self.buffers_every)]
        self._means: dict[str, Tensor] = {}
        """Progress that was sent; the exchange overwrites it with the mean."""
        self._sent_at: dict[str, Tensor] = {}
        """This rank's weights when it sent its progress; empty where ranks wait for the mean."""

    @property
    def number(self) -> int:
        """Number of the next exchange, or of the one that is under way."""
        return int(self.exchanges[0])

    @property
    def last(self) -> int:
        """Local steps before the last exchange."""
        return int(self.exchanges[1])

    @property
    def share(self) -> float:
        """Share of the weights whose progress crosses in the next exchange."""
        sizes = {name: each.numel() for name, each in self._weights.common.items()}
        return sum(map(sizes.__getitem__, self._fragment)) / sum(sizes.values())

    @property
    def _fragment(self) -> list[str]:
        return self._fragments[self.number % len(self._fragments)]

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
        common, sent = self._of(self._fragment)
        if self.delay:  # else the mean arrives where the weights are
            self._sent_at = {n: each.clone() for n, each in zip(self._fragment, sent, strict=True)}
            sent = [each.clone() for each in sent]
        torch._foreach_sub_(sent, common)
        self._means = dict(zip(self._fragment, sent, strict=True))
        return list(self._means.items())

    def take_over(self) -> None:
        """Move the common weights by the mean progress; :meth:`follow` continues from them."""
        rule, mean, (common, own) = self._rule, list(self._means.values()), self._of(self._means)
        if rule.outer_momentum:
            momentum = [self.saved["momentum"][name] for name in self._means]
            torch._foreach_mul_(momentum, rule.outer_momentum)
            torch._foreach_add_(momentum, mean)
            torch._foreach_add_(mean, momentum, alpha=rule.outer_momentum)
        torch._foreach_add_(common, mean, alpha=rule.outer_lr)
        if not self._sent_at:
            torch._foreach_copy_(own, common)
        self._means = {}

    def follow(self) -> None:
        """Add what this rank has trained since it sent its progress to the common weights."""
        if self._sent_at:
            common, own = self._of(self._sent_at)
            torch._foreach_add_(own, torch._foreach_sub(common, list(self._sent_at.values())))
            self._sent_at = {}

    def _of(self, names: Iterable[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the common weights of these names, and this rank's."""
        own = dict(zip(self._weights.common, self._weights.own(), strict=True))
        return [self._weights.common[name] for name in names], [own[name] for name in names]
