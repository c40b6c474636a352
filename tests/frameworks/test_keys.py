"""Every key of ``dct.data_parallel`` in real trainings: it changes what it says, or is refused by name.

``docs/support.md`` has the table that is made from these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support import ROOT
from support.processes import run
from support_table import KEYS, Effect, key_table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.config import DataParallelConfig
from dct_plugin.errors import ConfigError

#: What all trainings but that of ``enabled`` have.
BASE: dict[str, Any] = {"sparsity": 0.9, "min_numel": 16, "feedback": "local", "nodes": 1}
STEPS = 4


class Outcome(NamedTuple):
    """Bytes that a rank sent, and its weights at the end."""

    sent: float
    weights: torch.Tensor


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))


def points_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def weights_of(model: nn.Module) -> torch.Tensor:
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([weight.detach().float().reshape(-1) for weight in whole])


def _trained(model: nn.Module, section: dict[str, Any], rank: int) -> Outcome:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dct_plugin.attach(model, optimizer, {"data_parallel": section})
    for step in range(STEPS):
        optimizer.zero_grad()
        model(points_of(rank, step)).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(points_of(0, 0))
    summary = state.metrics.summary()
    state.close()
    return Outcome(float(summary.sent_bytes), weights_of(model))


def ddp(section: dict[str, Any], rank: int) -> Outcome:
    return _trained(DistributedDataParallel(model_of()), section, rank)


def fsdp2(section: dict[str, Any], rank: int) -> Outcome:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = model_of()
    fully_shard(model, mesh=mesh)
    return _trained(model, section, rank)


def deepspeed(section: dict[str, Any], rank: int) -> Outcome:
    import deepspeed as host

    stage = 0 if {"local_steps", "exchange_of"} & section.keys() else 1
    model = model_of()
    content = {
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "dct": {"data_parallel": section},
    }
    engine, *_ = host.initialize(model=model, config=content, model_parameters=model.parameters())
    for step in range(STEPS):
        engine.backward(engine(points_of(rank, step)).square().mean())
        engine.step()
    sent = float(engine.dct.metrics.summary().sent_bytes) if hasattr(engine, "dct") else 0.0
    outcome = Outcome(sent, weights_of(engine.module))
    engine.destroy()
    return outcome


HOSTS: dict[str, Callable[[dict[str, Any], int], Outcome]] = {
    "torch DDP": ddp,
    "FSDP2": fsdp2,
    "DeepSpeed": deepspeed,
}


def _swept(rank: int, world_size: int) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for framework, train in HOSTS.items():
        base = train(BASE, rank)
        for row in KEYS:
            around = {"min_numel": 16, "warmup_steps": 1} if row.alone else {**BASE, **row.beside}
            section = {**around, row.key: row.value}
            beside = base if around == BASE else train(around, rank)
            effect = Effect.NONE
            if row.effects[framework] is Effect.REFUSED:
                with pytest.raises(ConfigError, match=f"dct.data_parallel.{row.key}"):
                    train(section, rank)
                effect = Effect.REFUSED
            elif not torch.equal((outcome := train(section, rank)).weights, beside.weights):
                effect = Effect.WEIGHTS
            elif outcome.sent != beside.sent:
                effect = Effect.BYTES
            found.setdefault(row.key, {})[framework] = effect.value
    return found


@pytest.mark.slow
def test_every_key_does_what_the_table_says() -> None:
    expected = {row.key: {name: row.effects[name].value for name in HOSTS} for row in KEYS}
    for found in run(2, _swept):
        assert {key: found[key] for key in found if found[key] != expected[key]} == {}


def test_the_table_has_every_key_and_stands_on_the_page() -> None:
    assert {row.key for row in KEYS} == set(DataParallelConfig.model_fields)
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert key_table() in page, "run python docs/support_table.py"
