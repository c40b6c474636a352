"""Training in which each rank has its own data and trains alone, for local steps and exchanges of updates."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    points = torch.randn(16, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: Tensor = (model(points) - points[:, :3].sin()).square().mean()
    return loss


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, scaler: Any = None) -> None:
    """Make these steps; with a scaler step 6 overflows on the first rank."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step in steps:
        loss = loss_of(model, step, rank)
        scaler.scale(loss * torch.inf if scaler.is_enabled() and step == 6 and rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def everyones(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def sharded(model: nn.Module) -> nn.Module:
    """Shard a model of a first layer and others over 2 replicas of 2 ranks, and return it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model
