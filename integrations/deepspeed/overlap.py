"""``overlap_comm`` under ZeRO-1 and ZeRO-2: buckets are reduced beside the backward pass.

With ``overlap_comm`` DeepSpeed has two buffers for the gradients of a bucket, so that the backward pass fills
one while the other is reduced; but it files the sums of a bucket as soon as its reduction returns. Here a
reduction is only begun when its bucket is full, on CPU in a thread, on CUDA on DeepSpeed's reduction stream.
What it gives is waited for, and filed by DeepSpeed's own code, before the next bucket is handed over, or at
the end of the pass. On CUDA this is for what :mod:`.filing` cannot do.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.metrics import Record

from ..host.patches import Patches
from ..host.worker import ReductionHandle, ReductionWorker, group_of_own


class Overlap:
    """Reductions of contiguous buckets that are filed later.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer``.
        reducer: Of its gradients.
        worker: The thread; None on CUDA.
    """

    def __init__(self, optimizer: Any, reducer: GradientReducer, worker: ReductionWorker | None) -> None:
        self._optimizer, self._reducer, self._worker = optimizer, reducer, worker
        self._handles: list[ReductionHandle] = []
        self._unfiled: list[Callable[[], None]] = []
        reducer.deferred = True
        self.close = (lambda: None) if worker is None else weakref.finalize(self, worker.stop)
        """Ends the thread; so does the end of this object."""

    @classmethod
    def of(cls, optimizer: Any, reducer: GradientReducer) -> Overlap | None:
        """None where nothing can overlap: the reduction itself is waited for. A collective."""
        wanted = optimizer.overlap_comm and optimizer.contiguous_gradients and optimizer.reduce_scatter
        if not wanted or reducer.world_size == 1:
            return None
        if reducer.device.type != "cpu":
            return cls(optimizer, reducer, None)
        own = group_of_own(reducer.exchange.group)
        if own is None:
            return None
        reducer.exchange.group = own
        return cls(optimizer, reducer, ReductionWorker("dct gradients"))

    def submit(self, work: Callable[[], None], after: Callable[[], None]) -> None:
        """Begin the reduction of a bucket, whose buffer is left alone until :meth:`drain`.

        Args:
            work: Reduces.
            after: Uses the sums.
        """
        if self._worker is None:
            work()  # on the stream on which DeepSpeed calls
        else:
            self._handles.append(self._worker.submit(work))
        self._unfiled.append(after)

    def drain(self) -> None:
        """Wait for what is under way, and file it; raises what went wrong."""
        if not self._unfiled:
            return
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        unfiled, self._unfiled = self._unfiled, []
        stream = self._optimizer.reduction_stream if self._worker is None else None
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            self._reducer.finish()
            for file in unfiled:
                file()

    def install(self, patches: Patches) -> None:
        """Patch the optimizer instance."""

        def make_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
            def reduce_ipg_grads(comm_dtype: Any = None) -> None:
                self.drain()
                original(comm_dtype)
                if comm_dtype is None:  # the end of the backward pass
                    self.drain()
                    if self._worker is not None and (metrics := self._reducer.metrics) is not None:
                        hidden = self._worker.hidden_ms()
                        metrics.record(Record("gradient", tensors=0, hidden_ms=hidden))

            return reduce_ipg_grads

        def make_copy(original: Callable[..., Any]) -> Callable[..., Any]:
            def copy_grads_in_partition(*arguments: Any) -> None:
                if self._unfiled:
                    self._unfiled.append(lambda: original(*arguments))
                else:
                    original(*arguments)

            return copy_grads_in_partition

        patches.wrap(self._optimizer, "reduce_ipg_grads", make_reduce)
        patches.wrap(self._optimizer, "copy_grads_in_partition", make_copy)
