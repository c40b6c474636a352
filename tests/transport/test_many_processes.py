"""The start of 32 real processes: agreement, one reduction, and one of them that dies."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import PATIENCE, fork

from dct_plugin.config import DataParallelConfig, DCTConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.errors import DesyncError
from dct_plugin.integrations.host import startup

pytestmark = [pytest.mark.slow, pytest.mark.long]

RANKS, DIES = 32, 7


class CountedStore(dist.PrefixStore):
    """Counts what a rank asks the store for."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__("counted", store)
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "wait", "check", "add", "compare_set", "multi_get", "multi_set"):
            self.calls[name] += 1
        return super().__getattribute__(name)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store, limit = dist.FileStore(f"{folder}/store", RANKS), timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    counted = CountedStore(dist.distributed_c10d._get_default_store())
    dist.distributed_c10d._get_default_store = lambda: counted
    config = DCTConfig.parse({"data_parallel": {"sparsity": 0.9}})
    startup.join("a start", limit=PATIENCE).confirm(startup.facts_of(config, {}))
    section = {"sparsity": 0.9, "feedback": "local", "exchange": "two_phase", "warmup_steps": 0}
    reducer = GradientReducer(DataParallelConfig.of(section))
    gradient = torch.randn(200_000, generator=torch.Generator().manual_seed(rank))
    reducer.all_reduce([("weight", gradient)], scale=1 / RANKS)
    reducer.end_step()
    found = {"sum": float(gradient.double().sum()), "calls": counted.calls.total(), "error": ""}
    if rank == DIES:
        _write(folder, rank, found)
        os._exit(1)
    try:
        for _ in range(3):
            reducer.all_reduce([("weight", torch.randn(200_000))], scale=1 / RANKS)
            reducer.end_step()
    except DesyncError as error:
        found["error"] = str(error)
    _write(folder, rank, found)
    os._exit(0)


def _write(folder: str, rank: int, found: dict[str, Any]) -> None:
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.timeout(2 * PATIENCE)
def test_they_agree_and_reduce_and_all_name_the_one_that_dies(tmp_path: Path) -> None:
    processes = [fork(_rank, rank, str(tmp_path)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.join(PATIENCE)
    finally:
        for process in processes:
            process.kill()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert len({each["sum"] for each in found}) == 1
    assert 0 < max(each["calls"] for each in found) <= 8 * RANKS  # rank 0 reads what all say
    for rank, each in enumerate(found):
        if rank != DIES:
            assert f"rank {DIES}" in each["error"] or f"[{DIES}]" in each["error"], each["error"]
