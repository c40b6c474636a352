"""Peers that are lost, out of step, or that announce nonsense: the others end in time and say who it was."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lost_ranks
import pytest
import torch
import torch.distributed as dist
from support.processes import fork, launch, run

from dct_plugin.config import ActivationConfig, DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.embedding import ShardedTables
from dct_plugin.errors import DesyncError
from dct_plugin.model_parallel import ActivationStream, CompressedCollectives
from dct_plugin.transport import Exchange, tcp_connect
from dct_plugin.transport.nodes import Nodes

pytestmark = pytest.mark.slow


def _warms_up_alone(rank: int, world_size: int) -> None:
    config = DataParallelConfig(sparsity=0.9, warmup_steps=8 if rank == 1 else 0)
    GradientReducer(config).all_reduce([("weight", torch.ones(5000))])


def test_a_rank_whose_warm_up_is_not_over_stops_all() -> None:
    """In different collectives they would wait for each other for ever."""
    for kind, text in launch(3, _warms_up_alone):
        assert kind == "error"
        assert "DesyncError" in text
        assert "are exchanging other tensors" in text


def _announces(rank: int, world_size: int, what: str, size: int) -> None:
    """Rank 1 announces so many bytes in the next exchange of gradients, activations, requests or vectors."""

    def lie(exchange: Exchange, after: int = 0) -> None:
        real, calls = exchange.announced.post, iter(range(10))
        if rank == 1:
            exchange.announced.post = lambda sizes, *others: real(  # type: ignore
                [size] * 2 if next(calls) == after else sizes, *others
            )

    if what == "gradients":
        reducer = GradientReducer(DataParallelConfig(sparsity=0.9))
        lie(reducer.group.exchange)
        reducer.all_reduce([("weight", torch.ones(5000))])
    elif what == "activations":
        comm = CompressedCollectives()
        lie(comm.exchange)
        stream = ActivationStream(
            ActivationConfig.of(forward={"method": "threshold", "sparsity": 0.5}), name="layer"
        )
        comm.all_to_all(torch.ones(8, 100), stream, [3, 5], [3, 5][rank : rank + 1] * 2)
    else:
        tables = ShardedTables([50, 60], 8)
        lie(tables.embedding_exchange.transport(None, torch.device("cpu")), after=what == "vectors")
        tables(torch.zeros(4, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("what", "size"),
    [
        ("gradients", 2**33),
        ("gradients", 2**40),
        ("activations", 10**6),
        ("requests", 2**33),
        ("vectors", 10**6),
    ],
)
def test_a_message_that_cannot_be_right_is_not_allocated(what: str, size: int) -> None:
    (kind, text), _ = launch(2, _announces, what, size)
    assert kind == "error"
    assert f"DesyncError: rank 0: rank 1 announces a message of {size} bytes, where at most" in text


def _train_until_lost(path: str, rank: int, world_size: int, victim: int, how: str) -> None:
    """Train as a rank of a job that loses another one in its fourth step, or while ranks connect. Write the
    error, if there is one, to ``PATH.rankN``; ``how`` is a signal and a phase.
    """
    kind, phase = how.split()
    said = Path(f"{path}.rank{rank}")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=8),
    )
    if rank == victim and phase == "connecting":
        tcp_connect._exchange_invitations = _stop_after(tcp_connect._exchange_invitations, f"{path}.lost")
    config = DataParallelConfig(sparsity=0.9, warmup_steps=9 if phase == "warmup" else 0)
    nodes = Nodes(((0, 1), (2, 3)), rank) if phase == "nodes" else None
    reducer = GradientReducer(config, nodes)
    try:
        for step in range(10):
            if rank == victim and step == 3 and phase != "connecting":
                Path(f"{path}.lost").touch()
                if kind == "raise":
                    raise MemoryError("no room for a forward pass")
                os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            reducer.all_reduce([("weight", torch.full((20_000,), float(rank + step)))])
            reducer.end_step()
            time.sleep(0.05)
    except Exception as error:
        said.write_text(json.dumps({"error": type(error).__name__, "text": str(error)}))
        os._exit(1)
    said.write_text(json.dumps({"error": None, "text": ""}))


def _stop_after(exchange: Callable[..., Any], lost: str) -> Callable[..., Any]:
    def stops(*arguments: Any, **keywords: Any) -> Any:
        invitations = exchange(*arguments, **keywords)
        Path(lost).touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        return invitations

    return stops


#: Ways in which rank 1 is lost, and the number of ranks.
HOWS = {"kill warmup": 3, "raise sparse": 3, "stop sparse": 3, "kill nodes": 4, "stop connecting": 3}


def lose(folder: Path, how: str, world_size: int, victim: int = 1) -> list[dict[str, Any]]:
    """Return the words of every rank but the victim."""
    store = str(folder / "store")
    processes = [fork(_train_until_lost, store, rank, world_size, victim, how) for rank in range(world_size)]
    others = [rank for rank in range(world_size) if rank != victim]
    try:
        while not (folder / "store.lost").exists():
            assert processes[victim].is_alive() or "stop" not in how
            time.sleep(0.02)
        for rank in others:
            processes[rank].join()
        return [json.loads((folder / f"store.rank{rank}").read_text()) for rank in others]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The words of the remaining ranks, by the way in which one is lost. All jobs run at once: they wait."""
    folders = {how: tmp_path_factory.mktemp("lost") for how in HOWS}
    with ThreadPoolExecutor(len(HOWS)) as pool:
        return dict(zip(HOWS, pool.map(lose, folders.values(), HOWS, HOWS.values()), strict=True))


