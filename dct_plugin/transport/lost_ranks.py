"""Who is gone: ranks whose collective failed tell each other through the key-value store that they live.

The transport names an address at best. Whoever lost a connection to a dead rank, or waited for it in vain,
comes here, and who does not is the one. A rank of a ring that still waits for its neighbour does not come: of
those on its own machine a rank can see that they live.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from .. import processes
from ..errors import DCTError, DesyncError

#: Seconds in which ranks whose connections broke tell each other that they live.
_ROLL_CALL = 3.0
_LOST = "dct_plugin/lost"


def introduce() -> None:
    """Say which process this rank is; again for every default process group."""
    with contextlib.suppress(Exception):  # a job without a store finds out later, or never
        _store().set(_process_key(dist.get_rank()), processes.this())
    rejoin()


def rejoin() -> None:
    """Clear what an earlier failure left in the store; called when this rank is connected to others again."""

    def clear() -> None:
        store = _store()
        store.delete_key(_alive_key(dist.get_rank()))
        store.delete_key(_LOST)

    in_time(clear, _ROLL_CALL)


class transport:  # used as a statement
    """Around a collective: what the transport raises becomes an error that names ranks.

    Args:
        what: The collective, in words.
        group: Whose collective it is; None for that of all ranks.
        step: Optimizer steps so far, where there are any.
        failed: Called then.

    Raises:
        DesyncError: With the ranks that are gone.
    """

    # Not a generator: it is entered several times per message.
    __slots__ = ("_failed", "_group", "_step", "_what")

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup | None = None,
        step: int | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        self._what, self._group, self._step, self._failed = what, group, step, failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, DCTError):
            if self._failed is not None:
                self._failed()
            raise DesyncError(after_failure(self._what, error, self._group, self._step)) from error


def after_failure(
    what: str, error: BaseException, group: dist.ProcessGroup | None = None, step: int | None = None
) -> str:
    """One line on a collective that failed with ``error``, as for :func:`transport`; takes seconds, and never
    raises.
    """
    own = dist.get_rank()
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    at = "" if step is None else f" in step {step}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # After a time limit who lives need not be well: all come here by themselves, but for those that are not.
    lost = in_time(lambda: _lost(ranks, own, vouch="imed out" not in first), _ROLL_CALL + 2.0)
    if lost is None:
        who = (
            "nobody can be asked, the key-value store does not answer: rank 0, which serves it unless the "
            "launcher does, has ended or is stopped; see its own output"
        )
    elif lost:
        who = f"rank(s) {lost} gave no sign of life since: dead, stopped or stuck; see their own output"
    else:
        who = "the other ranks report the same; see their own output"
    return f"rank {own}: the {what}{at} failed: {who} ({first})"


def in_time(function: Callable[[], Any], seconds: float) -> Any:
    """The result of ``function``, which asks the store; None if that fails, or takes longer."""
    answers: list[Any] = []
    ended = threading.Event()

    def call() -> None:
        with contextlib.suppress(Exception):
            answers.append(function())
        ended.set()

    # In a thread: whoever serves the store may be the one that is gone, or stopped.
    threading.Thread(target=call, daemon=True).start()
    ended.wait(seconds)
    return answers[0] if answers else None


def _lost(ranks: Sequence[int], own: int, vouch: bool) -> list[int]:
    store, heard = _store(), {own}
    store.set(_alive_key(own), "1")
    began = time.monotonic()
    while time.monotonic() < began + _ROLL_CALL:
        # Not at once: who is dying closes its connections before it is gone.
        if vouch and time.monotonic() > began + _ROLL_CALL / 2:
            vouch = False
            for rank in set(ranks) - heard:
                key = _process_key(rank)
                if store.check([key]) and processes.lives(store.get(key).decode()):
                    store.set(_alive_key(rank), "1")
        # Members of this group may wait for one that waits for a rank of another: they are told.
        if store.check([_LOST]):
            return sorted(json.loads(store.get(_LOST)))
        heard.update(r for r in ranks if r not in heard and store.check([_alive_key(r)]))
        time.sleep(0.05)
    if absent := sorted(set(ranks) - heard):
        store.set(_LOST, json.dumps(absent))
    return absent


def _alive_key(rank: int) -> str:
    return f"dct_plugin/alive/{rank}"


def _process_key(rank: int) -> str:
    return f"dct_plugin/process/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
