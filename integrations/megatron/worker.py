"""Reductions beside the backward pass: a thread that works on bucket groups, and what Megatron waits for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["ReductionHandle", "ReductionWorker"]


class ReductionHandle:
    """What Megatron waits for; an error of the reduction is raised there."""

    def __init__(self, result: Future[None] | None = None) -> None:
        self._result = result

    def wait(self, *arguments: Any) -> None:
        """Return when the bucket group is reduced."""
        if self._result is not None:
            self._result.result()


class ReductionWorker:
    """A thread that reduces bucket groups one after the other.

    A daemon: a rank that fails elsewhere must be able to end, so that its sockets close and the others see
    it, while this thread still waits for them.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> ReductionHandle:
        """Queue ``work``; the handle holds its error, and so do all later ones."""
        result: Future[None] = Future()
        self._tasks.put((result, work))
        return ReductionHandle(result)

    def stop(self) -> None:
        """End the thread behind what is queued."""
        self._tasks.put(None)

    def _serve(self) -> None:
        failure: BaseException | None = None
        while (task := self._tasks.get()) is not None:
            result, work = task
            try:
                if failure is not None:
                    raise failure
                work()
            except BaseException as error:
                failure = error
                result.set_exception(error)
            else:
                result.set_result(None)
