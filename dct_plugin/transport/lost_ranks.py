"""Names of lost ranks, found through the key-value store in which the others report that they live.

The transport names an address at best. A rank that lost a connection, or waited in vain, reports itself in
the store; the ranks that do not report are the lost ones. A rank of a ring that still waits for its neighbour
does not report: the ranks on its own machine see that its process lives, and report for it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import processes
from ..console import logger
from ..errors import DCTError, DesyncError

#: Seconds in which ranks whose collective failed report that they live.
_REPORT = 3.0
#: Seconds after that in which ranks of other groups say whom they have found to be lost.
_VERDICT = 1.0
_LOST, _FAILED = "dct_plugin/lost", "dct_plugin/failed"
#: Seconds between two looks at a device that is waited for, and the share of a group's time limit that this
#: may take: at its end nccl's watchdog ends the process, and names no rank.
_PAUSE, _PATIENCE = 5e-5, 0.9
#: In place of the call of a rank that another one reports to live.
_UNKNOWN = "1"
_SILENT = (
    "gave no sign of life since: dead, stopped or stuck, or it has left the training loop: decide on all "
    "ranks; see their own output"
)


class Wait(NamedTuple):
    """A call in which this rank waits for others.

    Attributes:
        began: Time of its beginning (:func:`time.monotonic`).
        what: The call, in words.
        step: Optimizer steps so far, where there are any.
        group: Group of the call; None for all ranks.
    """

    began: float
    what: str
    step: int | None
    group: dist.ProcessGroup | None

    @property
    def call(self) -> str:
        return call_of(self.what, self.step)


#: The calls that run now, by thread.
waits: dict[int, Wait] = {}
#: The statement of a rank that ended with an error, as far as this rank has looked for one.
failure: list[str] = []
#: The errors that this rank has stated, in words.
own_failures: list[str] = []
#: Attribute of an error that was stated.
_STATED = "_dct_stated"


def register_process() -> None:
    """Tell the others which process this rank is; called again for every default process group."""
    with contextlib.suppress(Exception):  # a job without a store finds out later, or never
        default_store().set(key_of("process", dist.get_rank()), processes.this())
    rejoin()


def rejoin() -> None:
    """Clear what an earlier failure left in the store; called when this rank is connected to others again."""

    def clear() -> None:
        for key in (key_of("alive", dist.get_rank()), key_of("waits", dist.get_rank()), _LOST, _FAILED):
            default_store().delete_key(key)

    failure.clear()
    own_failures.clear()
    in_time(clear, _REPORT)


def state_failure(error: BaseException) -> None:
    """Log an error, and tell the others in the store that it ends this process. The statement of the first of
    several ranks counts. An error is stated once; never raises.
    """
    if hasattr(error, _STATED) or not dist.is_initialized():
        return
    setattr(error, _STATED, True)
    text = f"rank {dist.get_rank()} ended with {type(error).__name__}: {str(error).strip()[:500]}"
    own_failures.append(text)
    logger.error("dct: %s", text)
    in_time(lambda: default_store().compare_set(_FAILED, "", text), _REPORT)


def withdraw_failure() -> None:
    """Take back what :func:`state_failure` stated: this rank has caught the error, and goes on."""
    own_failures.clear()
    in_time(lambda: default_store().delete_key(_FAILED), _REPORT)


def look_for_failure(store: Any = None) -> None:
    """Look into the store, through this client, whether a rank has ended with an error."""
    failure[:] = filter(None, [stated(_FAILED, store)])


def await_device(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Wait for the messages that are queued on the current stream. nccl waits for a rank that is gone, and
    would let the host wait with it.

    Args:
        device: The device.
        group: Group of the messages; None for the default one. The wait ends before its time limit does.

    Raises:
        DesyncError: A rank ended with an error, which it has stated in the store.
        RuntimeError: The messages did not come in time: an error of the transport (:func:`of_transport`).
    """
    is_there = queued(device)
    if is_there():
        return
    until = time.monotonic() + (patience := _PATIENCE * time_limit(group, device.type))
    while not is_there():
        if failure:
            raise DesyncError(f"rank {dist.get_rank()}: {failure.pop()}; see its own output")
        if time.monotonic() > until:
            raise RuntimeError(f"Operation timed out after {patience:.0f} s")
        time.sleep(_PAUSE)


