"""Steps of optimizers: who makes them, who leaves them out, and what becomes of residuals.

Every loop runs with the check that no gradient is lost or counted twice (``verify.conservation``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import launch, logged, run
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin import DCTError
from dct_plugin.config import DataParallelConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.plan import shards_of
from dct_plugin.integrations.host.attachment import start_reporting
from dct_plugin.integrations.host.gradient_use import Event, OptimizerGradients, Use
from dct_plugin.metrics import Metrics

VERIFY = {"every": 5, "action": "stop", "conservation": True}
KEYS = {"sparsity": 0.9, "min_numel": 16, "warmup_steps": 2, "sparsity_warmup_steps": 0, "verify": VERIFY}
LOCAL = {**KEYS, "feedback": "local"}


# -- the state machine ---


def test_only_reduced_gradients_are_used_and_every_state_ends() -> None:
    after = {(use, event): event.value.get(use, use) for use in Use for event in Event}
    changes = [change for event in Event for change in event.value.items()]
    assert {before for before, then in changes if then is Use.USED} == {Use.REDUCED}
    assert all(after[use, Event.CLOSE] is Use.IDLE for use in Use)
    assert all(after[use, Event.REDUCE] in (Use.REDUCED, Use.SKIPPED) for use in Use)
    assert after[Use.IDLE, Event.STEP] is after[Use.IDLE, Event.CLEAR] is Use.IDLE
    assert after[Use.CLEARED, Event.STEP] is after[Use.USED, Event.LEAVE_OUT] is Use.SKIPPED


def test_a_second_residual_covers_a_step_from_its_first_gradient_on() -> None:
    gradients = OptimizerGradients(None)
    gradients.add({"a": torch.zeros(1)}, covered=False)
    gradients.add({"b": torch.zeros(1)}, covered=True)
    assert not gradients.covered
    gradients.note(Event.STEP)
    gradients.note(Event.CLOSE)
    assert not gradients.reduced
    gradients.add({"a": torch.zeros(1)}, covered=True)
    assert gradients.covered


# -- loops under DDP ---


class Halves(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = batch(rank, step)
    return (model(x) - x[:, :8]).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def attached(
    make: Callable[[nn.Module], Any], section: dict[str, Any] = LOCAL, **more: Any
) -> tuple[nn.Module, Any, Any]:
    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    optimizers = make(model.module)
    return model, optimizers, dct_plugin.attach(model, optimizers, {"data_parallel": section}, **more)


def residuals(state: Any) -> dict[str, Tensor]:
    streams = state.state_dict()["reducer"]["streams"]
    return {name: each["residual"] for name, each in streams.items() if each["residual"] is not None}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def descend(model: nn.Module, optimizers: list[Any], rank: int, steps: range, scaler: Any = None) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()


def one(model: nn.Module) -> list[Any]:
    return [sgd(model.parameters())]


def two(model: nn.Module) -> list[Any]:
    return [sgd(model.first.parameters()), sgd(model.second.parameters())]


def fused(model: nn.Module) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)]


def a_scaler_skips_one_of_two(rank: int) -> None:
    for make, skipped in ((two, "first"), (fused, "")):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        model, optimizers, state = attached(make, scaler=scaler)
        descend(model, optimizers, rank, range(8), scaler)
        before, after = residuals(state), weights(model).clone()
        hook = model.module.first.weight.register_hook(lambda g: g * torch.inf)
        descend(model, optimizers, rank, range(8, 9), scaler)
        hook.remove()
        assert scaler.get_scale() == 32.0
        now = {name: 2.0 * each for name, each in residuals(state).items()}  # in the new unit
        for name, each in before.items():
            assert torch.equal(each, now[name]) == name.startswith(skipped), name
        assert torch.equal(weights(model), after) == (make is fused)
        descend(model, optimizers, rank, range(9, 14), scaler)
        assert state.steps.step == 13


def a_scaler_that_is_not_passed(rank: int) -> None:
    section, ends = {**KEYS, "feedback": "step_ahead"}, []
    for is_passed in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        more = {"scaler": scaler} if is_passed else {}
        with logged() as lines:
            model, optimizers, state = attached(lambda m: [sgd(m.parameters())], section, **more)
            descend(model, optimizers, rank, range(12), scaler)
        assert any("was not passed" in line for line in lines) == (not is_passed and rank == 0)
        state.state_dict()
        ends.append(weights(model))
    assert torch.equal(*ends)
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    loss = other.scale(loss_of(model, rank, 0))
    loss.backward()
    with pytest.raises(DCTError, match="two gradient scalers"):
        other.step(optimizers[0])


def a_scale_that_the_script_lowers(rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    model, optimizers, _ = attached(one, scaler=scaler)
    for step in range(12):
        descend(model, optimizers, rank, range(step, step + 1), scaler)
        if step % 3 == 2:
            scaler.update(scaler.get_scale() / 2)
    plain, same, other = attached(one)
    descend(plain, same, rank, range(12))
    torch.testing.assert_close(weights(model), weights(plain))
    assert other.steps.step == 12


def an_error_inside_a_step(rank: int) -> None:
    """The batch is dropped; the next one is rejected, and that is seen."""

    def fails(*_: Any) -> None:
        raise MemoryError

    model, optimizers, state = attached(one)
    (optimizer,) = optimizers
    descend(model, optimizers, rank, range(5))
    hook = optimizer.register_step_pre_hook(fails)
    with contextlib.suppress(MemoryError):
        descend(model, optimizers, rank, range(5, 6))
    hook.remove()
    for step in (6, 7):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
    optimizer.zero_grad()
    assert not any(each.any() for each in residuals(state).values())
    descend(model, optimizers, rank, range(8, 18))
    assert state.steps.step == 15


def optimizers_that_take_turns(rank: int) -> None:
    """Gradients of the part that does not step are cleared, or used a pass later."""
    for clears in (True, False):
        model, optimizers, state = attached(two)
        for step in range(20):
            loss_of(model, rank, step).backward()
            optimizers[step % 2].step()
            for optimizer in optimizers if clears else [optimizers[step % 2]]:
                optimizer.zero_grad()
        assert state.steps.step == 20


def a_rejected_batch(rank: int) -> None:
    """The first one is lost with what was left; from then on nothing is."""
    with logged() as lines:
        model, (optimizer,), state = attached(one)
        for step in range(24):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step % 6 != 5:
                optimizer.step()
            elif step > 6:
                before = residuals(state)
                optimizer.zero_grad()
                assert not all(map(torch.equal, before.values(), residuals(state).values()))
    said = [line for line in lines if "cleared without optimizer.step()" in line]
    assert len(said) == (rank == 0)
    assert state.steps.step == 20


def add_gradients(model: nn.Module, rank: int, step: int, total: Tensor) -> None:
    """Run a pass, and add this rank's gradients to ``total``."""
    loss_of(model, rank, step).backward()
    own = torch.autograd.grad(loss_of(model.module, rank, step), list(model.parameters()))
    total += torch.cat([each.reshape(-1) for each in own])


