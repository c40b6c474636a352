"""Ranks that wait for each other in different calls say so, long before the time limit of their group."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import logged, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin import DesyncError
from dct_plugin.integrations.host import lost_peers
from dct_plugin.transport import lost_ranks

pytestmark = pytest.mark.slow


def _leaves_alone(rank: int, world_size: int, folder: str) -> tuple[list[str], str, int]:
    """Rank 1 leaves the training loop after two steps, and saves; the others train on."""
    lost_peers.PATIENCE, lost_peers.INTERVAL = 0.5, 0.1
    group = dist.new_group(timeout=timedelta(seconds=4))
    ddp = DistributedDataParallel(nn.Linear(60, 40), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = dct_plugin.attach(ddp, optimizer, {"data_parallel": {"sparsity": 0.9, "min_numel": 16}})
    assert state is not None

    def script() -> None:
        for _ in range(2 if rank == 1 else 9):
            optimizer.zero_grad()
            ddp(torch.ones(4, 60)).square().mean().backward()
            optimizer.step()
        state.save(folder)

    with logged() as lines, pytest.raises(DesyncError) as ended:
        script()
    names = [thread.name for thread in threading.enumerate()]
    assert "dct long waits" in names
    assert lost_peers._excepthook.waits is not None
    lost_peers._excepthook.waits.stop()
    left = sum(thread.name == "dct long waits" for thread in threading.enumerate())
    return [line for line in lines if "has waited" in line], str(ended.value), left


def test_a_rank_that_left_the_loop_is_named_with_its_call(tmp_path: Any) -> None:
    call = "exchange of a checkpoint's identity"
    outcomes = run(2, _leaves_alone, str(tmp_path))
    (training, lonely, left), (saving, error, also_left) = outcomes
    assert left == also_left == 0
    (line,) = training
    assert "rank 0 has waited for" in line
    assert f"in step 2; meanwhile rank 1 is in the {call}" in line
    assert "it has left the training loop: decide on all ranks" in line
    (line,) = saving
    assert "rank 1 has waited for" in line
    assert f"in the {call}; meanwhile rank 0 is in the " in line
    assert f"rank 1: the {call} failed: others failed in another call (rank 0 in the " in error
    assert f"others failed in another call (rank 1 in the {call})" in lonely


def test_a_rank_that_has_ended_may_have_left_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(lost_ranks, "in_time", lambda function, seconds: [1])
    text = lost_ranks.describe_failure("exchange", RuntimeError("Connection closed"), object())  # type: ignore[arg-type]
    assert "or it has left the training loop: decide on all ranks" in text
