"""``overlap_comm`` under ZeRO-1 and ZeRO-2 on CPU: buckets are reduced beside the backward pass.

With ``overlap_comm`` DeepSpeed has two buffers for the gradients of a bucket, so that the backward pass fills
one while the other is reduced; on CPU, without streams, it waits all the same. Here the reduction of a bucket
goes to a thread when the bucket is full, and its results are filed, by DeepSpeed's own code, before the next
bucket is handed over, or at the end of the pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.metrics import Record

from ..host.patches import Patches
from ..host.worker import ReductionHandle, ReductionWorker, group_of_own


class Overlap:
    """Reductions of contiguous buckets in a thread, over a group of its own.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer``.
        reducer: Of its gradients; takes the group that the thread uses.
        worker: The thread.
    """

    def __init__(self, optimizer: Any, reducer: GradientReducer, worker: ReductionWorker) -> None:
        self._optimizer, self._reducer, self._worker = optimizer, reducer, worker
        self._handles: list[ReductionHandle] = []
        self._unfiled: list[Callable[[], None]] = []
        self.close = weakref.finalize(self, worker.stop)
        """Ends the thread; so does the end of this object."""

    @classmethod
    def of(cls, optimizer: Any, reducer: GradientReducer) -> Overlap | None:
        """None where nothing can overlap: the reduction itself is waited for. A collective."""
        wanted = optimizer.overlap_comm and optimizer.contiguous_gradients and optimizer.reduce_scatter
        if not wanted or reducer.device.type != "cpu" or reducer.world_size == 1:
            return None
        own = group_of_own(reducer.exchange.group)
        if own is None:
            return None
        reducer.exchange.group = own
        return cls(optimizer, reducer, ReductionWorker("dct gradients"))

    def submit(self, work: Callable[[], None]) -> None:
        """Queue the reduction of a bucket, whose buffer is left alone until :meth:`drain`."""
        self._handles.append(self._worker.submit(work))

    def drain(self) -> None:
        """Wait for what is queued, and file it; raises what went wrong."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        unfiled, self._unfiled = self._unfiled, []
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
                    if (metrics := self._reducer.metrics) is not None:
                        hidden = self._worker.hidden_ms()
                        metrics.record(Record("gradient", tensors=0, hidden_ms=hidden))

            return reduce_ipg_grads

        def make_copy(original: Callable[..., Any]) -> Callable[..., Any]:
            def copy_grads_in_partition(*arguments: Any) -> None:
                if self._handles:
                    self._unfiled.append(lambda: original(*arguments))
                else:
                    original(*arguments)

            return copy_grads_in_partition

        patches.wrap(self._optimizer, "reduce_ipg_grads", make_reduce)
        patches.wrap(self._optimizer, "copy_grads_in_partition", make_copy)
