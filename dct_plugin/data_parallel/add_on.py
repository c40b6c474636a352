"""The interface of add-ons: features beside the reduction, and the reducer as they see it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..config import DataParallelConfig
from .plan import ReductionPlan, Sparsity
from .stream_group import StreamGroup
from .topologies import Topologies


class AddOn:
    """A feature that sees every reduction of a reducer, and may keep a state of its own.

    Attributes:
        key: Name of the state in what the reducer saves; "" saves nothing.
        option: The option of ``dct.data_parallel`` that asks for the feature; null there: it is not wanted.
        looks: False: the plans of this step are not shown to it. :meth:`begin_step` may set it.
    """

    key: ClassVar[str] = ""
    option: ClassVar[str]
    looks = True

    @classmethod
    def configured(cls, context: ReducerContext) -> AddOn | None:
        """Return the add-on of a configuration in which :attr:`option` is set; None if it is not wanted."""
        raise NotImplementedError

    def begin_step(self) -> None:
        """Decide what does not change within a step, when its number is known."""

    def before_compression(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        """See gradients of this rank before they are reduced, and cleared.

        Raises:
            ConfigError: The host has not said what the feature needs to know.
        """

    def compared(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that :meth:`after_reduce` compares between ranks."""
        return []

    @property
    def dense(self) -> bool:
        """True if gradients of this step are to be summed densely; asked for when a step begins."""
        return False

    def sparsity(self, name: str, otherwise: Sparsity) -> Sparsity:
        """Return the sparsity of a tensor in this step; ``otherwise`` is that without this add-on."""
        return otherwise

    def before_reduce(self, plan: ReductionPlan) -> None:
        """Exchange what has to be known before the tensors of ``plan`` are sent; a collective."""

    def after_reduce(self, plan: ReductionPlan) -> None:
        """See the reduced gradients; a collective."""

    def end_step(self, *, skipped: bool) -> None:
        """Close an optimizer step; a ``skipped`` one leaves no trace. Tensors that the reducer has in
        ``waiting`` stay open.
        """

    def returned(self, name: str, flat: Tensor) -> None:
        """See what was added to the residual of a tensor, since no rank used it."""

    def undo(self, names: Collection[str], *, lost: bool) -> None:
        """Forget the gradients of these tensors in this step, which no optimizer used.

        Args:
            names: The tensors.
            lost: Their residuals could not be restored, and are zero.
        """

    def flush(self) -> None:
        """Leave nothing unsent; a collective."""

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""

    def state_dict(self) -> Any:
        """Return what a resumed run needs."""
        return None

    @staticmethod
    def in_unit(state: Any, ratio: float) -> Any:
        """Return a :meth:`state_dict`, or None, for gradients that are ``ratio`` times as large."""
        return state

    def load_state_dict(self, state: Any, *, step: int) -> None:
        """Restore :meth:`state_dict`; None starts afresh, ``step`` optimizer steps into the training."""


class ReducerContext(NamedTuple):
    """The reducer as add-ons see it."""

    group: StreamGroup
    config: DataParallelConfig
    topologies: Topologies
    optimizer: Any
    """Optimizer of the reduced gradients, or what else has its ``param_groups``; None if it is not told."""
