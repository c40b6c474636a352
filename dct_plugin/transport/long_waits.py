"""Warnings about ranks that wait for each other for long, each in another call.

A rank that leaves the training loop alone makes other calls than the rest. Then all wait for the time limit
of the process group, which is half an hour. Each rank says in the key-value store in which call it waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref

import torch.distributed as dist

from . import lost_ranks

logger = logging.getLogger("dct_plugin")

#: Seconds of a wait after which it is reported, between two looks at it, and for the reports of other ranks.
PATIENCE, INTERVAL, ANSWERS = 120.0, 5.0, 10.0


class LongWaits:
    """Warns once of every call in which this rank waits for longer than :data:`PATIENCE`.

    A thread looks at :data:`.lost_ranks.waits` between :meth:`start` and :meth:`stop`.
    """

    def __init__(self) -> None:
        self._stop: weakref.finalize[[threading.Thread, threading.Event], LongWaits] | None = None

    def start(self) -> None:
        """Begin to look; the end of the process calls :meth:`stop`."""
        if self._stop is None or not self._stop.alive:
            ended = threading.Event()
            thread = threading.Thread(target=_look, args=(ended,), name="dct long waits", daemon=True)
            thread.start()
            self._stop = weakref.finalize(self, _join, thread, ended)

    def stop(self) -> None:
        """End the thread; takes at most a second."""
        if self._stop is not None:
            self._stop()


def _join(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    thread.join(1.0)


def _look(ended: threading.Event) -> None:
    reported: lost_ranks.Wait | None = None
    while not ended.wait(INTERVAL):
        longest = min(list(lost_ranks.waits.values()), key=lambda wait: wait.began, default=None)
        if longest is not None and time.monotonic() < longest.began + PATIENCE:
            longest = None
        if longest == reported:
            continue
        with contextlib.suppress(Exception):  # a store that is gone, or a process group that is destroyed
            if longest is None:
                lost_ranks.default_store().delete_key(lost_ranks.key_of("waits", dist.get_rank()))
            else:
                _report(longest, ended)
        reported = longest


def _report(wait: lost_ranks.Wait, ended: threading.Event) -> None:
    """Say in the store what this rank waits for, and warn of what the others do."""
    own = dist.get_rank()
    lost_ranks.default_store().set(lost_ranks.key_of("waits", own), wait.call)
    ranks = dist.get_process_group_ranks(wait.group if wait.group is not None else dist.group.WORLD)
    calls: dict[int, str] = {}
    until = time.monotonic() + ANSWERS
    while len(calls) < len(ranks) - 1 and time.monotonic() < until and not ended.wait(INTERVAL / 10):
        for rank in set(ranks) - {own} - calls.keys():
            if (call := lost_ranks.stated(lost_ranks.key_of("waits", rank))) is not None:
                calls[rank] = call
    if wait not in lost_ranks.waits.values():
        return
    others = [
        f"rank {rank} is in the {calls[rank]}" if rank in calls else f"rank {rank} is in no call of dct"
        for rank in ranks
        if rank != own and calls.get(rank) != wait.call
    ]
    if others:
        logger.warning(
            "dct: rank %d has waited for %.0f s in the %s; meanwhile %s. A rank in another call is slow or "
            "stuck, or it has left the training loop: decide on all ranks",
            own,
            time.monotonic() - wait.began,
            wait.call,
            ", ".join(others[:5]),
        )
