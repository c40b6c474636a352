"""Replicas of torchft as threads of one process, with the real lighthouse and real managers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

LIMIT = timedelta(seconds=20)


@contextmanager
def lighthouse(min_replicas: int, *, join_ms: int = 500) -> Iterator[str]:
    """The address of a lighthouse that waits for so many replicas."""
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=join_ms, heartbeat_timeout_ms=2000
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


def manager_of(
    pg: Any,
    name: str,
    address: str,
    *,
    state: dict[str, Any],
    min_replicas: int = 2,
    store: tuple[int, int, int] | None = None,
    quorum_timeout: timedelta = LIMIT,
    **options: Any,
) -> torchft.Manager:
    """A manager whose replicas copy what has ``load_state_dict`` in ``state``.

    Args:
        store: Port of the replica's store, rank and world size, where a replica has several ranks.
    """
    if store is None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = server.port, 0, 1
        pg.test_store = server  # which lives as long as the group

    def load(saved: dict[str, Any]) -> None:
        for key, each in state.items():
            each.load_state_dict(saved[key])

    manager = torchft.Manager(
        pg=pg,
        load_state_dict=load,
        state_dict=lambda: {key: each.state_dict() for key, each in state.items()},
        min_replica_size=min_replicas,
        timeout=LIMIT,
        quorum_timeout=quorum_timeout,
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store[0],
        rank=store[1],
        world_size=store[2],
        lighthouse_addr=address,
        hostname="127.0.0.1",
        **options,
    )
    if hasattr(pg, "follow"):
        pg.follow(manager)
    return manager


def in_threads(function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Call the function once for each set of arguments, side by side; results, or errors that were raised."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(len(arguments)) as pool:
        futures = [pool.submit(function, *each) for each in arguments]
        return [future.exception() or future.result() for future in futures]
