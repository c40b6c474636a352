"""Between DeepSpeed's buckets and a reducer's streams: views per parameter, types, order of scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Entries ``[offset, offset + numel)`` of a 1-D buffer: the gradient of one parameter."""

    name: str
    offset: int
    numel: int

    def of(self, buffer: Tensor) -> Tensor:
        """The parameter's part of ``buffer``, a view."""
        return buffer.narrow(0, self.offset, self.numel)


class Averaging(NamedTuple):
    """How the host turns a sum over the ranks into what it calls the gradient.

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
    def of(cls, world_size: int, *, average: bool, postscale: bool, predivide: float) -> Averaging:
        """From DeepSpeed's settings of the same names."""
        if not average:
            return cls(1.0, 1.0)
        if postscale and predivide != 1.0:
            return cls(1.0 / predivide, predivide / world_size)
        return cls(1.0, 1.0 / world_size)


class CommBuffer:
    """A gradient in the type it is communicated in, 1-D and contiguous.

    DeepSpeed rounds gradients to ``communication_data_type`` before it sends them, so the same is done here.

    Args:
        grad: Of any shape and layout.
        dtype: Communication type.
        factor: Multiplied in before the sum, see :class:`Averaging`.
    """

    def __init__(self, grad: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        self._grad = grad
        flat = grad.reshape(-1)
        self._aliased = flat.data_ptr() == grad.data_ptr() and flat.dtype == dtype
        self.flat = flat if flat.dtype == dtype else flat.to(dtype)
        if factor != 1.0:
            self.flat.mul_(factor)

    def write_back(self) -> None:
        """Put the result into the gradient, if it is not there already."""
        if not self._aliased:
            self._grad.copy_(self.flat.view(self._grad.shape))


def pieces(sizes: Sequence[tuple[str, int]]) -> list[Piece]:
    """Layout of a buffer that holds parameters one after the other."""
    found, offset = [], 0
    for name, numel in sizes:
        found.append(Piece(name, offset, numel))
        offset += numel
    return found
