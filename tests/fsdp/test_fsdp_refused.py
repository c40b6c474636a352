"""What ``compress_replicas`` refuses, in a process group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from dct_plugin import ConfigError, VersionError
from dct_plugin.fsdp import compress_replicas
from dct_plugin.integrations.fsdp.parameter_groups import check_torch

SPARSE: dict[str, Any] = {"sparsity": 0.9}
AHEAD: dict[str, Any] = {**SPARSE, "feedback": "step_ahead"}


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def replicated(model: nn.Module | None = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(nn.Linear(3, 3) if model is None else model, mesh=mesh)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "one dimension": (
        lambda: fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,))),
        SPARSE,
        r"mesh of two dimensions, nodes and ranks in a node: init_device_mesh\(",
    ),
    "nothing sharded": (lambda: nn.Linear(3, 3), SPARSE, "no module of the model was passed to fully_shard"),
    "DDP": (
        lambda: nn.parallel.DistributedDataParallel(nn.Linear(3, 3)),
        SPARSE,
        r"use dct_plugin\.DCTState",
    ),
    "FSDP1": (
        lambda: FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu")),
        SPARSE,
        r"\(FSDP1\), which is not supported; use fully_shard",
    ),
    "no optimizer": (replicated, AHEAD, r"compress_replicas\(\.\.\., optimizer=optimizer\)"),
    "no optimizer to skip": (replicated, {"nonfinite_action": "skip"}, "optimizer=optimizer"),
    "nodes": (replicated, {"nodes": 2}, "the replicas of the mesh are the nodes"),
    "weights": (
        replicated,
        {"parameters": {}},
        r"dct\.data_parallel\.parameters = \{\}: FSDP2: the replicas",
    ),
    "complex": (
        lambda: replicated(nn.Linear(3, 3, dtype=torch.complex64)),
        SPARSE,
        "parameter weight is complex, which is not supported",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    make, settings, text = CASES[case]
    model = make()
    with pytest.raises(ConfigError, match=text):
        compress_replicas(model, {"data_parallel": settings})


def test_an_optimizer_of_other_parameters() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    replicated(model)
    with pytest.raises(ConfigError, match="make it after fully_shard"):
        compress_replicas(model, {"data_parallel": AHEAD}, optimizer=optimizer)


def test_this_torch() -> None:
    check_torch()


def test_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(VersionError, match=r"torch 2\.5\.1 is not supported"):
        compress_replicas(nn.Linear(3, 3))


def test_another_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    monkeypatch.setattr(f"{module}.foreach_reduce", lambda parameters: None)
    with pytest.raises(VersionError, match="foreach_reduce"):
        compress_replicas(nn.Linear(3, 3))
