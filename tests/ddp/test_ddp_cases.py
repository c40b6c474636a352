"""Loops of scripts with torch's DistributedDataParallel.

With the hook at sparsity 0 each gives the same bits as without. With step-ahead, after a start of two steps,
its reduced parameters are displaced in their passes, gradients are those of the weights of the pass, and what
ranks end with is equal.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run
from support.watched import Watched, equal_on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dct_plugin import DCTState, attach

pytestmark = pytest.mark.slow

EXACT = {"data_parallel": {"sparsity": 0.0, "value_dtype": "fp32", "min_numel": 100}}

Wrap = Callable[..., Any]
Case = Callable[[Wrap, int], list[Tensor]]
CASES: dict[str, Case] = {}
AHEAD = {
    "data_parallel": {
        "sparsity": 0.9,
        "min_numel": 100,
        "warmup_steps": 2,
        "sparsity_warmup_steps": 0,
        "feedback": "step_ahead",
        "verify": {"every": 3, "action": "stop", "conservation": True},
    }
}
#: Models that wait for an optimizer to be attached with, and those that were attached.
WAITING: list[DistributedDataParallel] = []
WATCHED: list[tuple[Watched, DCTState]] = []


def case(function: Case) -> Case:
    """A script of two ranks: ``wrap(model, **options)`` makes the DDP model; returns what it ends with."""
    CASES[function.__name__] = function
    return function


class Blocks(nn.Module):
    """Some layers, each of which may be computed once more in the backward pass."""

    def __init__(self, recompute: bool | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        widths = [20, 60, 40, 30]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(30, 1)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute)
        return self.head(x).squeeze(1)


class Branches(nn.Module):
    """One branch in even steps, another in odd ones, and one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(20, 40)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.last = nn.Linear(40, 1)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.last(torch.tanh(self.branches[branch](torch.tanh(self.first(x))))).squeeze(1)


def batch(rank: int, step: int, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 20, generator=generator).requires_grad_(grad)


