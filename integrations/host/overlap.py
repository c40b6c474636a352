"""Overlap of reductions with the backward pass, for every host. :func:`overlap_of` chooses the class.

======================  =========================================================================
:class:`Overlap`        No overlap: a reduction runs when it is submitted.
:class:`ThreadOverlap`  CPU: a thread runs reductions in order, over a process group of its own.
:class:`InlineOverlap`  CPU with one core for each rank: messages leave within the backward pass.
:class:`StreamOverlap`  CUDA: the host's thread queues reductions on a stream of their own.
======================  =========================================================================
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dct_plugin import processes
from dct_plugin.data_parallel.reducer import GradientReducer, Reduction
from dct_plugin.host_traffic import own_traffic
from dct_plugin.metrics import Record

Work = Callable[[], None]


def overlap_of(
    reducer: GradientReducer,
    *,
    wanted: bool = True,
    inline: bool = False,
    own_stream: bool = True,
    thread: str = "dct gradients",
) -> Overlap:
    """Choose how the reductions of ``reducer`` run beside the backward pass; a collective of its ranks.

    Args:
        reducer: Its exchange gets a process group of its own where a thread uses it.
        wanted: False for no overlap.
        inline: Whether the host calls :meth:`Overlap.advance` while gradients become available.
        own_stream: On CUDA, whether reductions get a stream; False where the host submits on a stream of its
            own.
        thread: The thread's name.
    """
    if reducer.device.type == "cuda":
        return StreamOverlap(reducer) if wanted and own_stream else Overlap(reducer)
    if reducer.device.type != "cpu" or not wanted:
        return Overlap(reducer)
    peers = reducer.exchange.peers
    everyone = peers.group if reducer.nodes is None else reducer.group
    if not (inline and one_core_each(everyone)):
        own = group_of_own(peers.group)
        if own is not None:
            peers.group = own
            return ThreadOverlap(reducer, thread)
    return InlineOverlap(reducer) if inline else Overlap(reducer)


class PendingReduction:
    """A reduction that was submitted."""

    def __init__(self, wait: Work) -> None:
        self._wait = wait

    def wait(self, *arguments: Any) -> None:
        """Return when the result can be used on the current stream; raise the error of the reduction."""
        self._wait()


class Overlap:
    """Runs the reductions of one reducer in the order of the calls; this class runs each at once.

    For every bucket a host calls :meth:`submit`, or :meth:`advance` any number of times and then
    :meth:`finish`. The buckets come in the same order on all ranks. The host calls :meth:`wait` before it
    uses the results, and that raises the errors.

    Args:
        reducer: The reducer of the buckets. Its ``deferred`` is set: see :meth:`wait`.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self.reducer = reducer
        reducer.deferred = True

    def submit(self, work: Work, done: Work | None = None) -> PendingReduction:
        """Run ``work()``, which reduces a bucket, and then ``done()``, also after an error in a thread."""
        work()
        if done is not None:
            done()
        return PendingReduction(self.wait)

    def advance(self, reduction: Reduction, available: int) -> None:
        """Send what the first ``available`` tensors of a reduction allow; the next ones do not exist yet."""

    def finish(self, reduction: Reduction, done: Work, *, last: bool) -> PendingReduction:
        """Complete a reduction, whose tensors are all available, and call ``done()``.

        Args:
            reduction, done: See :meth:`advance` and :meth:`submit`.
            last: Whether it is the last one of the backward pass.
        """
        return self.submit(reduction.finish, done)

    def wait(self) -> None:
        """Return when the results of all that was submitted can be used on the current stream.

        Raises:
            DesyncError, PayloadError: See :meth:`~dct_plugin.data_parallel.GradientReducer.all_reduce`.
        """
        self.reducer.finish()

    def record_hidden_time(self) -> None:
        """Record the time since the last call in which reductions ran and the host did not wait for them;
        at the end of a backward pass.
        """

    def close(self) -> None:
        """Release the thread, if there is one."""


