"""The report on lost ranks takes sys.excepthook while a job needs it, and puts it back."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.deferred_backend import DeferredBackend
from support.processes import logged, run

pytest.importorskip("triton", reason="the looped transport is beside the counts of Triton's kernels")

from benchmarks.host_work import LoopedPeers, LoopedTransport
from dct_plugin import DesyncError
from dct_plugin.checkpoint import mean_residuals
from dct_plugin.config import DataParallelConfig, KernelConfig
from dct_plugin.config.data_parallel import VerifyConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.autotune.measurements import largest
from dct_plugin.data_parallel.exact_updates import GatherChoice
from dct_plugin.data_parallel.step_ahead.residual_coefficients import INTERVAL
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.integrations.host import lost_peers
from dct_plugin.integrations.host.replica_checksums import ReplicaChecksums
from dct_plugin.integrations.host.steps import PoisonedSteps
from dct_plugin.kernels import register_backend
from dct_plugin.model_parallel.fixed import number_of
from dct_plugin.recommender.links.team import free_port
from dct_plugin.transport import lost_ranks
from dct_plugin.transport.base import Announced, Header, Transport
from dct_plugin.transport.exchange import Exchange


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


def _reads_before_anything_arrives(rank: int, world_size: int) -> list[str]:
    """Rank 1 fails in a reduction, and catches its error. What rank 0 waits for is on no device."""
    lost_peers.INTERVAL = 0.05
    job, store = watched(), lost_ranks.default_store()
    alone = [dist.new_group([own]) for own in range(world_size)][rank]
    exchange = Exchange(alone, torch.device("cpu"))
    exchange.agree(0)
    if rank:
        reducer = GradientReducer(DataParallelConfig(sparsity=0.9, feedback="local"), alone)
        reducer.group.exchange.agree(0)
        reducer.add_ons.before_compression = None  # type: ignore[method-assign,assignment]
        for _ in range(3):
            store.wait(["rank 0 waits"])
            store.delete_key("rank 0 waits")
            with pytest.raises(TypeError):
                reducer.begin([("weight", torch.randn(4096))]).finish()
            store.wait(["rank 0 heard"])
            store.delete_key("rank 0 heard")
        job.step += 1
        while lost_ranks.own_failures:
            time.sleep(0.05)
        store.set("taken back", str(lost_ranks.stated(lost_ranks._FAILED)))
        return []
    message, heard = torch.zeros(8, dtype=torch.uint8), []
    reads = (lambda: exchange.agree(0), lambda: exchange.all_to_all([message]), lambda: number_of(message))
    for arrived, read in zip(([False], [True, False], [False]), reads, strict=True):
        exchange._open().queues = len(arrived) > 1  # as nccl does, which returns before messages are there
        answers = iter(arrived)  # headers are there first, then messages
        lost_ranks.queued = lambda device, answers=answers: (lambda answer: lambda: answer)(next(answers))
        store.set("rank 0 waits", "")
        with pytest.raises(DesyncError) as ended:
            read()
        lost_ranks.rejoin()
        store.set("rank 0 heard", "")
        heard.append(str(ended.value))
    store.wait(["taken back"])
    del job
    return [*heard, store.get("taken back").decode()]


@pytest.mark.slow
def test_every_read_from_a_device_hears_of_a_failed_rank_and_an_error_that_was_caught_is_taken_back() -> None:
    """Before the rank ends: the end of its process group may wait for what it has queued."""
    (*heard, stated), _ = run(2, _reads_before_anything_arrives, DCT_TRANSPORT="gloo")
    assert len(heard) == 3
    assert all(text.startswith("rank 0: rank 1 ended with TypeError: 'NoneType'") for text in heard)
    assert stated == "None"


def _reads_what_never_arrives(rank: int, world_size: int) -> list[str]:
    """Read what the ranks have made together: nothing arrives, and another rank has ended with an error."""
    register_backend("deferred", DeferredBackend)

    def reducer(backend: str = "auto", **settings: Any) -> GradientReducer:
        config = DataParallelConfig(sparsity=0.9, **{"feedback": "local", **settings})
        return GradientReducer(config, kernels=KernelConfig(backend=backend))

    def train(reducer: GradientReducer) -> None:
        for _ in range(INTERVAL + 1):
            reducer.all_reduce([("weight", torch.randn(4096))])
            reducer.end_step()

    warm_up, ahead = reducer("deferred", warmup_steps=5), reducer(feedback="step_ahead")
    warm_up.all_reduce([("weight", torch.randn(4096))])
    weight = torch.nn.Parameter(torch.zeros(4096))
    ahead.add_ons.step_ahead.prepare([("weight", weight)], units_of(torch.optim.SGD([weight])))
    state = (alone := reducer()).state_dict()
    verified = DataParallelConfig(verify=VerifyConfig(every=1))
    checksums, choice = ReplicaChecksums(verified, lambda: [("weight", weight)]), GatherChoice(alone.group)
    choice._times = {way: {0: (1.0, 1)} for way in (True, False)}
    skips = DataParallelConfig(nonfinite_action="skip")
    reads: list[Callable[[], object]] = [
        warm_up.end_step,
        lambda: train(ahead),
        lambda: train(reducer(adaptive={"kind": "accordion", "interval": 1})),
        lambda: train(reducer(verify={"every": 1, "conservation": True})),
        choice._now,
        choice._decide,
        lambda: largest(alone.group, [1.0]),
        lambda: PoisonedSteps(skips, lambda: [("weight", weight)], agree=True).found(3),
        lambda: PoisonedSteps(skips, lambda: [("weight", weight)], agree=False).found(3),
        lambda: checksums.check(3),
        lambda: mean_residuals(state, {"weight": 9}, None),
    ]
    waiting: list[str] = []

    def nothing_arrives(device: torch.device) -> Callable[[], bool]:
        waiting.append(lost_ranks.waits[threading.get_ident()].what)
        lost_ranks.failure[:] = ["rank 2 ended with ValueError: no such file"]
        return lambda: False

    lost_ranks.queued = nothing_arrives
    for read in reads:
        with pytest.raises(DesyncError, match="rank 2 ended with ValueError"):
            read()
    return waiting


@pytest.mark.slow
def test_every_read_of_what_the_ranks_have_made_looks_for_failed_ranks() -> None:
    """Also those of steps that are not ordinary ones."""
    waiting, same = run(2, _reads_what_never_arrives)
    assert waiting == same
    assert waiting == [
        "dense all-reduce",
        "comparison of residuals",
        "comparison of norms",
        "check of residuals",
        "gather of updated weights",
        "choice between gathers and exact updates",
        "comparison of times",
        *["agreement on a step that is not finite"] * 2,
        "comparison of parameters",
        "average of residuals",
    ]


class _QueueingTransport(LoopedTransport):
    """Queues headers on a device, where other ranks are in another call: reading any would not end."""

    def queue_headers(self, announced: Announced) -> torch.Tensor:
        self.told = [header.size for header in announced.headers]
        return torch.empty(0)

    def receive_headers(self, announced: Announced) -> list[Header]:
        raise AssertionError("the host waits")


class _QueueingPeers(LoopedPeers):
    def open_transport(self, device: torch.device) -> Transport:
        self.transport = _QueueingTransport(self.rank, self.ranks)
        self.transport.queues = True
        return self.transport


def test_a_failing_rank_reads_nothing_from_a_device() -> None:
    peers = _QueueingPeers(0, range(2))
    exchange = Exchange(peers, torch.device("cpu"))
    exchange.post([torch.zeros(4, dtype=torch.uint8)] * 2)
    with pytest.raises(ValueError, match="expected"), exchange.preparing():
        raise ValueError("expected")
    assert peers.transport.told == [-1, -1]
    with pytest.raises(DesyncError, match="rank 0: rank"):
        exchange.checked_sizes([(0, 0), (-1, 0)], 0)


def _stop_this_process() -> None:
    """Stop; the thread that says that this rank lives has ended, so no file of the store stays locked."""
    store, waits = lost_ranks.default_store(), lost_peers._excepthook.waits
    assert waits is not None
    while b" 3" not in store.get(lost_ranks.key_of("heard", 1)):
        time.sleep(0.05)
    waits.stop()
    waits.join()
    store.set("rank 1 stops", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    store.set("rank 1 goes on", "")


def _waits_for_a_stopped_rank(rank: int, world_size: int, waiting: str) -> tuple[str, str]:
    """Rank 1 stops in step 3. Rank 0 waits where gloo receives slots, or, as with nccl, for its device."""
    lost_peers.PATIENCE, lost_peers.INTERVAL, lost_peers.ANSWERS = 0.5, 0.1, 1.0
    group = dist.new_group(timeout=timedelta(seconds=12))
    job, store = watched(), lost_ranks.default_store()
    register_backend("deferred", DeferredBackend)
    reducer = GradientReducer(
        DataParallelConfig(sparsity=0.9, feedback="local"),
        group if waiting == "gloo" else _WatchedPeers(0, range(2)),
        kernels=KernelConfig(backend="deferred"),
    )

    def step() -> None:
        reducer.begin([("weight", torch.randn(4096))]).finish()
        reducer.finish()
        reducer.end_step()

    for _ in range(3):
        step()
    if rank:
        _stop_this_process()
        return "", ""
    pid = int(store.get("rank 1 stops"))
    lost_ranks.time_limit = lambda group, device: 0.0
    with logged() as lines:

        def nothing_arrives() -> bool:
            while not any("has waited" in line for line in lines):
                time.sleep(0.05)
            return False

        lost_ranks.queued = lambda device: nothing_arrives
        with pytest.raises(DesyncError) as ended:
            step()
    while not store.check(["rank 1 goes on"]):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    del job
    (line,) = [line for line in lines if "has waited" in line]
    return line, str(ended.value)


@pytest.mark.slow
@pytest.mark.parametrize("waiting", ["gloo", "device"])
def test_a_rank_that_waits_for_a_stopped_one_names_it_and_its_last_step(waiting: str) -> None:
    (warned, ended), _ = run(2, _waits_for_a_stopped_rank, waiting, DCT_TRANSPORT="gloo")
    assert "meanwhile rank 1 gives no sign of life (last step 3). A rank" in warned
    assert "rank(s) [1] gave no sign of life since: dead, stopped or stuck" in ended


class _Counting:
    """A client of the store that counts requests."""

    def __init__(self, client: dist.Store) -> None:
        self.client, self.counts = client, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self.client, name)


def _waits_with_the_store(rank: int, world_size: int, port: int) -> tuple[list[str], Counter[str]]:
    """Rank 1 waits in the store, and gives signs of life; then all ranks wait in one call."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    lost_ranks.default_store = lambda: store
    lost_peers.PATIENCE, lost_peers.INTERVAL, lost_peers.ANSWERS = 0.2, 0.05, 600.0
    job = watched()
    thread = lost_peers._excepthook.waits
    assert thread is not None
    if rank == 1:
        store.get("rank 0 has heard")
    elif rank == 0:
        signs: set[str | None] = set()
        while len(signs) < 5:
            signs.add(lost_ranks.stated(lost_ranks.key_of("heard", 1)))
        store.set("rank 0 has heard", "")
    client = _Counting(store.clone())
    while thread._client[0] is None:  # the thread makes its own at first, and would put it back
        time.sleep(0.01)
    thread._client = store, client
    with logged() as lines, lost_ranks.reported("call of all"):
        while not client.counts["multi_get"]:
            time.sleep(0.01)
        store.set(f"rank {rank} has looked", "")
        store.wait([f"rank {each} has looked" for each in range(world_size)])
    del job
    dist.barrier()
    return lines, client.counts


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="torch before 2.8")
def test_waiting_ranks_give_signs_of_life_and_ask_little() -> None:
    for lines, counts in run(3, _waits_with_the_store, free_port()):
        assert not lines
        assert counts["multi_get"] == 1
        assert counts["get"] == counts["compare_set"] == 0


def _ends_while_the_store_answers(rank: int, world_size: int) -> tuple[bool, list[str]]:
    """End a job while its thread is in a request that the store answers after more than a second."""
    lost_peers.INTERVAL, store, asked, failed = (
        0.01,
        lost_ranks.default_store(),
        threading.Event(),
        list[str](),
    )

    class Slow:
        def set(self, key: str, value: str) -> None:
            asked.set()
            store.wait(["never"], timedelta(seconds=1.5))

    threading.excepthook = lambda arguments: failed.append(str(arguments.exc_value))
    lost_peers.LongWaits._store = Slow()  # type: ignore[assignment]
    job = watched()
    thread = lost_peers._excepthook.waits
    assert thread is not None
    assert asked.wait(60.0)
    del job
    gc.collect()
    return thread.is_alive(), failed


@pytest.mark.slow
def test_the_end_of_a_job_waits_for_its_thread() -> None:
    """One that came back from the store while Python ends would abort the process."""
    assert run(1, _ends_while_the_store_answers) == [(False, [])]
