"""Parameters that no rank used in a step: under ``find_unused_parameters`` DDP leaves their gradients as they
were, so that what was reduced for them is still to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dct_plugin.data_parallel import GradientReducer

__all__ = ["BucketGradient", "take_back_unused"]


class BucketGradient(NamedTuple):
    """A gradient in DDP's bucket, and the parameter's own gradient before DDP copies the bucket's there."""

    name: str
    parameter: Tensor
    view: Tensor
    before: Tensor | None
    version: int

    @classmethod
    def of(cls, name: str, parameter: Tensor, view: Tensor) -> BucketGradient:
        """Note the state of a parameter whose gradient lies in ``view``."""
        gradient = parameter.grad
        return cls(name, parameter, view, gradient, 0 if gradient is None else gradient._version)

    def unused(self) -> bool:
        """Return whether DDP, which has finished, did not copy it."""
        if self.before is None:
            return self.parameter.grad is None
        untouched = self.parameter.grad is self.before and self.before._version == self.version
        return untouched and self.before.data_ptr() != self.view.data_ptr()  # gradient_as_bucket_view


def take_back_unused(reducer: GradientReducer, gradients: Sequence[BucketGradient]) -> None:
    """Add the gradients that DDP did not use back to the residuals."""
    unused = [(each.name, each.view) for each in gradients if each.unused()]
    if unused:
        reducer.return_to_residual(unused)