class InlineOverlap(Overlap):
    """Sends messages within the backward pass, and collects the answers with the next bucket.

    A thread would take the one core of this rank, or of another, and give it back too late.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(reducer)
        self._open: tuple[Reduction, Work] | None = None

    def submit(self, work: Work, done: Work | None = None) -> PendingReduction:
        """See :meth:`Overlap.submit`."""
        self._complete()
        return super().submit(work, done)

    def advance(self, reduction: Reduction, available: int) -> None:
        """See :meth:`Overlap.advance`."""
        self._complete()
        reduction.advance(available, lambda: False)
        self.reducer.exchange.progress()

    def finish(self, reduction: Reduction, done: Work, *, last: bool) -> PendingReduction:
        """See :meth:`Overlap.finish`; the answers are collected later, but for the last reduction: with
        ``static_graph`` DDP hands over all buckets when the pass is over, and then waits for them.
        """
        self.advance(reduction, sys.maxsize)
        self._open = reduction, done
        if last:
            self._complete()
        return PendingReduction(self.wait)

    def wait(self) -> None:
        """See :meth:`Overlap.wait`."""
        self._complete()
        super().wait()

    def _complete(self) -> None:
        if self._open is not None:
            (reduction, done), self._open = self._open, None
            reduction.finish()
            done()


class StreamOverlap(Overlap):
    """Queues reductions on a CUDA stream from the host's own thread.

    Kernels of a second thread would come in between those of the model's other communication, in an order
    that differs from rank to rank.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(reducer)
        self._stream = torch.cuda.Stream(reducer.device)

    def submit(self, work: Work, done: Work | None = None) -> PendingReduction:
        """See :meth:`Overlap.submit`; both run behind what the current stream holds."""
        with self._behind():
            return super().submit(work, done)

    def wait(self) -> None:
        """See :meth:`Overlap.wait`."""
        with self._behind():
            self.reducer.finish()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def _behind(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


class ThreadOverlap(Overlap):
    """Runs reductions one after the other in a thread.

    After an error all later reductions have the same error. The thread is a daemon: a rank that fails
    elsewhere can end while the thread still waits for other ranks, so that its sockets close. It ends with
    this object, and is waited for: an interpreter that ends while torch tidies up in a thread aborts.
    """

    def __init__(self, reducer: GradientReducer, name: str) -> None:
        super().__init__(reducer)
        reducer.deferred = False  # the host's thread must not finish what this one works on
        self._pending: list[PendingReduction] = []
        self._times = _Times()
        self._tasks: _Tasks = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._tasks, self._times), name=name, daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _end, thread, self._tasks)

    def submit(self, work: Work, done: Work | None = None) -> PendingReduction:
        """See :meth:`Overlap.submit`; ``done()`` runs in the thread."""
        result: Future[None] = Future()
        if done is not None:
            result.add_done_callback(lambda _: done())
        self._tasks.put((result, work))
        pending = PendingReduction(partial(_result_of, result, self._times))
        self._pending.append(pending)
        return pending

    def advance(self, reduction: Reduction, available: int) -> None:
        """See :meth:`Overlap.advance`; answers are collected as long as nothing else is queued."""
        self.submit(partial(reduction.advance, available, self._tasks.empty))

    def wait(self) -> None:
        """See :meth:`Overlap.wait`."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.wait()

    def record_hidden_time(self) -> None:
        """See :meth:`Overlap.record_hidden_time`."""
        if self.reducer.metrics is not None:
            record = Record("gradient", tensors=0, hidden_ms=self._times.hidden_ms())
            self.reducer.metrics.record(record)

    def close(self) -> None:
        """End the thread behind what is queued."""
        self._stop()


#: Seconds that a thread gets to end.
_PATIENCE = 1.0
_Tasks = queue.SimpleQueue[tuple[Future[None], Work] | None]


class _Times:
    """Seconds in which the thread worked, and in which the host waited for it."""

    worked = 0.0
    waited = 0.0

    def hidden_ms(self) -> float:
        hidden = max(self.worked - self.waited, 0.0)
        self.worked = self.waited = 0.0
        return 1e3 * hidden


def _end(thread: threading.Thread, tasks: _Tasks) -> None:
    """End a thread behind what is queued; one that still waits for other ranks is left to itself."""
    tasks.put(None)
    if thread is not threading.current_thread():  # which may drop the last reference
        thread.join(_PATIENCE)


def _result_of(result: Future[None], times: _Times) -> None:
    began = time.perf_counter()
    try:
        result.result()
    finally:
        times.waited += time.perf_counter() - began


def _serve(tasks: _Tasks, times: _Times) -> None:
    failure: BaseException | None = None
    torch.set_grad_enabled(False)
    while (task := tasks.get()) is not None:
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
            times.worked += time.perf_counter() - began
            result.set_result(None)
        del task, result, work  # the host may reuse what they hold


@own_traffic(recorded=False)
def group_of_own(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Make a gloo group of the same ranks and time limit for a thread; a collective of those ranks.

    Two threads must not share a group: their collectives would meet other ones on other ranks. Returns None
    where the ranks belong to different numbers of groups: torch names a group that a part of all ranks makes
    after that number.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    count = len(dist.distributed_c10d._world.pg_names)
    counts = torch.tensor([count, -count])
    dist.all_reduce(counts, dist.ReduceOp.MAX, group)
    if counts[0] != -counts[1]:
        return None
    limit = getattr(group._get_backend(torch.device("cpu")).options, "_timeout", None)
    members = dist.get_process_group_ranks(group)
    return dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=True)


@own_traffic(recorded=False)
def one_core_each(group: dist.ProcessGroup | None) -> bool:
    """Return whether the ranks on every machine may use as many cores as they are; a collective of a gloo
    group, with the same result on all ranks.

    With more cores a thread has a core of its own. With fewer there is always a rank that can use a core
    while another one waits.
    """
    cores = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    )
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (processes.machine(), cores), group=group)
    ranks = Counter(machine for machine, _ in found)
    distinct = Counter(machine for machine, _ in {(m, core) for m, theirs in found for core in theirs})
    return ranks == distinct
