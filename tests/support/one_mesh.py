"""A model of FSDP2 on one mesh for tests, its training, and what its ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from support.alone import everyones

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Net(nn.Module):
    """Blocks of odd sizes, so that shards differ in size and the last one is empty; two weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 33)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(2)])
        self.last = nn.Linear(33, 3)
        self.twin = nn.Linear(24, 33, bias=False)
        self.twin.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh() + self.twin(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def sharded(
    *,
    reshard: bool | int | None = None,
    frozen: bool = False,
    checkpointed: bool = False,
    prefetch: bool = False,
    by_columns: bool = False,
    factor: float | None = None,
    sums: bool = True,
    **policy: Any,
) -> nn.Module:
    model, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    if frozen:
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(False)
    if checkpointed:
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**{**BF16, **policy})}
    if by_columns:
        options["shard_placement_fn"] = lambda p: Shard(1) if p.shape == (33, 24) else None
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    if prefetch:
        model.set_modules_to_forward_prefetch(list(model.blocks))  # type: ignore[operator]
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(sums)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
    return model


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, foreach=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range | int,
    *,
    micro: int = 1,
    syncs: bool = True,
    between: Callable[[int], None] = lambda step: None,
) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        for at in range(micro):
            if not syncs:
                model.set_requires_gradient_sync(at == micro - 1)  # type: ignore[operator]
            generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + at)
            points = torch.randn(16, 24, generator=generator)
            F.mse_loss(model(points).float(), points[:, :3].sin()).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(shards(one), shards(other), strict=True))


def gathered(model: nn.Module, rounding: float) -> tuple[bool, bool]:
    """Return whether a rank gathers the weights of the shards, and whether all ranks gather the same."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.reshard()
    wanted = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    for module in modules:
        module.unshard()
    held = [p.detach().clone() for p in model.parameters()]
    for module in modules:
        module.reshard()
    sums = everyones([each.float().double().sum().item() for each in held])
    within = all(
        bool((a - b).abs().max() <= rounding * a.abs().max()) for a, b in zip(wanted, held, strict=True)
    )
    return within, all(each == sums[0] for each in sums)