def sharpness_aware(rank: int) -> None:
    """The first of two passes only moves the weights; the step of the second one is in a wrapper."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.zero_grad()
            with torch.enable_grad():
                closure()
            self.inner.step()

    for in_closure in (True, False):
        model, (optimizer,), state = attached(lambda m: [Wrapper(sgd(m.parameters()))])
        start, accepted = weights(model), torch.zeros(20 * 64 + 64 + 64 * 8 + 8)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()

            second = functools.partial(add_gradients, model, rank, 100 + step, accepted)
            if in_closure:
                optimizer.step(second)
            else:
                optimizer.zero_grad()
                second()
                optimizer.inner.step()
        assert state.steps.step == 12
        held = {"first.weight": 0, "first.bias": 0, "second.weight": 0, "second.bias": 0, **residuals(state)}
        own = [held[n].reshape(-1) if isinstance(held[n], Tensor) else torch.zeros(p.numel())
               for n, p in model.module.named_parameters()]  # fmt: skip
        mean = (accepted - torch.cat(own)) / 2
        dist.all_reduce(mean)
        torch.testing.assert_close(start - weights(model), 0.05 * mean, rtol=1e-3, atol=1e-5)


def wrappers_of_torch(rank: int) -> None:
    """An optimizer inside has a share of the parameters, and a broadcast ends the step; or all of them, and
    an average of equal weights does.
    """
    section, ends = {**KEYS, "verify": {**VERIFY, "every": 1}}, []

    def shared(model: nn.Module, **options: bool) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3, **options)

    def averaged(model: nn.Module) -> Any:
        averager = PeriodicModelAverager(period=4, warmup_steps=2)
        return PostLocalSGDOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), averager)

    for make in (shared, functools.partial(shared, parameters_as_bucket_view=True), averaged):
        model = DistributedDataParallel(Halves())
        optimizer = make(model)
        state = dct_plugin.attach(model, optimizer, {"data_parallel": section})
        descend(model, [optimizer], rank, range(12))
        assert (state.steps.step, state.config.data_parallel.feedback.label()) == (12, "step_ahead")
        ends.append(weights(model))
    assert all(torch.equal(end, ends[0]) for end in ends)


def restored_weights(rank: int) -> None:
    """Other weights drop the residuals, averaged ones of an evaluation do not."""
    model, optimizers, state = attached(one)
    descend(model, optimizers, rank, range(4))
    best = {name: each.clone() for name, each in model.module.state_dict().items()}
    descend(model, optimizers, rank, range(4, 9))
    own, kept = {n: each.clone() for n, each in model.module.state_dict().items()}, residuals(state)
    model.module.load_state_dict(best)
    with torch.no_grad():
        loss_of(model, rank, 0)
    model.module.load_state_dict(own)
    model(batch(rank, 0))
    assert all(map(torch.equal, kept.values(), residuals(state).values()))
    model.module.load_state_dict(best)
    model(batch(rank, 0))
    assert not any(each.any() for each in residuals(state).values())
    descend(model, optimizers, rank, range(9, 15))


def a_script_that_averages_by_itself(rank: int) -> None:
    with logged() as lines:
        model, (optimizer,), _ = attached(one)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, rank, step).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    assert sum("nothing is compressed" in line for line in lines) == (rank == 0)


def states_that_torch_makes(rank: int) -> None:
    """``torch.distributed.checkpoint`` makes an optimizer's states by a step of its own."""
    with logged() as lines:
        model, (optimizer,), state = attached(lambda model: [torch.optim.AdamW(model.parameters())])
        get_state_dict(model, optimizer)
        descend(model, [optimizer], rank, range(3))
    assert state.steps.step == 3
    assert not any("all-reduce of gradients" in line for line in lines)


