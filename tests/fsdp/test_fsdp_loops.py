"""Loops of scripts under FSDP2 with step-ahead, after a start of two steps; as in ``test_ddp_loops``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run
from support.watched import SECTION, equal_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from dct_plugin.data_parallel import weights
from dct_plugin.fsdp import compress_replicas
from dct_plugin.metrics.summary import DISPLACED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("shared_ranks"),
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on the CPU"
    ),
]

STEPS = 6
LOOPS: dict[str, Callable[[Job], None]] = {}


class Net(nn.Module):
    """Two ways through one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def other(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Job:
    """A model of two replicas of one shard; a rank has all weights."""

    def __init__(self, rank: int) -> None:
        self.rank, self.model = rank, Net()
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for module in (self.model.first, self.model):
            fully_shard(module, mesh=mesh)
        register_fsdp_forward_method(self.model, "other")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.compression = compress_replicas(self.model, SECTION, optimizer=self.optimizer)
        self.faults: list[str] = []
        self.seen: list[Tensor] = []
        self.model.last.register_forward_pre_hook(lambda module, _: self._note(module))

    def _note(self, module: Any) -> None:
        self.seen.append(module.weight.detach().clone())

    def batch(self, step: int) -> Tensor:
        return torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * self.rank + step))

    def loss(self, x: Tensor, way: str = "forward") -> Tensor:
        out = self.model(x) if way == "forward" else self.model.other(x)
        return (out - x.roll(1, 1)).square().mean()

    def real(self, when: str) -> None:
        """Note passes without gradients that saw other weights than the optimizer's."""
        with torch.no_grad():
            self.model(self.batch(0))
            held: Any = self.model.last.weight
        shard = self.compression_weights()
        if not torch.equal(self.seen[-1], shard) or not torch.equal(
            getattr(held, "_local_tensor", held), shard
        ):
            self.faults.append(f"displaced {when}")

    def compression_weights(self) -> Tensor:
        (found,) = (p for p in self.compression.parameters if p.name == "last.weight")
        return found.local()


def loop(function: Callable[[Job], None]) -> Callable[[Job], None]:
    LOOPS[function.__name__] = function
    return function


@loop
def training_in_eval_mode(job: Job) -> None:
    job.model.eval()
    for step in range(STEPS):
        job.loss(job.batch(step)).backward()
        job.real("after a backward pass")
        job.optimizer.step()
        job.optimizer.zero_grad()


@loop
def methods(job: Job) -> None:
    for step in range(STEPS):
        job.loss(job.batch(step), "other").backward()
        with torch.no_grad():
            job.model.other(job.batch(step))
        job.optimizer.step()
        job.optimizer.zero_grad()


@loop
def two_ways_in_one_backward_pass(job: Job) -> None:
    for step in range(STEPS):
        x = job.batch(step)
        loss = job.loss(x)
        job.real("between two passes")
        (loss + job.loss(x, "other")).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


@loop
def leftovers_without_resharding(job: Job) -> None:
    for step in range(STEPS):
        for micro in range(2):
            job.model.set_reshard_after_backward(micro == 1)
            job.model.set_requires_gradient_sync(micro == 1)
            job.loss(job.batch(10 * step + micro)).backward()
        job.real("after a backward pass")
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.model.set_requires_gradient_sync(False)
    job.model.set_reshard_after_backward(False)
    job.loss(job.batch(0)).backward()
    job.real("after micro-batches that are left over")


@loop
def a_rejected_batch(job: Job) -> None:
    for step in range(STEPS):
        job.loss(job.batch(step)).backward()
        if step in (3, STEPS - 1):
            job.optimizer.zero_grad()
            job.real("after a rejected batch")
            continue
        job.optimizer.step()
        job.optimizer.zero_grad()


@loop
def frozen_for_an_attack(job: Job) -> None:
    for step in range(STEPS):
        x = job.batch(step).requires_grad_()
        (slope,) = torch.autograd.grad(job.loss(x), x)
        with contextlib.suppress(ZeroDivisionError), weights(job.model):
            raise ZeroDivisionError
        job.loss((x + 0.1 * slope.sign()).detach()).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


def _all_loops(rank: int, world_size: int) -> dict[str, list[str]]:
    wrong = {}
    for name, function in LOOPS.items():
        job = Job(rank)
        function(job)
        faults = job.faults
        if not equal_on_ranks([each.local() for each in job.compression.parameters]):
            faults.append("ranks differ")
        share = job.compression.metrics.summary().classes[DISPLACED].density
        if share != 1.0:
            faults.append(f"displaced: {share}")
        job.compression.close()
        if faults:
            wrong[name] = faults
    return wrong


def test_every_loop() -> None:
    assert run(2, _all_loops) == [{}, {}]


def _leaves_out(rank: int, world_size: int) -> None:
    """Each replica has two shards; the second one clears its gradients in step 5, and has them poisoned in
    step 9.
    """
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (model.first, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    section = {"local_steps": 4, "warmup_steps": 4, "nonfinite_action": "skip"}
    state = compress_replicas(model, {"data_parallel": section}, optimizer=optimizer)
    for step in range(13):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) - x.roll(1, 1)).square().mean()
        (loss * torch.nan if step == 9 and rank == 3 else loss).backward()
        if step != 5 or rank < 2:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    state.detach()
    mine = [parameter.to_local().detach() for parameter in model.parameters()]
    others: list[Any] = [None] * world_size
    dist.all_gather_object(others, mine)
    assert all(map(torch.equal, mine, others[rank % 2]))
    assert all(weight.isfinite().all() for weight in mine)
    state.close()


def test_a_replica_that_trains_alone_leaves_out_steps() -> None:
    """Its ranks decide together, and wait for no other replica."""
    run(4, _leaves_out)