def received(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return a tensor that a collective makes, on the host; errors as of :func:`await_device`."""
    await_device(tensor.device, group)
    return tensor.cpu()


def time_limit(group: dist.ProcessGroup | None, device: str = "cpu") -> float:
    """Return the seconds that the group waits for its ranks, where a type of device sends messages."""
    known_group: Any = group if group is not None else dist.group.WORLD
    with contextlib.suppress(AttributeError, RuntimeError):
        limit: timedelta = known_group._get_backend(torch.device(device)).options._timeout
        return limit.total_seconds()
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def queued(device: torch.device) -> Callable[[], bool]:
    """Return a function that says whether all that is queued on the current stream is done."""
    if device.type != "cuda":
        return lambda: True
    return torch.cuda.current_stream(device).record_event().query


class reported:  # used as a statement
    """A context manager around a collective: an error of the transport becomes one that names ranks.

    Args:
        what: The collective, in words.
        group: Group of the collective; None for all ranks.
        step: Optimizer steps so far, where there are any.
        failed: Called after any error but ours: half a message may be left in the transport.

    Raises:
        DesyncError: Names the lost ranks. Only an error of the transport becomes this one.
    """

    # Not a generator: it is entered several times per message.
    __slots__ = ("_failed", "_group", "_outer", "_step", "_what")

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup | None = None,
        step: int | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        self._what, self._group, self._step, self._failed = what, group, step, failed
        self._outer: Wait | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._outer = waits.get(thread)
        waits[thread] = Wait(time.monotonic(), self._what, self._step, self._group)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._outer is None:
            waits.pop(threading.get_ident(), None)
        else:
            waits[threading.get_ident()] = self._outer
        if error is None:
            return
        if self._failed is not None and not isinstance(error, DCTError):
            self._failed()
        if of_transport(error):
            named = DesyncError(describe_failure(self._what, error, self._group, self._step))
            state_failure(named)
            raise named from error
        state_failure(error)


def of_transport(error: BaseException) -> bool:
    """Return whether an error is the transport's, and not one of memory, a kernel or an argument.

    gloo raises no type of its own: its messages name its source files, but for that of an operation that
    timed out. A kernel can time out too, so no other text about time counts.
    """
    if isinstance(error, DCTError) or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or text.startswith("Operation timed out")


def describe_failure(
    what: str, error: BaseException, group: dist.ProcessGroup | None = None, step: int | None = None
) -> str:
    """Return one line on a collective that failed with ``error``; arguments as for :class:`reported`.

    Takes seconds, and never raises.
    """
    own = dist.get_rank()
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # After a time limit a process that lives need not be well; those that are report by themselves.
    call = call_of(what, step)
    calls = {own: call}

    def look_for_lost() -> list[int]:
        lost = _lost(ranks, own, "imed out" not in first, calls)
        if lost or len(ranks) == dist.get_world_size():
            return lost
        with contextlib.suppress(Exception):  # the rank that serves the store may have ended
            return _verdict_of_others(_VERDICT)
        return []

    lost = in_time(look_for_lost, _REPORT + 2.0)
    others = {rank: other for rank, other in calls.items() if other not in (_UNKNOWN, call)}
    if lost is None:
        who = (
            "nobody can be asked, the key-value store does not answer: rank 0, which serves it unless the "
            "launcher does, has ended or is stopped; see its own output"
        )
    elif lost:
        who = f"rank(s) {lost} {_SILENT}"
    elif others:
        named = ", ".join(f"rank {rank} in the {other}" for rank, other in others.items())
        who = f"others failed in another call ({named}); decide on all ranks which calls they make"
    else:
        who = "the other ranks report the same; see their own output"
    return f"rank {own}: the {call} failed: {who} ({first})"


def call_of(what: str, step: int | None) -> str:
    """Return the name of a collective for messages."""
    return what if step is None else f"{what} in step {step}"


def found_lost() -> str:
    """Return what another rank has found out about lost ranks, as the end of a sentence; empty if nothing."""
    lost = in_time(lambda: _verdict_of_others(0.0), _REPORT)
    return f"; rank(s) {lost} {_SILENT}" if lost else ""


def in_time(function: Callable[[], Any], seconds: float) -> Any:
    """Return the result of ``function``, which uses the store; None if it fails or takes longer."""
    answers: list[Any] = []

    def call() -> None:
        with contextlib.suppress(Exception):
            answers.append(function())

    # In a thread: the rank that serves the store may be the lost one.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _lost(ranks: Sequence[int], own: int, look: bool, calls: dict[int, str]) -> list[int]:
    """Report this rank, and return the ranks that do not report; ``look`` for processes on this machine.

    ``calls`` has the call that failed on this rank, and gets those of the others, by rank.
    """
    store = default_store()
    store.set(key_of("alive", own), calls[own])
    began = time.monotonic()
    while time.monotonic() < began + _REPORT:
        # Not at once: a dying process closes its connections before it is gone.
        if look and time.monotonic() > began + _REPORT / 2:
            look = False
            for rank in set(ranks) - calls.keys():
                process = stated(key_of("process", rank))
                if process is not None and processes.lives(process):
                    store.compare_set(key_of("alive", rank), "", _UNKNOWN)
        # Ranks of other groups may wait for a rank of this one: the verdict holds for them, too.
        if lost := _verdict_of_others(0.0):
            return lost
        for rank in set(ranks) - calls.keys():
            if (call := stated(key_of("alive", rank))) is not None:
                calls[rank] = call
        time.sleep(0.05)
    if absent := sorted(set(ranks) - calls.keys()):
        store.set(_LOST, json.dumps(absent))
    return absent


def _verdict_of_others(seconds: float) -> list[int]:
    """Return the ranks that others have found to be lost, or will have within so many seconds."""
    until = time.monotonic() + seconds
    while (lost := stated(_LOST)) is None and time.monotonic() < until:
        time.sleep(0.05)
    return [] if lost is None else sorted(json.loads(lost))


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def key_of(what: str, rank: int) -> str:
    """Return the key under which a rank states something: ``alive``, ``heard``, ``waits``, ``process``,
    ``machine``.
    """
    return f"dct_plugin/{what}/{rank}"


def stated(key: str, store: Any = None) -> str | None:
    """Return what stands in the store under a key; None if there is nothing. ``store`` is a client of it."""
    store = default_store() if store is None else store
    return store.get(key).decode() if store.check([key]) else None