class Rivals(nn.Module):
    """Two parts that are trained in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 8), nn.Linear(20, 8)

    def forward(self, x: Tensor, part: str) -> Tensor:
        return self.get_submodule(part)(x)


def the_other_part_is_unused(rank: int) -> None:
    """Its optimizer has nothing to use, and nothing was cleared."""
    for set_to_none in (True, False):
        model = DistributedDataParallel(Rivals(), find_unused_parameters=True)
        optimizers = {name: sgd(each.parameters()) for name, each in model.module.named_children()}
        with logged() as lines:
            state = dct_plugin.attach(model, [*optimizers.values()], {"data_parallel": LOCAL})
            for step in range(12):
                for part, optimizer in optimizers.items():
                    optimizer.zero_grad(set_to_none)
                    x = batch(rank, step)
                    (model(x, part) - x[:, :8]).square().mean().backward()
                    optimizer.step()
        assert state.steps.step == 24
        assert not any("cleared" in line for line in lines)


def steps_within_the_backward_pass(rank: int) -> None:
    """FSDP2 with an optimizer for each parameter: one step per pass."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Halves()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = {parameter: sgd([parameter]) for parameter in model.parameters()}
    state = dct_plugin.attach(model, list(optimizers.values()), {"data_parallel": LOCAL})

    def steps(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(steps)
    for step in range(12):
        loss_of(model, rank, step).backward()
    assert state.steps.step == 12


LOOPS = [
    a_scaler_skips_one_of_two, a_scaler_that_is_not_passed, a_scale_that_the_script_lowers,
    an_error_inside_a_step, optimizers_that_take_turns, a_rejected_batch, sharpness_aware, wrappers_of_torch,
    restored_weights, a_script_that_averages_by_itself, states_that_torch_makes,
    the_other_part_is_unused, steps_within_the_backward_pass,
]  # fmt: skip


def _loops(rank: int, world_size: int) -> None:
    for loop in LOOPS:
        try:
            loop(rank)
        except Exception as error:
            raise AssertionError(loop.__name__) from error


@pytest.mark.slow
def test_every_loop_counts_its_steps_and_loses_nothing() -> None:
    run(2, _loops)


def _one_rank_makes_no_step(rank: int, world_size: int, left_out: int) -> None:
    model, (optimizer,), _ = attached(one)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step != left_out or rank == 0:
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [3, 4])
def test_ranks_that_are_steps_apart_stop(left_out: int) -> None:
    """In an exchange of gradients, or where one of them compares parameters after its step."""
    outcomes = launch(2, _one_rank_makes_no_step, left_out)
    assert [kind for kind, _ in outcomes] == ["error"] * 2
    for rank, (_, error) in enumerate(outcomes):
        other = f"rank {1 - rank} by {'-+'[rank]}1"
        apart = f"rank {rank}: ranks have made different numbers of optimizer steps ({other})"
        assert (apart if left_out == 3 else f"rank(s) [{1 - rank}] are exchanging other tensors") in error


