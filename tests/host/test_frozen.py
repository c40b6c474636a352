"""Frozen and adapted weights: LoRA by hand and ``peft``, and layers that are unfrozen during the training."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from support.processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_plugin

if importlib.util.find_spec("peft") is not None:
    import peft  # noqa: F401  here, so that no process of the tests imports it alone

pytestmark = pytest.mark.slow

STEPS, UNFREEZES = 6, 3
EXACT = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100, "warmup_steps": 0}}
SPARSE = {"data_parallel": {"sparsity": 0.95, "min_numel": 100, "feedback": "step_ahead", "warmup_steps": 1}}
ADAPTERS = ["by hand", "peft"]


class LowRank(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted(adapter: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    if adapter == "peft":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(net, LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=False))
    net[0], net[2] = LowRank(net[0]), LowRank(net[2])
    net[4].requires_grad_(False)
    return net


def frozen_layer(net: nn.Module) -> nn.Parameter:
    """The weight that is unfrozen."""
    return next(each for name, each in net.named_parameters() if name.endswith("4.weight"))


def loss_of(model: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)  # frozen ones, too


class Trained(NamedTuple):
    """The weights, the bytes of compressed gradients (sent, dense), and the lines about unfrozen ones."""

    weights: Tensor
    sent: int
    dense: int
    lines: list[str]


Training = Callable[[nn.Module, Any, int, bool], Any]


def _steps(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def ddp(net: nn.Module, section: Any, rank: int, anew: bool) -> Any:
    model = DistributedDataParallel(net)
    optimizer = adamw(net)
    state = dct_plugin.attach(model, optimizer, section) if section else None
    _steps(model, optimizer, rank, range(UNFREEZES))
    frozen_layer(net).requires_grad_(True)
    if anew:
        model = DistributedDataParallel(net)
        state = dct_plugin.attach(model, optimizer, section) if section else None
    _steps(model, optimizer, rank, range(UNFREEZES, STEPS))
    return state


def fsdp(net: nn.Module, section: Any, rank: int, anew: bool) -> Any:
    model = fully_shard(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    optimizer = adamw(model)
    state = dct_plugin.attach(model, optimizer, section) if section else None
    _steps(model, optimizer, rank, range(UNFREEZES))
    frozen_layer(net).requires_grad_(True)
    _steps(model, optimizer, rank, range(UNFREEZES, STEPS))
    return state


def engine_of(stage: int) -> Training:
    def train(net: nn.Module, section: Any, rank: int, anew: bool) -> Any:
        def start() -> Any:
            configuration = {
                "train_micro_batch_size_per_gpu": 16,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                **({"dct": section} if section else {}),
            }
            return deepspeed.initialize(
                model=net, optimizer=adamw(net), config=configuration, dist_init_required=False
            )[0]

        engine = start()
        for step in range(STEPS):
            if step == UNFREEZES:
                frozen_layer(net).requires_grad_(True)
                engine = start() if anew else engine
            engine.backward(loss_of(engine, rank, step))
            engine.step()
        return engine.dct if section else None

    return train


HOSTS: dict[str, tuple[Training, bool]] = {
    "torch DDP": (ddp, False),
    "FSDP2": (fsdp, True),
    "ZeRO-0": (engine_of(0), True),
    "ZeRO-1": (engine_of(1), False),
    "ZeRO-2": (engine_of(2), False),
    "ZeRO-3": (engine_of(3), False),
}
"""Trainings by host, and whether unfrozen parameters are picked up."""


def _trained(training: Training, adapter: str, section: Any, rank: int, anew: bool) -> Trained:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dct_plugin").addHandler(handler)
    net = adapted(adapter)
    state = training(net, section, rank, anew)
    logging.getLogger("dct_plugin").removeHandler(handler)
    parts = [getattr(p, "ds_tensor", p).data for p in net.parameters()]  # ZeRO-3's
    local = [getattr(part, "to_local", lambda part=part: part)() for part in parts]
    found = None if state is None else state.metrics.summary().classes["gradient"]
    return Trained(
        torch.cat([each.reshape(-1) for each in local]),
        *((0, 0) if found is None else (found.sent_bytes, found.dense_bytes)),
        [line for line in lines if "unfrozen" in line],
    )


def _trainings(rank: int, world_size: int, host: str, adapter: str) -> dict[str, Trained]:
    training, picks_up = HOSTS[host]
    sparse = SPARSE
    if host == "ZeRO-3":  # no rank has whole weights that could be displaced
        sparse = {"data_parallel": {**SPARSE["data_parallel"], "feedback": "local"}}
    cases = {"plain": (None, True), "exact": (EXACT, True), "sparse": (sparse, True)}
    if not picks_up:
        cases |= {"in place": (sparse, False)}
    found = {}
    for name, (section, anew) in cases.items():
        dist.barrier()
        found[name] = _trained(training, adapter, section, rank, anew)
    return found


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("host", HOSTS)
def test_adapters_are_trained_and_unfrozen_layers_follow(host: str, adapter: str) -> None:
    if adapter == "peft" and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    first, second = run(2, _trainings, host, adapter)
    assert torch.equal(first["exact"].weights, first["plain"].weights)
    assert torch.equal(first["sparse"].weights, second["sparse"].weights) or host == "ZeRO-3"
    assert 0 < first["sparse"].sent < first["exact"].sent / 2
    assert not first["exact"].lines + first["sparse"].lines
    if not HOSTS[host][1]:
        (line,) = first["in place"].lines
        assert "unfrozen during the training: " in line
        assert "4.weight" in line
        assert "anew" in line
        assert not second["in place"].lines
