"""The gradients in DeepSpeed's buckets: slices by parameter, types, order of scaling, experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_expert(parameter: Any) -> bool:
    """Return whether DeepSpeed treats the parameter as an expert's, reduced over a group of its own."""
    return not getattr(parameter, "allreduce", True)


class BucketSlice(NamedTuple):
    """The gradient of one parameter: entries ``[offset, offset + numel)`` of a 1-D buffer."""

    name: str
    offset: int
    numel: int


def consecutive(sizes: Iterable[tuple[str, int]]) -> list[BucketSlice]:
    """Return the slices of a buffer that holds parameters of these ``(name, numel)`` one after the other."""
    slices, offset = [], 0
    for name, numel in sizes:
        slices.append(BucketSlice(name, offset, numel))
        offset += numel
    return slices


def entries_of(buffer: Tensor, slices: Sequence[BucketSlice]) -> list[tuple[str, Tensor]]:
    """Return ``(name, view of the buffer)`` for each slice: the entries that a reducer takes."""
    return [(name, buffer.narrow(0, offset, numel)) for name, offset, numel in slices]


class ScaleFactors(NamedTuple):
    """The factors with which the host turns a sum over the ranks into what it calls the gradient.

    The multiplications of DeepSpeed (``prescale_gradients``, ``gradient_predivide_factor``,
    ``gradient_allreduce_op``) are kept in its order where the order shows in the result. Only a plain
    division before the sum is moved behind it: residuals then hold gradients in their own unit, whatever the
    number of ranks.

    Attributes:
        before: Factor on every rank's gradient before the sum; 1.0 for none.
        after: Factor on the sum.
    """

    before: float
    after: float

    @classmethod
    def of(cls, world_size: int, *, average: bool, postscale: bool, predivide: float) -> ScaleFactors:
        """Return the factors for DeepSpeed's settings of the same names."""
        if not average:
            return cls(1.0, 1.0)
        if postscale and predivide != 1.0:
            return cls(1.0 / predivide, predivide / world_size)
        return cls(1.0, 1.0 / world_size)


class CommunicationBuffer:
    """A gradient in the type it is communicated in, 1-D and contiguous.

    DeepSpeed rounds gradients to ``communication_data_type`` before it sends them, so the same is done here.

    Args:
        grad: A gradient of any shape and layout.
        dtype: The communication type.
        factor: Multiplied in before the sum, see :class:`ScaleFactors`.
    """

    def __init__(self, grad: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        self._grad = grad
        flat = grad.reshape(-1)
        self._aliased = flat.data_ptr() == grad.data_ptr() and flat.dtype == dtype
        self.flat = flat if flat.dtype == dtype else flat.to(dtype)
        if factor != 1.0:
            self.flat.mul_(factor)

    def write_back(self) -> None:
        """Copy the result into the gradient, if it is not there already."""
        if not self._aliased:
            self._grad.copy_(self.flat.view(self._grad.shape))
