"""Reports of ranks that are lost while the host framework itself communicates, or that wait for long.

What the plugin sends ends in an error with the ranks that are gone. A host's own collectives (norms of
gradients, weights that ZeRO gathers, tensor parallelism, barriers of a checkpoint) end with an address at
best: a script that ends with such an error gets one line more, in the plugin's log.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from dct_plugin.transport import lost_ranks
from dct_plugin.transport.long_waits import LongWaits

logger = logging.getLogger("dct_plugin")

_COLLECTIVES = "torch.distributed.distributed_c10d"
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _ExceptHook:
    """``sys.excepthook`` while a job is watched.

    Attributes:
        jobs: Functions that return the optimizer steps of a job so far, the latest job's last.
    """

    def __init__(self) -> None:
        self.jobs: list[Callable[[], int | None]] = []
        self._previous: _Hook | None = None  # while this hook is not in the chain

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._previous is not None:
            self._previous(kind, error, trace)
        if self.jobs and dist.is_initialized() and lost_ranks.of_transport(error):
            what, group = _collective(trace)
            logger.error("dct: %s", lost_ranks.describe_failure(what, error, group, self.jobs[-1]()))

    def add(self, steps: Callable[[], int | None]) -> None:
        """Report the errors of one more job."""
        if self._previous is None:
            self._previous, sys.excepthook = sys.excepthook, self
        self.jobs.append(steps)

    def remove(self, steps: Callable[[], int | None]) -> None:
        """Undo :meth:`add`; after the last job the hook from before is put back, unless one is in front."""
        if steps in self.jobs:
            self.jobs.remove(steps)
        if not self.jobs and sys.excepthook is self and self._previous is not None:
            sys.excepthook, self._previous = self._previous, None


_excepthook = _ExceptHook()
_long_waits = LongWaits()
Job = TypeVar("Job")


def watch(job: Job, step_of: Callable[[Job], int]) -> Callable[[], None]:
    """Name the lost ranks when an error of the transport ends this process while ``job`` runs, and the calls
    of ranks that wait for each other for long.

    Args:
        job: The training; it is not kept alive.
        step_of: Returns the optimizer steps of the job so far.

    Returns:
        A function to call when the job ends; the end of ``job``'s life calls it at the latest.
    """
    lost_ranks.register_process()
    _long_waits.start()
    reference = weakref.ref(job, lambda _: end())

    def steps() -> int | None:
        alive = reference()
        return None if alive is None else step_of(alive)

    def end() -> None:
        _excepthook.remove(steps)
        if not _excepthook.jobs:
            _long_waits.stop()

    _excepthook.add(steps)
    return end


def _collective(trace: TracebackType | None) -> tuple[str, dist.ProcessGroup | None]:
    """Return the name of the collective of torch that raised an error, and its group."""
    what, group = "communication of the host", None
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_globals.get("__name__") == _COLLECTIVES and "group" in frame.f_locals:
            what, group = frame.f_code.co_name, frame.f_locals["group"]
    return what, group if isinstance(group, dist.ProcessGroup) else None
