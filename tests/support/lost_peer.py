"""One rank of a job that loses another in its fourth step, or while ranks connect."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.transport import tcp_connect
from dct_plugin.transport.nodes import Nodes


def main(path: str, rank: int, world_size: int, victim: int, how: str) -> None:
    """Take part, and write the error, if there is one, to ``PATH.rankN``; ``how`` is a signal and a phase."""
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
