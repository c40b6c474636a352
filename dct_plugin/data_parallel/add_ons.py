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
from .plan import PlannedTensor, ReductionPlan
from .residual_checks import ResidualChecks
from .step_ahead.add_on import StepAheadAddOn

#: In the order in which they see a reduction.
ADD_ONS: tuple[type[AddOn], ...] = (Accordion, StepAheadAddOn, AutomaticSparsity, LocalSteps, ResidualChecks)


class AddOns:
    """The add-ons that a configuration asks for.

    Args:
        context: The reducer, as add-ons see it.

    Attributes:
        earlier: By name, the sum (1-D) of this step's earlier gradients, where the framework adds a pass to
            what was reduced before and reduces both. Add-ons see the gradients of the pass alone.
        dense: True if an add-on wants gradients of this step to be summed densely.
        before_reduce, after_reduce: What shows a plan to the add-ons that look at this step.
        local_steps: The add-on of local steps; the framework tells it which weights are trained.
    """

    def __init__(self, context: ReducerContext) -> None:
        self._context = context
        asked = [kind for kind in ADD_ONS if getattr(context.config, kind.option) is not None]
        self._each = [add_on for kind in asked if (add_on := kind.configured(context)) is not None]
        self._by_key: dict[str, Any] = {each.key: each for each in self._each}
        self.local_steps: LocalSteps | None = self._by_key.get("local")
        self.earlier: dict[str, Tensor] = {}
        self._begin_step = self._overridden("begin_step")
        self._see_gradients = self._overridden("before_compression")
        self._compared = self._overridden("compared")
        self._sparsity = self._overridden("sparsity")[::-1]
        self._before_reduce = self._overridden("before_reduce")
        self._after_reduce = self._overridden("after_reduce")
        self._dense = [each for each in self._each if type(each).dense is not AddOn.dense]

    def begin_step(self) -> None:
        """Let the add-ons decide what they do in a step, when its number is known."""
        for begin_step in self._begin_step:
            begin_step()
        self.dense = any(each.dense for each in self._dense)
        self.before_reduce = [see for see in self._before_reduce if see.__self__.looks]
        self.after_reduce = [see for see in self._after_reduce if see.__self__.looks]

    def _overridden(self, hook: str) -> list[Any]:
        """Return a hook of the add-ons that have one."""
        nothing = getattr(AddOn, hook)
        return [getattr(each, hook) for each in self._each if getattr(type(each), hook) is not nothing]

    def __iter__(self) -> Iterator[AddOn]:
        return iter(self._each)

    @property
    def alone(self) -> bool:
        """True if gradients of this step stay on their rank."""
        return self.local_steps is not None and self.local_steps.alone

    @property
    def exchanges_progress(self) -> bool:
        """True if progress is due, or was sent and has still to be applied."""
        return self.local_steps is not None and (self.local_steps.is_open or self.local_steps.due)

    @property
    def step_ahead(self) -> StepAheadAddOn:
        """The add-on that displaces weights; frameworks tell it which.

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

    def compared(self, names: Sequence[str]) -> list[str]:
        """Return those of ``names`` that add-ons compare between ranks after the reduction."""
        return [name for compared in self._compared for name in compared(names)]

    def choose_sparsities(self, tensors: Sequence[PlannedTensor]) -> None:
        """Change the sparsities of tensors in this step, which are those without add-ons."""
        for choose in self._sparsity:
            for each in tensors:
                if not each.small:
                    each.sparsity = choose(each.name, each.sparsity)

    def before_compression(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        """Show gradients to the add-ons before they are reduced, also those that the framework reduces by
        itself.

        Raises:
            ConfigError: The framework has not said what an add-on needs to know.
        """
        if self.earlier and self._see_gradients:
            entries = [(name, self._of_this_pass(name, tensor)) for name, tensor in entries]
        for see in self._see_gradients:
            see(entries)

    def show_sums(self, plan: ReductionPlan) -> None:
        """Show the sums of a plan to the add-ons."""
        for see in self.after_reduce:
            see(plan)

    def _of_this_pass(self, name: str, tensor: Tensor) -> Tensor:
        """Return a gradient, or this rank's part of the node's, without those of earlier passes."""
        if (earlier := self.earlier.get(name)) is None:
            return tensor
        node = self._context.group.node
        if node is not None and tensor.numel() < earlier.numel():
            earlier = earlier[slice(*node.part(name, earlier.numel()))]
        return tensor - earlier  # the ranks of a node have the same, and so its mean has
