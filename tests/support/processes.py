"""Real processes for the distributed tests: gloo over loopback, results and failures brought back to pytest.

The processes are kept between tests (importing torch costs more than most tests); every test gets a process
group of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: A hung collective is a failed test, not a lost afternoon.
TIMEOUT = timedelta(seconds=60)
_PATIENCE = 240.0
#: A process with more threads is replaced: those of a process group wake up a hundred times a second, and
#: live as long as something refers to it (Megatron makes groups by the dozen).
_MOST_THREADS = 200

_context = mp.get_context("spawn")
_workers: list[tuple[Any, Any]] = []  # (process, its tasks)
_results: Any = None


def _serve(position: int, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    while True:
        task = tasks.get()
        if task is None:
            return
        number, world_size, store_path, function, arguments = task
        os.environ.update(RANK=str(position), WORLD_SIZE=str(world_size), LOCAL_RANK=str(position))
        store = dist.FileStore(store_path, world_size)
        dist.init_process_group("gloo", store=store, rank=position, world_size=world_size, timeout=TIMEOUT)
        try:
            outcome: tuple[str, Any] = ("value", function(position, world_size, *arguments))
        except Exception as error:
            outcome = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        dist.destroy_process_group()
        # Through a file: queues share tensors by descriptors that die with the process.
        torch.save(outcome, f"{store_path}.rank{position}")
        results.put((number, position, psutil.Process().num_threads()))


def _stop() -> None:
    global _results
    for process, _ in _workers:
        process.kill()
    _workers.clear()
    _results = None


atexit.register(_stop)


def launch(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
    """Run ``function(rank, world_size, *arguments)`` in processes; ``("value", result)`` or ``("error",
    text)`` each.
    """
    global _results
    if _results is None:
        _results = _context.Queue()
    while len(_workers) < world_size:
        tasks = _context.Queue()
        process = _context.Process(target=_serve, args=(len(_workers), tasks, _results), daemon=True)
        process.start()
        _workers.append((process, tasks))
    number = os.urandom(8)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        for _, tasks in _workers[:world_size]:
            tasks.put((number, world_size, path, function, arguments))
        missing, threads = set(range(world_size)), 0
        limit = time.monotonic() + _PATIENCE
        while missing:
            try:
                answered, position, has = _results.get(timeout=1.0)
            except queue.Empty:
                dead = [rank for rank in missing if not _workers[rank][0].is_alive()]
                if not dead and time.monotonic() < limit:
                    continue
                _stop()
                raise AssertionError(
                    f"the processes of ranks {dead} died"
                    if dead
                    else f"ranks {sorted(missing)} did not finish within {_PATIENCE:.0f} s"
                ) from None
            if answered == number:
                missing.discard(position)
                threads = max(threads, has)
        if threads > _MOST_THREADS:
            _stop()
        return [torch.load(f"{path}.rank{r}", weights_only=False) for r in range(world_size)]


def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Like :func:`launch` where every rank must succeed; the results in rank order."""
    outcomes = launch(world_size, function, *arguments)
    errors = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(outcomes) if kind == "error"]
    assert not errors, "\n".join(errors)
    return [value for _, value in outcomes]


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the plugin logs in this process meanwhile, message by message."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dct_plugin")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
