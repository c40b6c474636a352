"""Messages between ranks: what is said of waiting."""

from __future__ import annotations

import time

import pytest
import torch
from support.processes import run

from dct_plugin.transport import Exchange

pytestmark = pytest.mark.slow


def waiting(rank: int, world_size: int) -> list[float]:
    exchange = Exchange(None, torch.device("cpu"))
    message, found = torch.full((1000,), rank, dtype=torch.uint8), []
    for step in range(3):
        with exchange.preparing():
            time.sleep(0.2 if step and rank == 1 else 0.0)
        before = exchange.counters()[1]
        received = exchange.all_gather(message, 5)
        found.append(exchange.counters()[1] - before)
        assert [int(part[0]) for part in received] == list(range(world_size))
    return found


def test_the_others_wait_for_the_slowest() -> None:
    for rank, (first, *others) in enumerate(run(3, waiting)):
        assert first == 0.0  # nothing before it to compare with
        for waited in others:
            assert waited < 100 if rank == 1 else waited > 100