@pytest.mark.parametrize("how", ["kill warmup", "raise sparse", "stop sparse"])
def test_a_lost_peer_is_named(lost: dict[str, list[dict[str, Any]]], how: str) -> None:
    """Killed, failed elsewhere, or stopped; the process group's time limit is short."""
    for rank in lost[how]:
        assert rank["error"] == "DesyncError", rank["text"]
        assert "rank(s) [1] gave no sign of life since" in rank["text"]
        assert "in step 3 failed" in rank["text"]
        assert "exchange of sizes" in rank["text"]


def test_a_rank_killed_in_a_node_is_named_on_both_nodes(lost: dict[str, list[dict[str, Any]]]) -> None:
    for rank in lost["kill nodes"]:
        assert rank["error"] == "DesyncError", rank["text"]
        assert "rank(s) [1] gave no sign of life since" in rank["text"]
        assert "in step 3" in rank["text"]


def test_a_rank_that_stops_while_ranks_connect_is_named_at_the_time_limit(
    lost: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in lost["stop connecting"]:
        assert rank["error"] == "DesyncError", rank["text"]
        assert "rank(s) [1] gave no sign of life since" in rank["text"]


def _absent_in_turn(rank: int, world_size: int) -> list[str]:
    """Ranks 1 and 2 stay away from one exchange each; after each of these all make new connections."""
    texts = []
    with patch.object(tcp_connect, "time_limit", lambda group: 4.0):
        for absent in (1, 2):
            exchange = Exchange(None, torch.device("cpu"))
            exchange.agree(1)
            try:
                if rank != absent:
                    exchange.agree(2)
            except DesyncError as error:
                texts.append(str(error))
            dist.barrier()
        Exchange(None, torch.device("cpu")).agree(3)
    return texts


def test_after_a_recovery_in_the_same_process_the_right_rank_is_named() -> None:
    first, second, third = run(3, _absent_in_turn)
    for text, lost in [*zip(first, (1, 2), strict=True), (second[0], 2), (third[0], 1)]:
        assert f"rank(s) [{lost}] gave no sign of life" in text


def _lose_ranks(arguments: list[str], results: Path) -> None:
    """Run ``lost_ranks.py`` in this process, with a file for its standard output."""
    sys.argv = ["lost_ranks.py", *arguments]
    with results.open("w") as file:
        os.dup2(file.fileno(), 1)
    sys.exit(lost_ranks.main())


def test_a_peer_lost_in_a_collective_of_the_framework_is_named(tmp_path: Path) -> None:
    """In a barrier of the script, with the error that ends it; all points and hosts: ``lost_ranks.py``."""
    results = tmp_path / "results"
    arguments = ["--hosts", "ddp", "--points", "barrier", "--hows", "kill"]
    process = fork(_lose_ranks, arguments, results)
    process.join()
    assert process.exitcode == 0
    assert json.loads(results.read_text())["kill"] == 1
