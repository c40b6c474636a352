"""Overlap of reductions with the backward pass, the same for every host.

A host submits a reduction when a bucket is full. Its messages leave at once, and travel while the backward
pass goes on. They are collected when the next reduction is submitted, or when the host waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from dct_plugin.codecs.copies import SideStream
from dct_plugin.data_parallel.reducer import GradientReducer, Reduction


class Overlap:
    """Runs the reductions of one reducer in the order in which they are submitted, the same on all ranks.

    On CUDA they are queued on a stream, from the host's own thread. Kernels of a second thread would come in
    between those of the model's other communication, in an order that differs from rank to rank.

    Args:
        reducer: The reducer of the buckets.
        wanted: False: a reduction is finished when it is submitted.
        own_stream: Whether reductions get a stream; False where the host submits on a stream of its own.
    """

    def __init__(self, reducer: GradientReducer, *, wanted: bool = True, own_stream: bool = True) -> None:
        self.reducer, self._wanted = reducer, wanted
        # What is ready goes first: the others wait for it.
        self._side = SideStream(priority=-1) if wanted and own_stream else None
        self._open: tuple[Reduction, Callable[[], None]] | None = None

    def submit(
        self, reduction: Reduction, done: Callable[[], None] = lambda: None, *, last: bool = False
    ) -> None:
        """Send the messages of a reduction, after those of the one before were collected.

        Args:
            reduction: The reduction.
            done: Called when its messages were collected.
            last: Collect the messages at once: the host waits for ``done`` next.

        Raises:
            DesyncError, PayloadError: See :meth:`~dct_plugin.data_parallel.GradientReducer.all_reduce`.
        """
        with self._stream():
            self._collect()
            reduction.post()
            self._open = reduction, done
            if last or not self._wanted:
                self._collect()

    def wait(self) -> None:
        """Return when the results of all that was submitted can be used on the current stream.

        Raises:
            DesyncError, PayloadError: See :meth:`~dct_plugin.data_parallel.GradientReducer.all_reduce`.
        """
        with self._stream():
            self._collect()
            self.reducer.finish()
        if self._side is not None:
            self._side.join()

    def _collect(self) -> None:
        if self._open is not None:
            (reduction, done), self._open = self._open, None
            reduction.finish()
            done()

    def _stream(self) -> AbstractContextManager[None]:
        """Surround work of the reducer."""
        side = self._side
        return contextlib.nullcontext() if side is None else side.queue(device=self.reducer.group.device)
