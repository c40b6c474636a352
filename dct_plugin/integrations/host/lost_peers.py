"""Reports of ranks that are lost while the host framework itself communicates, or that wait for long.

What the plugin sends ends in an error with the ranks that are gone. A host's own collectives (norms of
gradients, weights that ZeRO gathers, tensor parallelism, barriers of a checkpoint) end with an address at
best: a script that ends with such an error gets one line more, in the plugin's log.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from dct_plugin.console import logger
from dct_plugin.transport import lost_ranks

#: Seconds of a wait after which it is reported, between two looks at it, and for the reports of other ranks.
PATIENCE, INTERVAL, ANSWERS = 120.0, 5.0, 10.0
#: Seconds that the end of a job waits for the answer of a store to the thread that watches.
_LAST_ANSWER = 10.0
_COLLECTIVES = "torch.distributed.distributed_c10d"
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _ExceptHook:
    """``sys.excepthook`` while a job is watched, with a thread that watches waits.

    Attributes:
        jobs: Functions that return the optimizer steps of a job so far, the latest job's last.
        waits: The thread; None before the first job.
    """

    def __init__(self) -> None:
        self.jobs: list[Callable[[], int | None]] = []
        self.waits: LongWaits | None = None
        self._previous: _Hook | None = None  # while this hook is not in the chain

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._previous is not None:
            self._previous(kind, error, trace)
        if not self.jobs or not dist.is_initialized():
            return
        lost_ranks.state_failure(error)
        if lost_ranks.of_transport(error):
            what, group = _collective(trace)
            logger.error("dct: %s", lost_ranks.describe_failure(what, error, group, self.jobs[-1]()))

    def add(self, steps: Callable[[], int | None]) -> None:
        """Report the errors of one more job."""
        if self._previous is None:
            self._previous, sys.excepthook = sys.excepthook, self
        if self.waits is None:
            self.waits = LongWaits(lambda: self.jobs[-1]())
            self.waits.start()
        self.jobs.append(steps)

    def remove(self, steps: Callable[[], int | None]) -> None:
        """Undo :meth:`add`; after the last job the hook from before is put back, unless one is in front."""
        if self.jobs == [steps] and self.waits is not None:  # before: it asks for the steps
            waits, self.waits = self.waits, None
            waits.stop()
        if steps in self.jobs:
            self.jobs.remove(steps)
        if not self.jobs and sys.excepthook is self and self._previous is not None:
            sys.excepthook, self._previous = self._previous, None


_excepthook = _ExceptHook()
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
    reference = weakref.ref(job, lambda _: _excepthook.remove(steps))

    def steps() -> int | None:
        alive = reference()
        return None if alive is None else step_of(alive)

    _excepthook.add(steps)
    return functools.partial(_excepthook.remove, steps)


def _collective(trace: TracebackType | None) -> tuple[str, dist.ProcessGroup | None]:
    """Return the name of the collective of torch that raised an error, and its group."""
    what, group = "communication of the host", None
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_globals.get("__name__") == _COLLECTIVES and "group" in frame.f_locals:
            what, group = frame.f_code.co_name, frame.f_locals["group"]
    return what, group if isinstance(group, dist.ProcessGroup) else None


class LongWaits(threading.Thread):
    """Warns once of every call in which this rank waits for longer than :data:`PATIENCE`.

    A rank that leaves the training loop alone makes other calls than the rest. Then all wait for the time
    limit of the process group, which is half an hour. Each rank says in the key-value store in which call it
    waits, and every :data:`INTERVAL` that it lives, and in which step. It has a client of the store of its
    own: the main thread may wait with the other one. Where all ranks wait, each makes a few requests; where
    one does not, a single rank of those in a call looks at all others, and reports.

    Args:
        step_of: Returns the optimizer steps so far.
    """

    def __init__(self, step_of: Callable[[], int | None]) -> None:
        super().__init__(name="dct long waits", daemon=True)
        self._step_of, self._ended = step_of, threading.Event()
        self._client: tuple[Any, Any] = (None, None)
        """The default store, and the client of this thread."""
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, and wait for it: a thread that comes back from torch's C++ code while Python ends
        aborts the process. The end of the process calls it, too.
        """
        atexit.unregister(self.stop)
        self._ended.set()
        if threading.current_thread() is not self:  # which may collect the last job as garbage
            self.join(_LAST_ANSWER)

    @property
    def _store(self) -> Any:
        """A client of the default store that no other thread uses; before torch 2.8 the default one."""
        default = lost_ranks.default_store()
        if self._client[0] is not default:
            self._client = (default, default.clone() if hasattr(default, "clone") else default)
        return self._client[1]

    def run(self) -> None:
        reported: lost_ranks.Wait | None = None
        failed_in: list[int | None] = []
        while not self._ended.wait(INTERVAL):
            step = self._step_of()
            if lost_ranks.own_failures and failed_in not in ([], [step]):  # its error was caught
                lost_ranks.withdraw_failure()
            failed_in = [step] if lost_ranks.own_failures else []
            with contextlib.suppress(Exception):
                key = lost_ranks.key_of("heard", dist.get_rank())
                self._store.set(key, f"{time.monotonic()} {step}")
            longest = min(list(lost_ranks.waits.values()), key=lambda wait: wait.began, default=None)
            if longest is not None and time.monotonic() > longest.began + INTERVAL:
                with contextlib.suppress(Exception):
                    lost_ranks.look_for_failure(self._store)
            if longest is not None and time.monotonic() < longest.began + PATIENCE:
                longest = None
            if longest == reported:
                continue
            with contextlib.suppress(Exception):  # a store that is gone, or a process group that is destroyed
                if reported is not None:
                    self._retract(reported)
                if longest is not None:
                    self._report(longest)
            reported = longest

    def _retract(self, wait: lost_ranks.Wait) -> None:
        """Delete what the store has of a wait that is over."""
        own = dist.get_rank()
        self._store.delete_key(lost_ranks.key_of("waits", own))
        if lost_ranks.stated(claim := _claim(wait), self._store) == str(own):
            self._store.delete_key(claim)

    def _report(self, wait: lost_ranks.Wait) -> None:
        """Say in the store what this rank waits for, and warn of what the others do."""
        own, store = dist.get_rank(), self._store
        ranks = dist.get_process_group_ranks(wait.group if wait.group is not None else dist.group.WORLD)
        keys = {rank: lost_ranks.key_of("waits", rank) for rank in ranks}
        store.set(keys[own], wait.call)
        until, all_wait = time.monotonic() + ANSWERS, False
        while not all_wait and time.monotonic() < until and not self._ended.wait(INTERVAL / 5):
            all_wait = store.check(list(keys.values()))
        if wait not in lost_ranks.waits.values():
            return
        if all_wait and store.has_extended_api():
            values = store.multi_get(list(keys.values()))
            calls = {rank: value.decode() for rank, value in zip(ranks, values, strict=True)}
            if set(calls.values()) == {wait.call}:
                return
        if store.compare_set(_claim(wait), "", str(own)).decode() != str(own):
            return  # another rank in this call reports
        found = {rank: lost_ranks.stated(key, store) for rank, key in keys.items()}
        calls = {rank: call for rank, call in found.items() if call is not None}
        others = self._describe_absent([rank for rank in ranks if rank not in calls])
        if wait not in lost_ranks.waits.values():
            return
        others += [f"rank {rank} is in the {call}" for rank, call in calls.items() if call != wait.call]
        if others:
            logger.warning(
                f"dct: rank {own} has waited for {time.monotonic() - wait.began:.0f} s in the {wait.call}; "
                f"meanwhile {', '.join(others[:5])}. A rank in another call is slow or stuck, or it has left "
                "the training loop: decide on all ranks"
            )

    def _describe_absent(self, ranks: list[int]) -> list[str]:
        """Return, in words, whether ranks that are in no call live, and their last steps."""
        keys, store, others = {rank: lost_ranks.key_of("heard", rank) for rank in ranks}, self._store, []
        heard = {rank: lost_ranks.stated(key, store) for rank, key in keys.items()}
        if ranks:
            self._ended.wait(2 * INTERVAL)
        for rank, key in keys.items():
            now = lost_ranks.stated(key, store)
            state = "gives no sign of life" if now and now == heard[rank] else "is in no call of dct"
            others.append(f"rank {rank} {state}" + (f" (last step {now.split()[1]})" if now else ""))
        return others


def _claim(wait: lost_ranks.Wait) -> str:
    """Return the key under which one of the ranks that wait in a call says that it reports."""
    first = 0 if wait.group is None else dist.get_process_group_ranks(wait.group)[0]
    return f"dct_plugin/reports/{first}/{wait.call}"
