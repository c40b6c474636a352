"""The summary of a job against the byte counters of its interfaces."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked import forked_interpreters
from support.processes import run

from dct_plugin.config import MetricsConfig
from dct_plugin.host_traffic import HostTraffic
from dct_plugin.metrics import Metrics
from dct_plugin.recommender.links.namespaces import LinksError

_FILE = Path(__file__).parents[2] / "benchmarks" / "summary.py"


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("summary_benchmark", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "ranks", "options"),
    [
        ("ddp", 4, {"parameters": 2, "batch": 8}),
        ("deepspeed", 2, {"parameters": 2, "batch": 8}),
        ("dlrm", 2, {}),
        ("megatron", 2, {"batch": 1, "layers": 2, "hidden": 128}),
    ],
)
def test_the_summary_is_what_crosses(host: str, ranks: int, options: dict[str, int], tmp_path: Path) -> None:
    """The benchmark has larger batches and models, and other numbers of ranks."""
    if host in ("deepspeed", "dlrm", "megatron"):
        pytest.importorskip({"dlrm": "deepspeed"}.get(host, host))
    try:
        with forked_interpreters():
            rows = _benchmark().measure(host, ranks, 2, tmp_path, **options)
    except LinksError as error:
        pytest.skip(str(error))
    assert rows
    for row in rows:
        name = f"{row['variant']}, {row['method']}"
        assert row["dense_bytes"] == pytest.approx(row["dense_wire"], rel=0.05), name
        assert row["sent_bytes"] == pytest.approx(row["sent_wire"], rel=0.05), name


def test_collectives_are_put_back() -> None:
    before = dict(vars(dist.ProcessGroup)), dist._broadcast_coalesced
    outer, inner = (HostTraffic(Metrics(MetricsConfig(), rank=0, world_size=2)) for _ in range(2))
    with outer:
        with inner:
            assert dist._broadcast_coalesced is not before[1]
        assert vars(dist.ProcessGroup)["allreduce"] is not before[0]["allreduce"]
    assert (dict(vars(dist.ProcessGroup)), dist._broadcast_coalesced) == before


def _unequal(rank: int, world_size: int) -> list[float]:
    found = []
    for kind in (list, np.array):  # Megatron's dispatcher of tokens has arrays
        metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
        received, entries = kind([1 + 2 * rank] * 2), torch.arange(4.0)
        output = torch.empty(2 + 4 * rank)
        with HostTraffic(metrics):
            dist.all_to_all_single(output, entries, received, kind([1, 3]))
        assert output.tolist() == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0] if rank else [0.0, 0.0]
        found.append(metrics.summary().classes["host_all_to_all"].sent_bytes)
    return found


@pytest.mark.slow
def test_unequal_parts_of_an_all_to_all() -> None:
    first, second = run(2, _unequal)
    assert first[0] == first[1]
    assert first[0] - second[0] == 8  # rank 0 keeps one of four entries, rank 1 three
    assert second[0] == second[1]


def test_new_names_of_collectives_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 gathers by ``gather_single(output, input, options)``."""

    class Group:
        def size(self) -> int:
            return 4

        def gather_single(self, output: torch.Tensor, part: torch.Tensor) -> None:
            """Nothing is sent."""

    metrics = Metrics(MetricsConfig(), rank=0, world_size=4)
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    with HostTraffic(metrics):
        Group().gather_single(torch.empty(4, 10), torch.empty(10))
    assert metrics.summary().classes["host_gather"].sent_bytes >= 30
