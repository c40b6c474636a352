"""The report on lost ranks takes sys.excepthook while a job needs it, and puts it back."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from support.deferred_backend import DeferredBackend
from support.processes import run

pytest.importorskip("triton", reason="the looped transport is beside the counts of Triton's kernels")

from benchmarks.host_work import LoopedPeers
from dct_plugin import DesyncError
from dct_plugin.config import DataParallelConfig, KernelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.integrations.host import lost_peers
from dct_plugin.kernels import register_backend
from dct_plugin.transport import lost_ranks


@pytest.fixture(autouse=True)
def _a_hook_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of other tests in this process may have left theirs behind another hook."""
    monkeypatch.setattr(lost_peers, "_excepthook", type(lost_peers._excepthook)())


class Job:
    step = 3


def watched() -> Job:
    job = Job()
    lost_peers.watch(job, lambda job: job.step)
    return job


def test_the_excepthook_is_put_back_when_the_last_job_is_gone() -> None:
    before, first, second = sys.excepthook, watched(), watched()
    del first
    gc.collect()
    assert sys.excepthook is not before
    del second
    gc.collect()
    assert sys.excepthook is before


def test_a_hook_of_somebody_else_in_front_stays_and_is_not_called_in_a_circle() -> None:
    before, calls, job = sys.excepthook, [], watched()
    ours = sys.excepthook

    def other(*error: object) -> None:
        calls.append(error)
        assert len(calls) < 3
        ours(*error)  # type: ignore[arg-type]

    sys.excepthook = other
    del job
    gc.collect()
    again = watched()
    try:
        assert sys.excepthook is other
        sys.excepthook(ValueError, ValueError("expected"), None)
        assert len(calls) == 1
    finally:
        sys.excepthook = ours
        del again
        gc.collect()
    assert sys.excepthook is before


class _WatchedPeers(LoopedPeers):
    """Peers whose waits are those of the process group."""

    def guard(self, what: str, step: int | None, failed: Callable[[], None]) -> AbstractContextManager[None]:
        return lost_ranks.reported(what, None, step, failed)


def _waits_for_a_failed_rank(rank: int, world_size: int) -> str:
    """Rank 1 ends with an error. On the device of rank 0 nothing arrives any more, as with nccl."""
    lost_peers.INTERVAL = 0.05
    job, store = watched(), lost_ranks.default_store()
    if rank:
        store.wait(["rank 0 waits"])
        sys.excepthook(ValueError, ValueError("no such file"), None)
        store.wait(["rank 0 is done"])
        return ""
    register_backend("deferred", DeferredBackend)
    reducer = GradientReducer(
        DataParallelConfig(sparsity=0.9, feedback="local"),
        _WatchedPeers(0, range(2)),
        kernels=KernelConfig(backend="deferred"),
    )
    for step in range(3):
        if step == 2:  # sizes are known by now: messages are on their way while the host goes on
            lost_ranks.queued = lambda device: lambda: False
        reducer.begin([("weight", torch.randn(4096))]).finish()
        if step < 2:
            reducer.finish()
            reducer.end_step()
    store.set("rank 0 waits", "")
    with pytest.raises(DesyncError) as ended:
        reducer.finish()
    store.set("rank 0 is done", "")
    del job
    return str(ended.value)


@pytest.mark.slow
def test_a_rank_that_waits_for_a_device_hears_of_one_that_ended_with_an_error() -> None:
    heard, _ = run(2, _waits_for_a_failed_rank)
    assert heard == "rank 0: rank 1 ended with ValueError: no such file; see its own output"
