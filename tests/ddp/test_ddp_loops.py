"""Loops of scripts under DDP with step-ahead, after a start of two steps.

In each of them every reduced parameter is displaced in its passes, gradients are those of the weights of the
pass, what ranks end with is equal, and no displaced weight is seen outside.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import logged, run
from support.watched import SECTION, Watched, equal_on_ranks
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from dct_plugin import DCTState, attach
from dct_plugin.data_parallel import weights

pytestmark = pytest.mark.slow

STEPS = 7


class Job:
    """The models that a loop trains, and what goes wrong in it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.faults: list[str] = []
        self.watched: list[Watched] = []
        self.states: list[DCTState] = []
        torch.manual_seed(0)

    def train(
        self, model: nn.Module, make: Any = torch.optim.AdamW, lr: float = 3e-3, scaler: Any = None
    ) -> tuple[DistributedDataParallel, Any]:
        ddp = DistributedDataParallel(model)
        optimizer = make(ddp.parameters(), lr=lr)
        state = attach(ddp, optimizer, SECTION, **({} if scaler is None else {"scaler": scaler}))
        assert isinstance(state, DCTState)
        self.states.append(state)
        self.watched.append(Watched(model, lambda: state._ahead, state.metrics))
        return ddp, optimizer

    def batch(self, step: int) -> Tensor:
        return torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * self.rank + step))

    def check(self, right: bool, what: str) -> None:
        if not right and what not in self.faults:
            self.faults.append(what)

    def real(self, when: str) -> None:
        """Note models that hold displaced weights where they should not."""
        self.check(not any(each.displaced() for each in self.watched), f"displaced {when}")


Loop = Callable[[Job], list[Tensor]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    """A script; returns what is equal on all ranks without the plugin."""
    LOOPS[function.__name__] = function
    return function


def net(out: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, out))


def loss_of(out: Tensor, x: Tensor) -> Tensor:
    return (out - x.detach().roll(1, 1)[:, : out.shape[1]]).square().mean()


