"""The add-ons of a reducer, and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from .accordion import Accordion
from .add_on import AddOn, ReducerContext
from .autotune.add_on import AutomaticSparsity
from .local_steps.add_on import LocalSteps
from .plan import ReductionPlan, Sparsity
from .residual_checks import ResidualChecks
from .step_ahead.add_on import StepAheadAddOn

#: In the order in which they see a reduction.
ADD_ONS: tuple[type[AddOn], ...] = (Accordion, StepAheadAddOn, AutomaticSparsity, LocalSteps, ResidualChecks)


class AddOns:
    """The add-ons that a configuration asks for.

    Args:
        context: The reducer, as add-ons see it.

    Attributes:
        earlier: By name, the sum (1-D) of this step's earlier gradients, where the host adds a pass to what
            was reduced before and reduces both. Add-ons see the gradients of the pass alone.
    """

    def __init__(self, context: ReducerContext) -> None:
        self._context = context
        self._each = [add_on for kind in ADD_ONS if (add_on := kind.configured(context)) is not None]
        self._by_key: dict[str, Any] = {each.key: each for each in self._each}
        self.earlier: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[AddOn]:
        return iter(self._each)

    @property
    def step_ahead(self) -> StepAheadAddOn:
        """The add-on that displaces weights; hosts tell it which.

        Raises:
            ConfigError: The configuration does not ask for it.
        """
        if "ahead" not in self._by_key:
            raise ConfigError(
                "step-ahead needs dct.data_parallel.feedback = 'step_ahead', it is "
                f"'{self._context.config.feedback.label()}'"
            )
        found: StepAheadAddOn = self._by_key["ahead"]
        return found

    @property
    def local_steps(self) -> LocalSteps | None:
        """The add-on of local steps; hosts tell it which weights are trained."""
        return self._by_key.get("local")

    @property
    def dense(self) -> bool:
        """True if an add-on wants gradients of this step to be summed densely."""
        return any(each.dense for each in self._each)

    def sparsities(self, names: Sequence[str], otherwise: Sequence[Sparsity]) -> Sequence[Sparsity]:
        """Return the sparsities of tensors in this step; ``otherwise`` are those without add-ons."""
        for each in reversed(self._each):
            otherwise = [*map(each.sparsity, names, otherwise)]
        return otherwise

    def before_compression(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        """Show gradients to the add-ons before they are reduced, also those that the host reduces by itself.

        Raises:
            ConfigError: The host has not said what an add-on needs to know.
        """
        if self.earlier and self._each:
            entries = [(name, self._of_this_pass(name, tensor)) for name, tensor in entries]
        for each in self._each:
            each.before_compression(entries)

    def after_reduce(self, plan: ReductionPlan) -> None:
        """Show reduced gradients to the add-ons."""
        for each in self._each:
            each.after_reduce(plan)

    def _of_this_pass(self, name: str, tensor: Tensor) -> Tensor:
        """Return a gradient, or this rank's part of the node's, without those of earlier passes."""
        if (earlier := self.earlier.get(name)) is None:
            return tensor
        node = self._context.group.node
        if node is not None and tensor.numel() < earlier.numel():
            earlier = earlier[slice(*node.part(name, earlier.numel()))]
        return tensor - earlier  # the ranks of a node have the same, and so its mean has
