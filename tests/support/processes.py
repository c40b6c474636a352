"""Real processes for the distributed tests: gloo over loopback; results and failures come back to pytest.

Processes are forked from a server, itself a fork of pytest when it has collected the tests: torch, the
frameworks and the tests are imported, a process starts in a few milliseconds. Every job gets new processes,
except in a file that uses the fixture ``shared_ranks``. The first training step in a process takes up to a
second: there the ranks run the jobs of a file one after the other, with a process group for every job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from multiprocessing import connection, forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dct_plugin import console
from dct_plugin.recommender.links.team import free_port
from support import preload

#: A hung collective is a failed test, not a lost afternoon.
TIMEOUT = timedelta(seconds=600)
#: Seconds that a test's processes may take by default.
PATIENCE = 800.0

_spawn = util.spawnv_passfds


def start_server() -> None:
    """Fork the server of this process, which has imported the tests and has not run one."""
    if not torch.cuda.is_available():
        resource_tracker.ensure_running()
        forkserver.set_forkserver_preload([])
        util.spawnv_passfds = _fork_server
        try:
            forkserver.ensure_running()
        finally:
            util.spawnv_passfds = _spawn


def _fork_server(_path: Any, arguments: list[str], descriptors: list[int]) -> int:
    """Stand in for a new interpreter with these arguments, the last of which is the server's program."""
    pid = os.fork()
    if pid:
        return pid
    try:
        util.spawnv_passfds = _spawn
        forkserver._forkserver.__init__()  # its lock is held
        _forget_pytest(descriptors)
        preload.preload()
        exec(arguments[-1])
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _forget_pytest(kept: list[int]) -> None:
    """Close the connections of pytest to others, and write to the standard files themselves."""
    faulthandler.disable()
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            mode = os.fstat(descriptor).st_mode
            if descriptor > 2 and descriptor not in kept and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.close(descriptor)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    # As in a new interpreter.
    logging.getLogger().handlers.clear()
    warnings.simplefilter("ignore", ResourceWarning)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)


@cache
def context() -> Any:
    """The multiprocessing context of the fork server.

    With a GPU processes are spawned: CUDA does not work in children of a process that asked for devices.
    """
    return mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")


def _run_rank(
    rank: int, variables: dict[str, str], store_path: str, function: Callable[..., Any], arguments: Any
) -> bool:
    """Call the function in a process group, and write what it returns or raises to ``STORE.rankN``. Return
    whether it returned.
    """
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    world_size = int(variables["WORLD_SIZE"])
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    dist.barrier()  # a rank that ends before others have connected fails their connections
    try:
        outcome: tuple[str, Any] = ("value", function(rank, world_size, *arguments))
    except Exception as error:
        outcome = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    torch.save(outcome, f"{store_path}.rank{rank}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return outcome[0] == "value"


class _Team:
    """Processes that run jobs one after the other, each in a process group of its own."""

    def __init__(self, world_size: int) -> None:
        pipes = [context().Pipe() for _ in range(world_size)]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [fork(_serve_jobs, rank, theirs) for rank, (_, theirs) in enumerate(pipes)]
        self.lasts = True
        for _, theirs in pipes:
            theirs.close()

    def run(self, path: str, job: tuple[Any, ...], limit: float, killed: int | None) -> None:
        """Wait until all ranks end the job. A rank that ends without a result fails the test at once."""
        for each in self.connections:
            each.send(job)
        running: dict[Any, int] = {each: rank for rank, each in enumerate(self.connections)}
        while running:
            for ready in _wait(running, limit):
                rank = running.pop(ready)
                try:
                    ready.recv()
                except (EOFError, ConnectionError):
                    self.lasts = False
                    has_result = Path(f"{path}.rank{rank}").exists()
                    assert has_result or rank == killed, f"the process of rank {rank} died"

    def end(self, limit: float) -> None:
        """Wait until the processes end; kill them after the limit."""
        for each in self.connections:
            each.close()
        running = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        try:
            while running:
                for ready in _wait(running, limit):
                    running.pop(ready)
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _wait(running: dict[Any, int], limit: float) -> list[Any]:
    """Wait for what ends first, until the limit on the monotonic clock."""
    ended = connection.wait(list(running), timeout=max(0.0, limit - time.monotonic()))
    assert ended, f"ranks {sorted(running.values())} did not finish in time"
    return ended


def _serve_jobs(rank: int, jobs: Any) -> None:
    """Run jobs until one fails or the other side closes the connection, each with the random numbers of a new
    process, in which no line was logged. The end of a process tells the ranks that wait for it.
    """
    random_state, succeeded = torch.get_rng_state(), True
    with contextlib.suppress(EOFError):
        while succeeded:
            lasts, *job = jobs.recv()
            gc.collect()
            console.log_once.cache_clear()
            torch.set_rng_state(random_state)
            succeeded = _run_rank(rank, *job) and lasts
            jobs.send(None)


#: Teams by world size in a file whose tests share ranks, else None.
_teams: dict[int, _Team] | None = None


@contextlib.contextmanager
def shared_ranks() -> Iterator[None]:
    """Meanwhile, jobs of one world size run in the same processes. A job with variables or one that loses a
    rank has its own, and after an error the next job gets new ones.
    """
    global _teams
    _teams = None if torch.cuda.is_available() else {}
    try:
        yield
    finally:
        ended, _teams = _teams or {}, None
        for team in ended.values():
            team.end(time.monotonic() + PATIENCE)


def fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Start one process outside a process group, and return it; whoever asks for it ends it."""
    process = context().Process(target=function, args=arguments)
    process.start()
    return process


def launch(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    patience: float = PATIENCE,
    killed: int | None = None,
    **variables: str,
) -> list[tuple[str, Any]]:
    """Run ``function(rank, world_size, *arguments)`` in processes; ``("value", result)`` or ``("error",
    text)`` each.

    Args:
        patience: Seconds after which the processes are killed and the test fails.
        killed: A rank that may end without a result; it has ``("killed", "")``.
        variables: Added to the environment of the processes.
    """
    shared = _teams if killed is None and not variables else None
    # DeepSpeed's shared memory is named by the port.
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
    variables["WORLD_SIZE"] = str(world_size)
    limit = time.monotonic() + patience
    team = (shared or {}).pop(world_size, None) or _Team(world_size)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        try:
            team.run(path, (shared is not None, variables, path, function, arguments), limit, killed)
        except BaseException:
            team.kill()
            raise
        files = [Path(f"{path}.rank{rank}") for rank in range(world_size)]
        outcomes = [
            torch.load(file, weights_only=False) if file.exists() else ("killed", "") for file in files
        ]
    if shared is not None and team.lasts and all(kind == "value" for kind, _ in outcomes):
        shared[world_size] = team
    else:
        team.end(limit)
    return outcomes


def run(world_size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Like :func:`launch` where every rank must succeed; the results in rank order."""
    outcomes = launch(world_size, function, *arguments, **options)
    errors = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(outcomes) if kind == "error"]
    assert not errors, "\n".join(errors)
    return [value for _, value in outcomes]


class Lines(logging.Handler):
    """The messages that the plugin logs in this process from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("dct_plugin").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        """Return the lines so far, once."""
        taken, self.lines = self.lines, []
        return taken


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What the plugin logs in this process meanwhile, message by message."""
    handler = Lines()
    try:
        yield handler.lines
    finally:
        logging.getLogger("dct_plugin").removeHandler(handler)