# -- conservation ---


def _reduce(reducer: GradientReducer, rank: int, number: int, *, scatters: bool) -> None:
    """Make step ``number``."""
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(10 * number + rank))
    world_size = dist.get_world_size()
    if scatters:
        reducer.reduce_scatter([("w", tensor, shards_of("w", 3000, world_size))])
    else:
        reducer.all_reduce([("w", tensor)], scale=1 / world_size)
    reducer.end_step()


def _conserves(rank: int, world_size: int) -> list[str]:
    """Sums in two phases, and at owners; then a residual is changed."""
    said = []
    for exchange, scatters in itertools.product(("two_phase", "direct"), (False, True)):
        settings = DataParallelConfig.of({**LOCAL, "warmup_steps": 0}, exchange=exchange)
        reducer = GradientReducer(settings)
        step = functools.partial(_reduce, reducer, rank, scatters=scatters)
        for number in range(11):
            step(number)
        if rank == 1:
            residual = reducer.group.streams["w"].residual
            assert residual is not None
            residual.current.mul_(0.5)
        for number in range(11, 14):
            step(number)
        with pytest.raises(DCTError) as error:
            step(14)
        said.append(str(error.value))
    return said


@pytest.mark.slow
def test_a_residual_that_lost_gradients_is_named() -> None:
    for rank, said in enumerate(run(3, _conserves)):
        assert len(said) == 4
        for line in said:
            assert line.startswith(
                f"rank {rank}: step 15: gradients of the steps since the last check are lost"
            )


def _resumes(rank: int, world_size: int) -> list[int]:
    """Load a state between two checks: into a new reducer, and into the one that has saved it."""
    steps = []
    for exchange, scatters in itertools.product(("two_phase", "direct"), (False, True)):
        settings = DataParallelConfig.of({**LOCAL, "warmup_steps": 0}, exchange=exchange)
        saving = GradientReducer(settings)
        for number in range(8):
            _reduce(saving, rank, number, scatters=scatters)
        saved = copy.deepcopy(saving.state_dict())
        _reduce(saving, rank, 8, scatters=scatters)
        for reducer in (GradientReducer(settings), saving):
            reducer.load_state_dict(copy.deepcopy(saved))
            for number in range(8, 16):
                _reduce(reducer, rank, number, scatters=scatters)
            steps.append(reducer.group.step)
    return steps


@pytest.mark.slow
def test_residuals_of_a_loaded_state_are_conserved() -> None:
    for steps in run(3, _resumes):
        assert steps == [16] * 8


# -- processes ---


def test_a_forked_child_prints_no_summary(capfd: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(MetricsConfig(every=1), rank=0, world_size=2)
    finish = start_reporting(metrics)
    metrics.step(1)
    if not (child := os.fork()):
        finish()
        os._exit(0)
    os.waitpid(child, 0)
    assert "dct: 1 step" not in capfd.readouterr().out
    finish()
    assert "dct: 1 step" in capfd.readouterr().out
