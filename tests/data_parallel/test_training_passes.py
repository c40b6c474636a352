"""A backward pass uses the weights that its forward pass used; all else sees the weights themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dct_plugin.data_parallel.step_ahead.add_on import StepAhead, Unsent
from dct_plugin.data_parallel.step_units import units_of


class Net(nn.Module):
    """Weights that a backward pass reads: of a convolution, a product, a norm; and those of a look-up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 16)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.matrix = nn.Parameter(0.3 * torch.randn(16, 16))
        self.out = nn.Linear(16, 2)
        self.reentrant: bool | None = None
        self.fails = False

    def block(self, h: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.conv(h[:, None]).mean(1)) @ self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.embedding(torch.arange(len(x)) % 11)
        if self.reentrant is None:
            h = self.block(h)
        else:
            h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        if self.fails:
            raise ValueError("in the forward pass")
        return self.out(torch.tanh(h))


class Job:
    """A model at displaced weights, and a copy that has them as its own."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        named = dict(self.model.named_parameters())
        self.residual = torch.ones(256)
        self.ahead = StepAhead(
            named.items(),
            units_of(self.optimizer),
            Unsent(lambda name: self.residual[: named[name].numel()]),
            world_size=2,
            coefficient=1.0,
        )
        for name, parameter in named.items():
            self.ahead.observe([(name, torch.randn(parameter.numel()))])
        self.ahead.end_step(skipped=False)
        self.ahead.attach(self.model, self.optimizer)
        self.weights = self.held()
        self.plain = copy.deepcopy(self.model)  # copies have no hooks
        self.ahead.displace()
        for mine, displaced in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            mine.data.copy_(displaced.data)
        self.ahead.restore()
        self.x = torch.randn(6, 16)

    def held(self) -> Tensor:
        return torch.cat([parameter.data.reshape(-1) for parameter in self.model.parameters()])

    @property
    def restored(self) -> bool:
        return torch.equal(self.held(), self.weights)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def first(out: Tensor) -> Tensor:
    return out[:, 0].square().mean()


def second(out: Tensor) -> Tensor:
    return out[:, 1].square().mean()


# What a script does between a forward and a backward pass, or with several of them.


def no_grad(model: Any, x: Tensor) -> None:
    out = model(x)
    with torch.no_grad():
        model(x)
    first(out).backward()


def evaluation(model: Any, x: Tensor) -> None:
    out = model(x)
    model.eval()
    model(x)
    model.train()
    first(out).backward()


def saved(model: Any, x: Tensor) -> None:
    out = model(x)
    model.state_dict()
    with torch.no_grad():
        model(x)
    model.norm.state_dict()
    first(out).backward()


def of_the_input(model: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = model(x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    first(out).backward()


def penalty(model: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    first(model(x.detach())).backward()  # frees its own graph
    with torch.no_grad():
        model(x)
    slope.square().sum().backward()  # does not pass the output


def two_losses(model: Any, x: Tensor) -> None:
    out = model(x)
    first(out).backward(retain_graph=True)
    second(out).backward()


def two_passes(model: Any, x: Tensor) -> None:
    real, fake = model(x), model(-x)
    first(real).backward()
    second(fake).backward()


def two_passes_one_loss(model: Any, x: Tensor) -> None:
    real, fake = model(x), model(-x)
    (first(real) + second(fake)).backward()


def last_pass_first(model: Any, x: Tensor) -> None:
    real, fake = model(x), model(-x)
    second(fake).backward()
    with torch.no_grad():
        model(x)
    first(real).backward()


def recomputed(model: Any, x: Tensor) -> None:
    for model.reentrant in (False, True):
        out = model(x)
        with torch.no_grad():
            model(x)
        first(out).backward()


def failed_between(model: Any, x: Tensor) -> None:
    kept = model(x)
    for _ in range(2):
        model.fails = True
        with pytest.raises(ValueError, match="in the forward pass"):
            model(x)
        with torch.no_grad(), pytest.raises(ValueError, match="in the forward pass"):
            model(x)
        model.fails = False
    first(kept).backward()


@pytest.mark.parametrize(
    "script",
    [
        no_grad,
        evaluation,
        saved,
        of_the_input,
        penalty,
        two_losses,
        two_passes,
        two_passes_one_loss,
        last_pass_first,
        recomputed,
        failed_between,
    ],
)
def test_gradients_are_those_of_the_weights_of_the_forward_pass(script: Callable[..., None]) -> None:
    job = Job()
    seen = _weights_of_other_passes(job)
    script(job.model, job.x)
    script(job.plain, job.x)
    found, expected = gradients(job.model), gradients(job.plain)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert all(seen)
    job.optimizer.register_step_pre_hook(lambda *_: seen.append(job.restored))
    job.optimizer.step()
    assert seen[-1]


def _weights_of_other_passes(job: Job) -> list[bool]:
    """Return a list that says of each pass without gradients if it found the weights themselves."""
    noted: list[bool] = []

    def before(module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            noted.append(job.restored)

    job.model.register_forward_pre_hook(before)
    return noted


def test_the_weights_return_at_the_end_of_each_backward_pass() -> None:
    """Clipping by the weights' norms, or decay by hand, reads them before the step."""
    job = Job()
    real, fake = job.model(job.x), job.model(-job.x)
    assert not job.restored
    first(real).backward(retain_graph=True)
    assert job.restored
    torch.ones(1, requires_grad=True).sum().backward()  # of something else
    assert job.restored
    (first(real) + second(fake)).backward()
    assert job.restored
    job.model.requires_grad_(False)
    first(job.model(job.x.clone().requires_grad_())).backward()  # a generator's step, or an attack
    assert job.restored