def loss_of(outputs: Tensor, x: Tensor) -> Tensor:
    return (outputs - x.detach()[:, 0]).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    parameters = (p for p in model.parameters() if p.requires_grad)
    return ready(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


def ready(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Attach the models of this optimizer that wait for it, for step-ahead."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for ddp in [each for each in WAITING if own & set(map(id, each.parameters()))]:
        WAITING.remove(ddp)
        state = attach(ddp, optimizer, AHEAD)
        assert isinstance(state, DCTState)
        WATCHED.append((Watched(ddp.module, lambda state=state: state._ahead, state.metrics), state))
    return optimizer


def descend(
    ddp: nn.Module, rank: int, *, steps: int = 5, inputs_need_gradients: bool = False, **more: Any
) -> list[Tensor]:
    """Plain training; ``more`` are further arguments of the model."""
    optimizer = sgd(ddp)
    for step in range(steps):
        x = batch(rank, step, inputs_need_gradients)
        optimizer.zero_grad()
        loss_of(ddp(x, **more), x).backward()
        optimizer.step()
    return weights(ddp)


def weights(*models: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


class Spectral(nn.Module):
    """A complex weight, or the same one held as a real tensor."""

    def __init__(self, *, is_complex: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        start = 0.05 * torch.randn(20, 30, 2)
        self.weight = nn.Parameter(torch.view_as_complex(start) if is_complex else start)
        self.last = nn.Linear(30, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.last((x.to(weight.dtype) @ weight).abs())


# -- how gradients come ---


@case
def plain(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(wrap(Blocks()), rank)


@case
def small_buckets(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(wrap(Blocks(), bucket_cap_mb=0.005), rank)


@case
def views_of_buckets(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(wrap(Blocks(), gradient_as_bucket_view=True), rank)


@case
def checkpointing_reentrant(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(wrap(Blocks(recompute=True)), rank, inputs_need_gradients=True)


@case
def checkpointing_reentrant_static(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Blocks(recompute=True), static_graph=True)
    return descend(ddp, rank, inputs_need_gradients=True)


@case
def checkpointing(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(wrap(Blocks(recompute=False)), rank)


@case
def checkpointing_static(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(wrap(Blocks(recompute=False), static_graph=True), rank)


@case
def static_graph(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(wrap(Blocks(), static_graph=True, bucket_cap_mb=0.005), rank)


@case
def static_graph_with_unused_parameters(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(wrap(Branches(), static_graph=True), rank, branch=1)


@case
def find_unused_parameters(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Branches(), find_unused_parameters=True, bucket_cap_mb=0.005)
    optimizer = sgd(ddp)
    for step in range(6):
        x = batch(rank, step)
        optimizer.zero_grad()
        loss_of(ddp(x, step % 2), x).backward()
        optimizer.step()
    return weights(ddp)


@case
def branches_that_differ_between_ranks(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Branches(), find_unused_parameters=True)
    optimizer = sgd(ddp)
    for step in range(6):
        x = batch(rank, step)
        optimizer.zero_grad()
        loss_of(ddp(x, (step + rank) % 2), x).backward()
        optimizer.step()
    return weights(ddp)


@case
def no_sync(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Blocks())
    optimizer = sgd(ddp)
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(3):
            x = batch(rank, 10 * step + micro)
            with ddp.no_sync() if micro < 2 else contextlib.nullcontext():
                loss_of(ddp(x), x).backward()
        optimizer.step()
    return weights(ddp)


@case
def no_sync_around_the_forward_pass_alone(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Blocks())
    optimizer = sgd(ddp)
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(rank, 2 * step), batch(rank, 2 * step + 1)
        with ddp.no_sync():
            loss = loss_of(ddp(x), x)
        loss.backward()
        loss_of(ddp(y), y).backward()
        optimizer.step()
    return weights(ddp)


@case
def evaluation_between_steps(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Blocks())
    optimizer = sgd(ddp)
    for step in range(5):
        x = batch(rank, step)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        ddp.eval()
        with torch.no_grad():
            ddp(x)
        ddp.train()
        optimizer.step()
    return weights(ddp)


# -- more than one pass through a graph, or model ---


@case
def retain_graph(wrap: Wrap, rank: int) -> list[Tensor]:
    """torch synchronizes the first of two passes through a graph."""
    ddp = wrap(Blocks())
    found = []
    for step in range(5):
        x = batch(rank, step)
        for p in ddp.parameters():
            p.grad = None
        loss = loss_of(ddp(x), x)
        loss.backward(retain_graph=True)
        found += [p.grad.clone() for p in ddp.parameters()]
        loss.backward()
        found += [p.grad.clone() for p in ddp.parameters()]
    return found


@case
def double_backward(wrap: Wrap, rank: int) -> list[Tensor]:
    """A penalty on the gradient of the inputs, as of WGAN-GP."""
    ddp = wrap(Blocks())
    optimizer = sgd(ddp)
    for step in range(5):
        x = batch(rank, step, grad=True)
        optimizer.zero_grad()
        outputs = ddp(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        (loss_of(outputs, x) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
    return weights(ddp)


@case
def two_models(wrap: Wrap, rank: int) -> list[Tensor]:
    """One loss of two models: one backward pass fills the buckets of both."""
    one, two = wrap(Blocks(seed=1)), wrap(Blocks(seed=2))
    optimizers = sgd(one), sgd(two)
    for step in range(5):
        x = batch(rank, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(one(x) + two(x), x).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(one, two)


@case
def two_models_in_turn(wrap: Wrap, rank: int) -> list[Tensor]:
    one, two = wrap(Blocks(seed=1)), wrap(Blocks(seed=2))
    optimizers = sgd(one), sgd(two)
    for step in range(5):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            x = batch(rank, step)
            optimizer.zero_grad()
            loss_of(model(x), x).backward()
            optimizer.step()
    return weights(one, two)


@case
def generator_and_critic(wrap: Wrap, rank: int) -> list[Tensor]:
    torch.manual_seed(3)
    generator, critic = wrap(nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 20))), wrap(Blocks())
    of_generator, of_critic = sgd(generator), sgd(critic)
    for step in range(5):
        x = batch(rank, step)
        of_critic.zero_grad()
        (critic(generator(x).detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        for p in critic.parameters():
            p.requires_grad_(False)
        with critic.no_sync():
            (-critic(generator(x)).mean()).backward()
        for p in critic.parameters():
            p.requires_grad_(True)
        of_generator.step()
    return weights(generator, critic)


# -- what scripts do to parameters and gradients ---


@case
def frozen_layers(wrap: Wrap, rank: int) -> list[Tensor]:
    model = Blocks()
    model.layers[0].requires_grad_(False)
    ddp = wrap(model)
    found = descend(ddp, rank, steps=3)
    model.layers[1].requires_grad_(False)  # DDP is made anew when the set of parameters changes
    return found + descend(wrap(model), rank, steps=3)


def clamp_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


@case
def post_accumulate_clamps(wrap: Wrap, rank: int) -> list[Tensor]:
    """Of a gradient before it is added to the parameter's, and of the parameter's before DDP sums it."""
    model = Blocks()
    for p in model.layers.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    ddp = wrap(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp_gradient)
    return descend(ddp, rank)


@case
def clipping_and_sets_to_zero(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Blocks(), gradient_as_bucket_view=True)
    optimizer = ready(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    for step in range(5):
        x = batch(rank, step)
        optimizer.zero_grad(set_to_none=False)
        loss_of(ddp(x), x).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
    return weights(ddp)


@case
def autocast(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Blocks())
    optimizer = sgd(ddp)
    for step in range(5):
        x = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(ddp(x), x)
        loss.backward()
        optimizer.step()
    return weights(ddp)


@case
def compiled_inside(wrap: Wrap, rank: int) -> list[Tensor]:
    """With the backend that needs no compiler for C."""
    return descend(wrap(torch.compile(Blocks(), backend="aot_eager")), rank)


@case
def compiled_outside(wrap: Wrap, rank: int) -> list[Tensor]:
    return descend(torch.compile(wrap(Blocks()), backend="aot_eager"), rank)


@case
def compiled_optimizer(wrap: Wrap, rank: int) -> list[Tensor]:
    """The optimizer's step is compiled, and its hooks are not."""
    ddp = wrap(Blocks())
    optimizer = sgd(ddp)
    step_compiled = torch.compile(optimizer.step, backend="aot_eager")
    for step in range(5):
        x = batch(rank, step)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        step_compiled()
    return weights(ddp)


@case
def sparse_embeddings(wrap: Wrap, rank: int) -> list[Tensor]:
    """Sparse gradients in a bucket of their own, also in the last one."""
    torch.manual_seed(4)
    found = []
    for layers in ([nn.EmbeddingBag(30, 20, sparse=True), Blocks()], [nn.EmbeddingBag(30, 20, sparse=True)]):
        ddp = wrap(nn.Sequential(*layers))
        optimizer = sgd(ddp)
        for step in range(5):
            rows = torch.randint(30, (8, 5), generator=torch.Generator().manual_seed(10 * rank + step))
            optimizer.zero_grad()
            ddp(rows).square().mean().backward()
            optimizer.step()
        found += weights(ddp)
    return found


@case
def complex_parameters(wrap: Wrap, rank: int) -> list[Tensor]:
    ddp = wrap(Spectral(is_complex=True), bucket_cap_mb=0.005)
    return descend(ddp, rank)


@case
def shared_weights(wrap: Wrap, rank: int) -> list[Tensor]:
    model = Blocks()
    model.layers.append(nn.Sequential(nn.Linear(30, 30), nn.Tanh()))
    model.layers.append(model.layers[-1])
    return descend(wrap(model), rank)


@case
def a_failed_forward_pass(wrap: Wrap, rank: int) -> list[Tensor]:
    """A batch is left out on all ranks, after its forward pass."""
    ddp = wrap(Blocks())
    optimizer = sgd(ddp)
    for step in range(6):
        x = batch(rank, step)
        optimizer.zero_grad()
        loss = loss_of(ddp(x), x)
        if step == 3:
            continue
        loss.backward()
        optimizer.step()
    return weights(ddp)


def hooked(model: nn.Module, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **options)
    DCTState(EXACT).register(ddp)
    return ddp


def _all_cases(rank: int, world_size: int) -> dict[str, str]:
    """The faults, by case."""
    wrong = {}
    for name, function in CASES.items():
        expected = function(DistributedDataParallel, rank)
        dist.barrier()
        found = function(hooked, rank)
        same = len(found) == len(expected) and all(map(torch.equal, found, expected))
        if not same or not all(bool(each.isfinite().all()) for each in found):
            wrong[name] = "differs from dense"
        torch._dynamo.reset()
    return wrong


def test_every_case_is_bitwise_dense() -> None:
    assert run(2, _all_cases) == [{}, {}]


def waiting(model: nn.Module, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **options)
    WAITING.append(ddp)
    return ddp


#: Has no optimizer.
NOT_AHEAD = {"retain_graph"}
#: Trained for too few steps, by sparse gradients, or complex.
NEVER_DISPLACED = {"frozen_layers", "sparse_embeddings", "complex_parameters"}


def _all_ahead(rank: int, world_size: int) -> dict[str, list[str]]:
    """The faults, by case."""
    wrong = {}
    for name, function in CASES.items():
        if name in NOT_AHEAD:
            continue
        ends = function(waiting, rank)
        faults = [] if equal_on_ranks(ends) else ["ranks differ"]
        for watched, state in WATCHED:
            faults += watched.faults(covered=None if name in NEVER_DISPLACED else 1.0)
            state.close()
        if faults:
            wrong[name] = faults
        WAITING.clear()
        WATCHED.clear()
        torch._dynamo.reset()
    return wrong


def test_every_case_with_step_ahead() -> None:
    assert run(2, _all_ahead) == [{}, {}]


def _spectral(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], float]:
    """A thresholded complex weight, the same one held as a real tensor, and one beside displaced weights."""
    keys = {"sparsity": 0.9, "min_numel": 20, "warmup_steps": 2, "sparsity_warmup_steps": 0}
    ends, ratio = [], 0.0
    for is_complex, feedback in ((True, "local"), (False, "local"), (True, "step_ahead")):
        data = {**keys, "nonfinite_action": "skip", "verify": {"every": 2}, "feedback": feedback}
        ddp = DistributedDataParallel(Spectral(is_complex=is_complex))
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        state = attach(ddp, optimizer, {"data_parallel": data})
        for step in range(8):
            x = batch(rank, step)
            optimizer.zero_grad()
            loss_of(ddp(x), x).backward()
            optimizer.step()
        ratio = state.metrics.summary().classes["gradient"].ratio
        ends.append([torch.view_as_real(p) if p.is_complex() else p for p in weights(ddp)])
    return ends[0], ends[1], ratio


def test_a_complex_parameter_trains_as_a_real_one() -> None:
    for of_complex, of_real, ratio in run(2, _spectral):
        assert all(map(torch.equal, of_complex, of_real))
        assert ratio > 2