def held(*models: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


# -- passes that are no plain training passes ---


def _gan(job: Job, *, frozen: bool) -> list[Tensor]:
    generator, of_generator = job.train(net())
    critic, of_critic = job.train(net(1), torch.optim.RMSprop)
    for step in range(STEPS):
        for parameter in critic.parameters():  # as the first WGAN did
            parameter.data.clamp_(-0.3, 0.3)
        x = job.batch(step)
        of_critic.zero_grad()
        (-critic(x).mean()).backward()
        critic(generator(x).detach()).mean().backward()
        job.real("after a backward pass")
        of_critic.step()
        of_generator.zero_grad()
        critic.requires_grad_(not frozen)
        with critic.no_sync() if frozen else contextlib.nullcontext():
            (-critic(generator(x)).mean()).backward()
        critic.requires_grad_(True)
        job.real("after a pass through a frozen model")
        of_generator.step()
    return held(generator, critic)


@loop
def gan_with_frozen_critic(job: Job) -> list[Tensor]:
    return _gan(job, frozen=True)


@loop
def gan_with_unfrozen_critic(job: Job) -> list[Tensor]:
    return _gan(job, frozen=False)


@loop
def attack_with_frozen_weights(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)
        ddp.requires_grad_(False)
        for _ in range(2):
            attacked = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(loss_of(ddp(attacked), x), attacked)
            x = x + 0.1 * slope.sign()
        ddp.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        optimizer.step()
    return held(ddp)


@loop
def training_in_eval_mode(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    ddp.eval()
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        optimizer.step()
    return held(ddp)


@loop
def a_pass_in_eval_mode_beside_one_that_trains(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        out = ddp(x)
        ddp.eval()
        other = ddp.module(x + 0.1)
        ddp.train()
        (loss_of(out, x) + (out - other).square().mean()).backward()
        job.real("after the backward pass of two passes")
        optimizer.step()
    return held(ddp)


@loop
def virtual_adversarial_training(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        clean = ddp(x)
        direction = (0.1 * torch.randn_like(x)).requires_grad_()
        (slope,) = torch.autograd.grad((ddp.module(x + direction) - clean.detach()).square().sum(), direction)
        attacked = ddp.module(x + 0.5 * slope / slope.norm())
        (loss_of(clean, x) + (attacked - clean.detach()).square().mean()).backward()
        optimizer.step()
    return held(ddp)


class Momentum(nn.Module):
    """An encoder, and its average, which the forward pass updates."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.key = net(), net()
        self.key.load_state_dict(self.encoder.state_dict())
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), weights(self):
            for mine, own in zip(self.key.parameters(), self.encoder.parameters(), strict=True):
                mine.lerp_(own, 0.1)
        return self.encoder(x) - self.key(x)


@loop
def momentum_encoder(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(Momentum())
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        optimizer.step()
    return held(ddp)


# -- writes ---


def _attacked_weights(job: Job, first: Callable[[DistributedDataParallel], Any]) -> list[Tensor]:
    """FGM: a second pass at weights that went up the gradient, through ``.data``."""
    ddp, optimizer = job.train(net())
    matrix = ddp.module[0].weight
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        with first(ddp):
            loss = loss_of(ddp(x), x)
            loss.backward()
        backup = matrix.data.clone()
        matrix.data.add_(matrix.grad, alpha=float(0.5 / matrix.grad.norm()))
        attacked = loss_of(ddp(x), x)
        job.check(float(attacked) > float(loss) + 1e-3, "the attack has no effect")
        attacked.backward()
        matrix.data = backup
        optimizer.step()
    return held(ddp)


@loop
def attack_on_weights(job: Job) -> list[Tensor]:
    return _attacked_weights(job, lambda _: contextlib.nullcontext())


@loop
def attack_on_weights_in_no_sync(job: Job) -> list[Tensor]:
    return _attacked_weights(job, lambda ddp: ddp.no_sync())


def _sharpness_aware(job: Job, first: Callable[[DistributedDataParallel], Any]) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)
        with first(ddp):
            loss_of(ddp(x), x).backward()
        old = {}
        with torch.no_grad():
            for parameter in ddp.parameters():
                old[parameter] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=0.05)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        for parameter in ddp.parameters():
            parameter.data = old[parameter]
        optimizer.step()
        optimizer.zero_grad()
    return held(ddp)


@loop
def sharpness_aware_steps(job: Job) -> list[Tensor]:
    # Without no_sync ranks climb by the same gradient.
    return _sharpness_aware(job, lambda _: contextlib.nullcontext())


@loop
def clipping_by_weights_and_decay_by_hand(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        (loss_of(ddp(x), x) + loss_of(ddp(x + 0.1), x)).backward()
        for parameter in ddp.parameters():
            most = 0.01 * parameter.data.norm().clamp(min=1e-3)
            parameter.grad.mul_((most / parameter.grad.norm().clamp(min=1e-9)).clamp(max=1.0))
            parameter.grad.add_(parameter.data, alpha=1e-3)
            parameter.data.mul_(0.999)
        optimizer.step()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.clamp_(-0.5, 0.5)
    return held(ddp)


# -- evaluation and averages between passes ---


def _evaluates(job: Job, ddp: nn.Module, x: Tensor, when: str) -> None:
    with weights(ddp):
        other = copy.deepcopy(ddp.module)
    with torch.no_grad():
        job.check(torch.equal(ddp(x), other(x)), f"evaluated at displaced weights {when}")


@loop
def accumulation_with_leftovers_and_evaluation(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        for micro in range(3):
            x = job.batch(10 * step + micro)
            with ddp.no_sync() if micro < 2 else contextlib.nullcontext():
                loss_of(ddp(x), x).backward()
            _evaluates(job, ddp, x, "within the accumulation")
            job.real("within the accumulation")
        optimizer.step()
        optimizer.zero_grad()
    with ddp.no_sync():
        loss_of(ddp(x), x).backward()
    job.real("after micro-batches that are left over")
    _evaluates(job, ddp, x, "after micro-batches that are left over")
    return held(ddp)


@loop
def a_rejected_batch_and_evaluation(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        if step in (3, STEPS - 1):
            job.real("after a rejected batch")
            _evaluates(job, ddp, x, "after a rejected batch")
            continue
        optimizer.step()
    optimizer.zero_grad()
    return held(ddp)


@loop
def averages_between_forward_and_backward_pass(job: Job) -> list[Tensor]:
    """As Lightning's ``on_before_zero_grad``."""
    ddp, optimizer = job.train(net())
    average = AveragedModel(ddp.module)
    for step in range(STEPS):
        x = job.batch(step)
        loss = loss_of(ddp(x), x)
        average.update_parameters(ddp.module)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return held(ddp, average)


@loop
def no_grad_within_autocast(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)
        with weights(ddp):
            other = copy.deepcopy(ddp.module)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(ddp(x), x)
            with torch.no_grad():
                job.check(torch.equal(ddp(x), other(x)), "no_grad sees displaced weights")
        loss.backward()
        optimizer.step()
    return held(ddp)


# -- kinds of models and outputs ---


class ReturnsParameter(nn.Module):
    """As CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.scale


@loop
def a_model_that_returns_a_parameter(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(ReturnsParameter())
    hooks = len(ddp.module.scale._backward_hooks or ())
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        out, scale = ddp(x)
        loss_of(out * scale, x).backward()
        optimizer.step()
    job.check(len(ddp.module.scale._backward_hooks or ()) == hooks, "hooks on a parameter")
    return held(ddp)


class Recurrent(nn.Module):
    """Lays out its weights anew in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        for parameter in self.lstm.parameters():  # as on a GPU
            parameter.data = parameter.data.clone()
        return self.out(self.lstm(x[:, None])[0][:, 0])


@loop
def lstm(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(Recurrent())
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        optimizer.step()
    return held(ddp)


# -- transforms, saved modules ---


@loop
def transforms(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    model = ddp.module
    for step in range(STEPS):
        x = job.batch(step)
        own = {name: p.detach() for name, p in model.named_parameters()}

        def loss(values: Any, a: Tensor) -> Tensor:
            return functional_call(model, values, (a,)).square().mean()

        whole = grad(loss)(own, x)
        each = vmap(grad(loss), in_dims=(None, 0))(own, x)
        for name in own:
            mean = each[name].mean(0)
            job.check(torch.allclose(whole[name], mean, atol=1e-6), "gradients of samples")
        job.real("after a transform")
        optimizer.zero_grad()
        slopes = vmap(jacfwd(lambda v: model(v[None])[0]))(x)
        (loss_of(ddp(x), x) + 0.0 * slopes.square().mean()).backward()
        optimizer.step()
    return held(ddp)


@loop
def scripted_exported_saved(job: Job) -> list[Tensor]:
    torch.manual_seed(0)
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    state = attach(ddp, optimizer, SECTION)
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        loss = loss_of(ddp(x), x)
        if step == STEPS - 1:
            with weights(model):
                file = io.BytesIO()
                torch.save(model, file)
                job.check(b"dct_plugin" not in file.getvalue(), "a saved module names the package")
                expected, clone = model.eval()(x), copy.deepcopy(model)
                for kind, other in (
                    ("scripted", torch.jit.script(model)),
                    ("traced", torch.jit.trace(model, x)),
                    ("exported", torch.export.export(model, (x,), strict=False).module()),
                    ("exported, strict", torch.export.export(model, (x,), strict=True).module()),
                    ("copied and scripted", torch.jit.script(clone)),
                ):
                    job.check(torch.equal(other(x), expected), kind)
                model.train()
        loss.backward()
        optimizer.step()
    state.close()
    return held(ddp)


# -- steps ---


@loop
def two_optimizers_under_one_scaler(job: Job) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    one, of_one = job.train(net(), scaler=scaler)
    two, of_two = job.train(net(), scaler=scaler)
    for step in range(STEPS):
        x = job.batch(step)
        of_one.zero_grad()
        of_two.zero_grad()
        scaler.scale(loss_of(one(x) + two(x), x)).backward()
        scaler.step(of_one)
        scaler.step(of_two)
        scaler.update()
    return held(one, two)


@loop
def closures(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(ddp(x), x)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    return held(ddp)


@loop
def a_failed_pass_is_tried_again(job: Job) -> list[Tensor]:
    """As a batch that was too large for the memory."""
    ddp, optimizer = job.train(net())
    with weights(ddp), contextlib.suppress(ZeroDivisionError):
        raise ZeroDivisionError
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        with contextlib.suppress(RuntimeError):
            ddp.module(x[:, :7])
        job.real("after a pass that failed")
        with contextlib.suppress(ZeroDivisionError), weights(ddp):
            raise ZeroDivisionError
        loss_of(ddp(x), x).backward()
        optimizer.step()
    return held(ddp)


@loop
def weights_of_an_earlier_step(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(net())
    for step in range(STEPS):
        x = job.batch(step)
        optimizer.zero_grad()
        loss_of(ddp(x), x).backward()
        optimizer.step()
        if step == 3:
            best = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict()))
        if step == 5:
            ddp.module.load_state_dict(best[0])
            optimizer.load_state_dict(best[1])
    return held(ddp)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 4))


def images(job: Job, step: int) -> Tensor:
    return job.batch(step)[:, :12].reshape(-1, 3, 2, 2).repeat(1, 1, 2, 2)


@loop
def channels_last(job: Job) -> list[Tensor]:
    ddp, optimizer = job.train(convolution().to(memory_format=torch.channels_last))
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(images(job, step).to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
    return held(ddp)


def _all_loops(rank: int, world_size: int) -> dict[str, list[str]]:
    """The faults, by loop."""
    wrong = {}
    for name, function in LOOPS.items():
        job = Job(rank)
        ends = function(job)
        faults = job.faults + ([] if equal_on_ranks(ends) else ["ranks differ"])
        for watched, state in zip(job.watched, job.states, strict=True):
            faults += watched.faults()
            state.close()
        if faults:
            wrong[name] = faults
        dist.barrier()
    return wrong


def test_every_loop() -> None:
    assert run(2, _all_loops) == [{}, {}]


def _named(
    rank: int, world_size: int, before: torch.memory_format, after: torch.memory_format
) -> tuple[list[str], float | None]:
    """Trains parameters that are never displaced, and the log lines that say so."""
    job = Job(rank)
    ddp, optimizer = job.train(convolution().to(memory_format=before))
    with logged() as lines:
        for step in range(STEPS):
            if step == 1:  # DDP goes on to lay out gradients as the weights were
                ddp.to(memory_format=after)
            optimizer.zero_grad()
            ddp(images(job, step)).square().mean().backward()
            optimizer.step()
    share = job.states[0].metrics.summary().classes["gradient/displaced"].density
    job.states[0].close()
    return [line for line in lines if "not displaced" in line], share


@pytest.mark.parametrize("formats", itertools.permutations((torch.contiguous_format, torch.channels_last)))
def test_tensors_that_are_not_displaced_are_named_once(formats: tuple[torch.memory_format, ...]) -> None:
    (lines, share), (others, _) = run(2, _named, *formats)
    (line,) = lines
    assert not others
    assert "1 of 2 tensors" in line
    assert "0.weight" in line
    assert "not contiguous" in line
    assert share == pytest.approx(0.5)


class Permuted(nn.Module):
    """A weight that is dense, and contiguous in no memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 5).permute(3, 2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sin().sum()


def _orders(rank: int, world_size: int) -> list[bool]:
    """Return whether residuals have their gradients' order, and displaced weights follow it, for weights that
    are not contiguous.
    """
    job, right = Job(rank), []
    model = Permuted()
    weight = model.weight
    ddp, optimizer = job.train(model, torch.optim.SGD, lr=0.5)
    (state,), local = job.states, [torch.empty(0)]
    weight.register_hook(local.append)
    for step in range(4):
        before = weight.detach().clone()
        loss = ddp(torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * rank + step)))
        reducer, ahead = state.reducer(weight.device), state._ahead
        residual = functools.partial(
            reducer.group.streams.residual_of, "weight", "pass", weight.device, committed=False
        )
        if step == 3:
            moved = (weight.detach() - before).as_strided((weight.numel(),), (1,))
            coefficient = ahead.coefficients.of("weight")
            right.append(
                bool(moved.any()) and torch.allclose(moved, -0.5 * coefficient * residual(), atol=1e-6)
            )
        optimizer.zero_grad()
        loss.backward()
        if step == 2:  # the first step that is not dense
            in_order = residual().as_strided(weight.shape, weight.stride())
            held_back = in_order.abs() > 0.01 * local[-1].abs()  # others were sent, but for roundings
            right += [bool(held_back.any()), torch.equal(in_order[held_back], local[-1][held_back])]
        optimizer.step()
    job.states[0].close()
    return right


def test_residuals_have_the_order_of_memory() -> None:
    assert run(2, _orders) == [[True] * 3] * 2


# -- weights that forward passes write ---


class Constrained(nn.Linear):
    """Limits the norm of its rows in every pass, as EEGNet does."""

    max_norm = 0.2

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, self.max_norm)
        return super().forward(input)


def _constrained(rank: int, world_size: int) -> tuple[float, list[str], bool, list[str]]:
    job, constrained = Job(rank), Constrained(48, 48)
    with logged() as lines:
        ddp, optimizer = job.train(
            nn.Sequential(nn.Linear(16, 48), nn.Tanh(), constrained, nn.Linear(48, 16))
        )
        norm = 0.0
        for step in range(STEPS):
            x = job.batch(step)
            optimizer.zero_grad()
            out = ddp(x)
            norm = max(norm, float(constrained.weight.norm(dim=1).max()))
            displaced = job.watched[0].displaced()
            loss_of(out, x).backward()
            optimizer.step()
    return norm, displaced, equal_on_ranks(held(ddp)), [line for line in lines if "max_norm" in line]


def test_weights_that_forward_passes_limit_are_not_displaced() -> None:
    for norm, displaced, is_equal, lines in run(2, _constrained):
        assert norm < 0.2001
        assert displaced == ["0.weight", "0.bias", "3.weight", "3.bias"]
        assert is_equal
        (line,) = lines
        assert line.startswith("dct: step-ahead: weights of 2 get local feedback")