def test_a_pass_after_a_backward_pass_sees_what_was_written() -> None:
    """As of an attack on weights through ``.data``, which changes no version counter."""
    job = Job()
    matrix, written = job.model.matrix, torch.randn(16, 16)
    first(job.model(job.x)).backward()
    backup = matrix.data.clone()
    matrix.data.add_(written)
    job.model(job.x)
    assert torch.equal(matrix.data - job.plain.matrix.data, written) or torch.allclose(
        matrix.data - job.plain.matrix.data, written, atol=1e-6
    )
    job.model.zero_grad()
    first(job.model(job.x)).backward()
    matrix.data = backup
    assert job.restored
    job.optimizer.step()


def test_open_graphs_keep_their_displaced_weights() -> None:
    """Gradients were reduced in between, which changes residuals."""
    job = Job()
    real, fake = job.model(job.x), job.model(-job.x)
    shown = job.held()
    first(real).backward()
    job.residual.mul_(3.0)
    job.ahead.observe([("matrix", torch.randn(256))])
    again = job.model(job.x)
    assert torch.equal(job.held(), shown)
    (second(fake) + first(again)).backward()
    job.model(job.x)
    assert torch.equal(job.held(), shown)
    job.optimizer.step()
    job.model(job.x)
    assert not torch.equal(job.held(), shown)


def test_the_weights_return_after_an_error() -> None:
    job = Job()
    job.model.fails = True
    with pytest.raises(ValueError, match="in the forward pass"):
        job.model(job.x)
    assert job.restored
    job.model.fails = False

    def fail(_: Tensor) -> None:
        raise ValueError("in the backward pass")

    out = job.model(job.x)
    job.model.matrix.register_hook(fail)
    with pytest.raises(ValueError, match="in the backward pass"):
        first(out).backward()
    assert job.restored


def test_an_optimizer_steps_between_two_backward_passes() -> None:
    """The second pass does not read its parameter."""
    job = Job()
    job.ahead.detach()
    stepped = job.model.embedding.weight
    others = [p for p in job.model.parameters() if p is not stepped]
    one, other = torch.optim.SGD([stepped], lr=0.1), torch.optim.SGD(others, lr=0.1)
    job.ahead.attach(job.model, one, other)
    for model in (job.model, job.plain):
        out = model(job.x)
        first(out).backward(retain_graph=True, inputs=[model.embedding.weight])
        if model is job.model:
            one.step()
        second(out).backward(inputs=[p for p in model.parameters() if p is not model.embedding.weight])
    found, expected = gradients(job.model), gradients(job.plain)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


class Manual(nn.Module):
    """A forward pass that makes two optimizer steps, as Lightning's manual optimization does."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self.job = job.model, job
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> None:
        for _ in range(2):
            self.seen.append(self.job.restored)
            self.model.zero_grad()
            first(self.model(x)).backward()
            self.seen.append(self.job.restored)
            self.job.optimizer.step()
            self.job.weights = torch.cat(
                [self.job.ahead.weight(parameter).reshape(-1) for parameter in self.model.parameters()]
            )


def test_a_step_within_a_forward_pass_displaces_again() -> None:
    job = Job()
    job.ahead.detach()
    manual = Manual(job)
    job.ahead.attach(manual, job.optimizer)
    manual(job.x)
    assert manual.seen == [False] * 4
    with torch.no_grad():
        assert not manual.job.restored
    torch.ones(1, requires_grad=True).sum().backward()
    assert job.restored


@pytest.mark.parametrize("by_keyword", [False, True])
def test_the_optimizer_steps_the_weights_after_the_passes_of_its_closure(by_keyword: bool) -> None:
    job, other = Job(), Job()
    other.ahead.detach()

    def closure(model: Any) -> Tensor:
        loss = first(model(job.x))
        loss.backward(retain_graph=True)
        return loss

    loss = closure(job.plain)
    for mine, theirs in zip(other.model.parameters(), job.plain.parameters(), strict=True):
        mine.grad = theirs.grad
    other.optimizer.step()
    step: Any = job.optimizer.step
    run = lambda: closure(job.model)  # noqa: E731
    assert torch.equal(step(closure=run) if by_keyword else step(run), loss)
    assert torch.equal(job.held(), other.held())
