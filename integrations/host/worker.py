"""Reductions beside the backward pass: a thread that works on them in order, or a stream of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from .overlap import group_of_own, one_core_each

__all__ = ["ReductionHandle", "ReductionStream", "ReductionWorker", "group_of_own", "one_core_each"]


class ReductionHandle:
    """What the host waits for; an error of the reduction is raised there."""

    def __init__(self, result: Future[None] | None = None, worker: ReductionWorker | None = None) -> None:
        self._result = result
        self._worker = worker

    def wait(self, *arguments: Any) -> None:
        """Return when the reduction is done."""
        if self._result is not None:
            began = time.perf_counter()
            try:
                self._result.result()
            finally:
                if self._worker is not None:
                    self._worker.waited += time.perf_counter() - began

    def when_done(self, call: Callable[[], None]) -> None:
        """``call()`` when the reduction is done or has failed, on the thread that did it."""
        assert self._result is not None
        self._result.add_done_callback(lambda _: call())


class ReductionWorker:
    """A thread that does reductions one after the other.

    A daemon: a rank that fails elsewhere must be able to end, so that its sockets close and the others see
    it, while this thread still waits for them.

    Attributes:
        waited: Seconds that the host waited for it since :meth:`hidden_ms` was asked last.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._busy = self.waited = 0.0
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> ReductionHandle:
        """Queue ``work``; the handle holds its error, and so do all later ones."""
        result: Future[None] = Future()
        self._tasks.put((result, work))
        return ReductionHandle(result, self)

    def idle(self) -> bool:
        """Whether nothing is queued behind what is being done."""
        return self._tasks.empty()

    def stop(self) -> None:
        """End the thread behind what is queued."""
        self._tasks.put(None)

    def hidden_ms(self) -> float:
        """Milliseconds of work since the last call that the host did not wait for; when nothing is queued."""
        hidden = max(self._busy - self.waited, 0.0)
        self._busy = self.waited = 0.0
        return 1e3 * hidden

    def _serve(self) -> None:
        failure: BaseException | None = None
        torch.set_grad_enabled(False)
        while (task := self._tasks.get()) is not None:
            result, work = task
            began = time.perf_counter()
            try:
                if failure is not None:
                    raise failure
                work()
            except BaseException as error:
                failure = error
                result.set_exception(error)
            else:
                self._busy += time.perf_counter() - began
                result.set_result(None)
            del task, result, work  # what they hold is the host's again


class ReductionStream:
    """A stream of a CUDA device for reductions, launched by the host's own thread in its own order: a second
    thread's kernels would come in between those of the model's other communication, in an order that differs
    from rank to rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """What the block launches runs when what the current stream has so far is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream gets from now on runs when the reductions are done."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
