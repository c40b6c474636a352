"""The gradients in DeepSpeed's buckets, and when their sums are used under ZeRO-1 and ZeRO-2.

DeepSpeed copies the sums of a bucket into the gradients of its partition as soon as the reduction returns,
for the bucket's buffer is filled again. Two classes decide how long the host waits before:

- :class:`BucketReductions` waits for every bucket. With ``overlap_comm`` messages travel while the backward
  pass goes on, on CUDA on DeepSpeed's reduction stream. The copies are made before the next bucket is handed
  over, or at the end of the pass.
- :class:`DeferredReductions`, on a device, waits once, at the end of the backward pass, for figures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.reducer import Reduction

from ...data_parallel.reducer import Overlap
from ..host.patching import Function, Patches


def is_expert(parameter: Any) -> bool:
    """Return whether DeepSpeed treats the parameter as an expert's, reduced over a group of its own."""
    return not getattr(parameter, "allreduce", True)


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


class BucketReductions:
    """Reductions of buckets whose sums have an owner.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer``.
        reducer: Reduces its gradients.
    """

    def __init__(self, optimizer: Any, reducer: GradientReducer) -> None:
        self._optimizer, self._reducer = optimizer, reducer
        # Where DeepSpeed leaves the buffer of a bucket alone while it is reduced.
        keeps_buffer = optimizer.contiguous_gradients and optimizer.reduce_scatter
        self._overlaps = bool(optimizer.overlap_comm and keeps_buffer and reducer.group.group_size > 1)
        # On CUDA DeepSpeed calls on its own reduction stream.
        self._overlap = Overlap(reducer, wanted=self._overlaps, own_stream=False)
        self._uses: list[Callable[[], None]] = []

    def reduce(self, reductions: Sequence[Reduction], use: Callable[[], None]) -> None:
        """Reduce a bucket.

        Args:
            reductions: Those of its gradients.
            use: Uses the sums.
        """
        for each in reductions:
            self._overlap.submit(each)
        self._uses.append(use)
        if not self._overlaps:
            self._complete()

    def install(self, patches: Patches) -> None:
        """Patch the optimizer instance."""
        patches.intercept(self._optimizer, "reduce_ipg_grads", self._reduce_buckets)
        patches.intercept(self._optimizer, "copy_grads_in_partition", self._copy)

    def _reduce_buckets(self, original: Function, comm_dtype: Any = None) -> None:
        self._complete()
        original(comm_dtype)
        if comm_dtype is None:  # the end of the backward pass
            self._complete()

    def _copy(self, original: Function, parameter: Any, *arguments: Any) -> None:
        if self._uses:
            self._uses.append(lambda: original(parameter, *arguments))
        else:
            original(parameter, *arguments)

    def _complete(self) -> None:
        """Wait for the reductions that run, and have DeepSpeed copy the sums."""
        if self._uses:
            with self._reduction_stream():
                self._overlap.wait()
                uses, self._uses = self._uses, []
                for use in uses:
                    use()

    def _reduction_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of DeepSpeed's reduction stream, where it has one."""
        stream = self._optimizer.reduction_stream if self._optimizer.overlap_comm else None
        on_cuda = stream is not None and self._reducer.group.device.type == "cuda"
        return torch.cuda.stream(stream) if on_cuda else contextlib.nullcontext()


class DeferredReductions(BucketReductions):
    """Reductions that are waited for at the end of the backward pass; arguments as of the base class."""

    def reduce(self, reductions: Sequence[Reduction], use: Callable[[], None]) -> None:
        for each in reductions:
            each.finish()
        use()

    def _reduce_buckets(self, original: Function, comm_dtype: Any = None) -> None:
        original(comm_dtype)
        if comm_dtype is None:  # the end of the backward pass
            with self._reduction_stream():
                self._reducer.finish()
