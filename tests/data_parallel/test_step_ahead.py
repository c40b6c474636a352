"""Step-ahead error feedback without a host: second moments, units, and where passes run."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dct_plugin.compression.feedback import ScratchBuffers
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer, step_units, weights
from dct_plugin.data_parallel.plan import MIN_SHARD, shards_in
from dct_plugin.data_parallel.step_ahead.add_on import StepAhead, StepAheadAddOn, Unsent, displacement
from dct_plugin.data_parallel.step_ahead.residual_coefficients import INTERVAL
from dct_plugin.data_parallel.step_ahead.second_moments import (
    LIMIT,
    Moments,
    SecondMoments,
    _add_steps,
    sizes,
)
from dct_plugin.data_parallel.step_units import StepUnit, units_of
from dct_plugin.errors import ConfigError, DCTError
from dct_plugin.kernels import displacement as kernels
from dct_plugin.kernels.displacement import Displacement, SecondMoment, Squares, denominator
from dct_plugin.kernels.reference import ReferenceBackend


def rank_one(step: int) -> Tensor:
    """A gradient whose square is an outer product, the same one at all steps but for a factor."""
    rows, columns = torch.linspace(0.5, 2.0, 6), torch.linspace(1.0, 3.0, 8)
    signs = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).sign()
    return signs * (1.0 + 0.3 * step) * torch.outer(rows, columns)


def fresh(shape: tuple[int, ...], *, missed: int = 0) -> Moments:
    return Moments(shape, torch.zeros(2, sum(sizes(shape)), dtype=torch.float32), missed=missed)


def add(moments: Moments, gradient: Tensor) -> None:
    ReferenceBackend().add_squares([moments.squares(gradient)])


def end_step(moments: Moments, *, skipped: bool = False, decay: float | None = None) -> None:
    if not skipped:
        _add_steps(moments.memory, [moments], decay)
    moments.memory[1].zero_()


def denominators(moments: Moments, numel: int, *, decay: float | None, eps: float) -> Tensor:
    return denominator(moments.moment(StepUnit(1.0, True, decay, eps)), torch.empty(numel))


def displaced(
    weight: Tensor, expected: Any, moments: Any, unit: StepUnit, *, out: Tensor, **settings: Any
) -> Tensor:
    job = displacement(weight.view(-1), expected, moments, unit, out=out.view(-1), **settings)
    ReferenceBackend().displace([job])
    return out


# -- second moments ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_those_of_adam(dtype: torch.dtype) -> None:
    """Factored means are exact where the second moment has rank 1."""
    weight = nn.Parameter(torch.zeros(6, 8))
    adam, moments = torch.optim.Adam([weight], betas=(0.9, 0.95), eps=0.01), fresh((6, 8))
    assert torch.equal(denominators(moments, 48, decay=0.95, eps=1.0), torch.full((48,), torch.inf))
    for step in range(5):
        gradient = rank_one(step).to(dtype)
        weight.grad = gradient.float()
        adam.step()
        add(moments, gradient.view(-1))
        end_step(moments, decay=0.95)
    second = adam.state[weight]["exp_avg_sq"] / (1 - 0.95**5)
    found = denominators(moments, 48, decay=0.95, eps=0.01).view(6, 8)
    torch.testing.assert_close(
        found, second.sqrt() + 0.01, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=0
    )


def test_moments_of_a_sum_and_of_steps_that_it_has_not_seen() -> None:
    moments = fresh((6, 8))
    late = fresh((6, 8), missed=6)
    for each in (moments, late):
        for _ in range(2):
            add(each, rank_one(0).view(-1))
            end_step(each, decay=None)
    expected = rank_one(0).abs().view(-1) * 2**0.5
    found = denominators(moments, 48, decay=None, eps=0.0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(denominators(late, 48, decay=None, eps=0.0), 2 * found)


@pytest.mark.parametrize("shape", [(7,), (5, 1), (1, 9), (3, 4, 5), ()])
def test_moments_of_any_shape(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    moments = fresh(shape)
    add(moments, torch.full((numel,), 3.0))
    end_step(moments, decay=0.9)
    torch.testing.assert_close(denominators(moments, numel, decay=0.9, eps=0.0), torch.full((numel,), 3.0))


def test_moments_skip_rescale_restore_and_non_finite() -> None:
    moments = fresh((6, 8))
    add(moments, rank_one(0).view(-1))
    end_step(moments, decay=0.9)
    before = moments.state_dict()
    add(moments, rank_one(1).view(-1))
    end_step(moments, skipped=True, decay=0.9)
    assert torch.equal(moments.rows, before["rows"])
    assert moments.steps == 1
    poisoned = rank_one(0)
    poisoned[2, 3] = torch.nan
    add(moments, poisoned.view(-1))
    end_step(moments, decay=0.9)
    add(moments, rank_one(0).view(-1))
    end_step(moments, decay=0.9)
    found = denominators(moments, 48, decay=0.9, eps=0.0)
    assert found.isfinite().all()
    other = fresh((6, 8))
    other.load_state_dict(moments.state_dict())
    other.memory.mul_(16.0)
    assert torch.equal(denominators(other, 48, decay=0.9, eps=0.0), 4 * found)
    products = {"products": {"w": (1.0, 2.0)}, "gradients": {"w": (4.0, 3.0)}}
    saved = StepAheadAddOn.in_unit({"moments": {"w": moments.state_dict()}, **products}, 4.0)
    scaled = {"products": {"w": (16.0, 32.0)}, "gradients": {"w": (64.0, 48.0)}}
    assert str(saved) == str({"moments": {"w": other.state_dict()}, **scaled})
    with pytest.raises(ValueError, match="second moment"):
        fresh((5, 8)).load_state_dict(before)


# -- units ---


class Lion(torch.optim.Optimizer):
    """Of unknown steps."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})


class Subclass(torch.optim.AdamW):
    """Of known steps."""


class Wrapper:
    """As Accelerate's and DeepSpeed's."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        self.optimizer = Subclass(parameters, **settings)
        self.param_groups = self.optimizer.param_groups


class Own(Lion):
    def step_unit(self, group: dict[str, Any]) -> StepUnit:
        return StepUnit(7 * group["lr"])


def unit_of(make: Callable[..., Any], **settings: Any) -> StepUnit:
    weight = nn.Parameter(torch.zeros(3))
    found = units_of(make([weight], **settings))(weight)
    assert found is not None
    return found


def test_units_of_optimizers() -> None:
    optim = torch.optim
    assert unit_of(optim.AdamW, lr=0.1, betas=(0.9, 0.98), eps=1e-6) == StepUnit(0.1, True, 0.98, 1e-6)
    assert unit_of(Wrapper, lr=0.1, eps=1e-6) == StepUnit(0.1, True, 0.999, 1e-6)
    assert unit_of(optim.SGD, lr=0.1) == StepUnit(0.1)
    assert unit_of(optim.SGD, lr=0.1, momentum=0.75, dampening=0.5).lr == pytest.approx(0.2)
    assert unit_of(optim.SGD, lr=0.1, maximize=True) == StepUnit(-0.1)
    assert unit_of(optim.RMSprop, lr=0.1, alpha=0.9, momentum=0.5) == StepUnit(0.2, True, 0.9, 1e-8)
    adagrad = unit_of(optim.Adagrad, lr=0.1, initial_accumulator_value=0.25)
    assert (adagrad.decay, adagrad.eps) == (None, 0.5 + 1e-10)
    assert unit_of(Own, lr=0.1).lr == pytest.approx(0.7)
    with pytest.raises(
        ConfigError, match=r"the step of Lion is not known; known are Adam, AdamW, .* step_unit"
    ):
        unit_of(Lion)
    weight, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    sgd = optim.SGD([weight], lr=1.0)
    units = units_of(sgd)
    sgd.param_groups[0]["lr"] = 0.5  # as schedulers do
    assert units(weight) == StepUnit(0.5)
    assert units(other) is None
    # As in DeepSpeed: a wrapper whose groups hold other tensors than the model's parameters.
    wrapper = SimpleNamespace(optimizer=sgd, param_groups=sgd.param_groups)
    assert units_of(wrapper, groups=[[other]])(other) == StepUnit(0.5)


def test_a_learning_rate_that_is_a_tensor_is_read_once_after_each_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, rate = [nn.Parameter(torch.zeros(3)) for _ in range(5)], torch.tensor(0.1)
    units = units_of(torch.optim.AdamW(weight, lr=rate))
    reads = list[Any]()
    monkeypatch.setattr(step_units, "float", lambda x: (reads.append(x), float(x))[1], raising=False)
    for number in range(3):
        rate.fill_(0.5 + number)
        found = {units(each) for _ in range(3) for each in weight}
        assert found == {StepUnit(0.5 + number, True, 0.999, 1e-8)}
    assert sum(isinstance(each, Tensor) for each in reads) == 3


def test_moments_are_fp32_whatever_the_default_is() -> None:
    weight = nn.Parameter(torch.zeros(6, 8))
    moments = SecondMoments({"w": weight}, lambda _: StepUnit(1.0, True, 0.9))
    torch.set_default_dtype(torch.float64)
    try:
        moments.observe([("w", torch.ones(48))], ReferenceBackend(), ScratchBuffers())
        found = moments.of("w")
        assert found is not None
        assert found.memory.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_displaced_is_a_step_of_the_optimizer(dtype: torch.dtype, loss_scale: float) -> None:
    """The first step of Adam with zero betas, of RMSprop and Adagrad, and steps of SGD for ever."""
    torch.manual_seed(0)
    weight, gradient, residual = torch.randn(6, 8).to(dtype), rank_one(0), torch.randn(48)
    moments = fresh((6, 8))
    add(moments, gradient.view(-1) * loss_scale)
    for unit, expected in (
        (StepUnit(0.1, True, 0.9, 0.5), 0.1 * residual / (gradient.abs().view(-1) + 0.5)),
        # One gradient moves a weight by one learning rate at most.
        (StepUnit(0.1, True, None, 0.0), 0.1 * (residual / gradient.abs().view(-1)).clamp(-1, 1)),
        (StepUnit(0.1), 0.1 * residual),
    ):
        other = fresh((6, 8))
        add(other, gradient.view(-1) * loss_scale)
        end_step(other, decay=unit.decay)
        found = displaced(
            weight,
            (residual * loss_scale, 0.5),
            other,
            unit,
            gradient_unit=1 / loss_scale,
            out=torch.empty_like(weight),
        )
        expected = (weight.double() - 0.5 * expected.view(6, 8)).to(dtype)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_pending_is_added_to_its_part(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, residual, part = torch.randn(6, 8).to(dtype), torch.randn(48), torch.randn(20)
    expected = weight.double().view(-1) - 0.1 * residual.double()
    expected[10:30] += 3 * part.double()
    found, alone = (
        displaced(
            weight,
            (left, 1.0),
            None,
            StepUnit(0.1),
            update=(part, 10, 3),
            out=torch.empty_like(weight),
        )
        for left in (residual, None)
    )
    torch.testing.assert_close(found, expected.view(6, 8).to(dtype))
    expected += 0.1 * residual.double()
    torch.testing.assert_close(alone, expected.view(6, 8).to(dtype))
    assert torch.equal(alone.view(-1)[:10], weight.view(-1)[:10])


def test_no_entry_is_displaced_by_more_than_the_limit() -> None:
    """An entry of which row and column means see next to nothing, beside one of which they see all."""
    gradient = torch.zeros(100, 100)
    gradient[0, 0], gradient[1, 1] = 1e3, 1e-2
    moments = fresh((100, 100))
    add(moments, gradient.view(-1))
    end_step(moments, decay=0.999)
    weight, residual = torch.zeros(100, 100), gradient.view(-1) * 3.0
    for coefficient in (1.0, 0.5):
        found = displaced(
            weight,
            (residual, coefficient),
            moments,
            StepUnit(0.1, True, 0.999, 0.0),
            out=torch.empty_like(weight),
        )
        assert found[1, 1] == pytest.approx(-LIMIT * 0.1 * coefficient)
        assert found[0, 0] == pytest.approx(-3.0 * 0.1 * coefficient, rel=1e-3)
        assert int(found.count_nonzero()) == 2


def test_a_smaller_mean_gradient_makes_longer_steps() -> None:
    moments = fresh((4, 4))
    add(moments, torch.ones(16))
    end_step(moments, decay=0.999)
    unit, out = StepUnit(0.1, True, 0.999, 1e-8), torch.empty(4, 4)
    for ratio in (1.0, 0.25):
        displaced(torch.zeros(4, 4), (torch.ones(16), 1.0), moments, unit, ratio=ratio, out=out)
        torch.testing.assert_close(out, torch.full((4, 4), -0.1 / ratio))


@pytest.mark.parametrize("columns", [1, 30, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_take_little_scratch_memory(
    dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a tensor are displaced as the whole is, bit for bit; squares add up in another order."""
    rows, first, numel, most = torch.rand(1 if columns == 1 else 100), 11, 500, 90
    moment = SecondMoment(rows, torch.rand(columns), observed=0.5, first=first, ratio=1.5, eps=1e-8)
    weight, residual, update = torch.randn(numel).to(dtype), torch.randn(numel), torch.randn(200)
    pending, found, asked = (update, 130, 0.5), [], []

    def scratch(_: str, like: Tensor) -> Tensor:
        asked.append(like.numel())
        return torch.empty(like.numel())

    for part in (1 << 20, most):
        monkeypatch.setattr(kernels, "_PART", part)
        asked.clear()
        squares = Squares(residual[:490].to(dtype), torch.zeros(490 // columns), torch.zeros(columns))
        if 490 % columns == 0:
            kernels.add_squares(squares, scratch)
        out = torch.empty_like(weight)
        kernels.displace(Displacement(weight, out, residual, 0.1, moment, 2.0, pending), scratch)
        found.append((out, squares))
    (whole, squares), (parts, others) = found
    assert torch.equal(whole, parts)
    torch.testing.assert_close(squares[1:3], others[1:3])
    assert max(asked, default=0) <= most


def test_a_sum_of_squares_grows_with_the_residual() -> None:
    """Adagrad: k gradients of one size move a weight by sqrt(k) learning rates."""
    gradient = torch.full((4, 5), 2.0)
    moments, weight = fresh((4, 5)), torch.zeros(4, 5)
    unit = StepUnit(0.1, True, None, 0.0)
    for step in range(1, 80):
        add(moments, gradient.view(-1))
        end_step(moments, decay=None)
        out = torch.empty_like(weight)
        whole = displaced(weight, (step * gradient.view(-1), 1.0), moments, unit, out=out)
        assert float(whole.abs().max()) == pytest.approx(0.1 * min(step, LIMIT) ** 0.5, rel=1e-4)
        lump = displaced(weight, (1e6 * gradient.view(-1), 1.0), moments, unit, out=out)
        assert float(lump.abs().max()) == pytest.approx(0.1 * min(step, LIMIT) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("unit", [StepUnit(0.1, True, 0.9, 0.0), StepUnit(0.1)])
def test_without_residual_the_weights_are_bitwise_the_same(dtype: torch.dtype, unit: StepUnit) -> None:
    weight = torch.tensor([[0.0, -0.0, 1e-40, 1.1], [3.0, -2.0, 1e-20, -1e30]], dtype=dtype)
    moments = fresh((2, 4))
    for _ in range(2):  # before a step denominators are infinite; then there are some of zero
        found = displaced(weight, (torch.zeros(8), 1.0), moments, unit, out=torch.empty_like(weight))
        assert torch.equal(found, weight)
        assert torch.equal(found.signbit(), weight.signbit())
        add(moments, torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 0]))
        end_step(moments, decay=0.9)


# -- where passes run ---


class Probe(nn.Module):
    """Records the weights that its passes see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.recompute: bool | None = None
        self.seen: list[Tensor] = []

    def block(self, x: Tensor) -> Tensor:
        self.seen.append(self.second.weight.detach().clone())
        return torch.tanh(self.second(x))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        h = (
            self.block(h)
            if self.recompute is None
            else checkpoint(self.block, h, use_reentrant=self.recompute)
        )
        return {"loss": self.tied(self.frozen(h)).square().sum()}


class Opaque:
    """Like the outputs of many libraries: no container that torch knows."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.fixture
def probe() -> Iterator[Any]:
    """A model with a residual of ones and SGD: displaced by 0.25."""
    torch.manual_seed(0)
    model = Probe()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    ahead = StepAhead(
        model.named_parameters(),
        units_of(optimizer),
        Unsent(lambda name: torch.ones(16) if name.endswith("weight") else None),
        world_size=2,
        coefficient=0.5,
    )
    for name, parameter in model.named_parameters():
        if not name.startswith("unused"):
            ahead.observe([(name, torch.ones(parameter.numel()))])
    ahead.end_step(skipped=False)
    ahead.attach(model, optimizer)
    yield SimpleNamespace(model=model, optimizer=optimizer, ahead=ahead, x=torch.randn(2, 4))
    with contextlib.suppress(DCTError):
        ahead.detach()


def test_passes_with_gradients_alone_are_displaced(probe: Any) -> None:
    model, x = probe.model, probe.x
    weight = model.second.weight.detach().clone()
    storages = [p.data_ptr() for p in model.parameters()]
    model.second.requires_grad_(False)  # a generator's step, or an attack: frozen for a while
    model(x)["loss"].backward()
    model.second.requires_grad_(True)
    assert torch.equal(model.seen[-1], weight - 0.25)
    model.zero_grad()
    loss = model(x)["loss"]
    assert torch.equal(model.seen[-1], weight - 0.25)
    assert model.tied.weight is model.first.weight
    assert model.tied.weight.data_ptr() != storages[0]
    assert model.frozen.weight.data_ptr() in storages  # no optimizer has it
    assert model.unused.weight.data_ptr() in storages
    again = model(x)["loss"]  # two forward passes, one backward pass
    (loss + again).backward()
    assert [p.data_ptr() for p in model.parameters()] == storages
    assert torch.equal(model.second.weight, weight)
    plain = Probe()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain.first.weight -= 0.25
        plain.second.weight -= 0.25
    plain(x)["loss"].backward()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (expected.grad is None)
        if mine.grad is not None and expected.grad is not None:
            torch.testing.assert_close(mine.grad, 2 * expected.grad)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            model(x)
        assert torch.equal(model.seen[-1], weight)
    model.eval()
    model(x)["loss"].backward()
    assert torch.equal(model.seen[-1], weight - 0.25)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_sees_the_same_weights(probe: Any, reentrant: bool) -> None:
    probe.model.recompute = reentrant
    weight = probe.model.second.weight.detach().clone()
    probe.model(probe.x.requires_grad_())["loss"].backward()
    assert len(probe.model.seen) == 2
    assert all(torch.equal(seen, weight - 0.25) for seen in probe.model.seen)
    assert torch.equal(probe.model.second.weight, weight)


def test_a_forward_pass_without_backward_leaves_nothing_behind(probe: Any) -> None:
    model, x = probe.model, probe.x
    weight = model.second.weight.detach().clone()
    model(x)
    assert torch.equal(model.state_dict()["second.weight"], weight)
    model(x)
    assert torch.equal(model.second.state_dict()["weight"], weight)
    model(x)
    with torch.no_grad():
        model(x)
    assert torch.equal(model.seen[-1], weight)
    model(x)["loss"].backward()
    model(x)
    probe.optimizer.step()
    assert torch.equal(model.second.weight, weight - 0.5 * model.second.weight.grad)
    model(x)
    assert torch.equal(model.seen[-1], model.second.weight.detach())  # still displaced
    probe.ahead.restore()
    assert torch.equal(model.seen[-1], model.second.weight - 0.25)
    model(x)
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.state_dict().items()})
    assert torch.equal(model.second.weight, torch.ones(4, 4))
    model(x)
    assert torch.equal(model.seen[-1], torch.full((4, 4), 0.75))
    probe.ahead.detach()
    assert torch.equal(model.second.weight, torch.ones(4, 4))
    model(x)
    assert torch.equal(model.seen[-1], torch.ones(4, 4))


def test_outputs_that_are_no_containers(probe: Any) -> None:
    weight = probe.model.second.weight.detach().clone()
    probe.model.register_forward_hook(lambda _, __, output: Opaque(output["loss"]), prepend=True)
    probe.model(probe.x).loss.backward()
    assert torch.equal(probe.model.seen[-1], weight - 0.25)
    assert torch.equal(probe.model.second.weight, weight)


class Slotted:
    """An output without a ``__dict__``."""

    __slots__ = ("__weakref__", "loss", "nothing")

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def test_outputs_with_slots_end_the_displacement(probe: Any) -> None:
    weight = probe.model.second.weight.detach().clone()
    probe.model.register_forward_hook(lambda _, __, output: Slotted(output["loss"]), prepend=True)
    probe.model(probe.x).loss.backward()
    assert torch.equal(probe.model.second.weight, weight)


# -- who reads and writes weights between passes ---


def _copied(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.copy_(torch.ones(4, 4))


def _through_data(parameter: nn.Parameter) -> None:
    parameter.data.copy_(torch.ones(4, 4))


def _replaced(parameter: nn.Parameter) -> None:
    parameter.data = torch.ones(4, 4)


@pytest.mark.parametrize("write", [_copied, _through_data, _replaced])
@pytest.mark.parametrize("then", ["other backward", "step"])
def test_writes_to_displaced_weights_are_refused_by_name(probe: Any, write: Any, then: str) -> None:
    """As of an exchange with averaged weights after a training forward pass that has no backward pass."""
    model = probe.model
    weight, storage = model.second.weight.detach().clone(), model.second.weight.data_ptr()
    model(probe.x)
    write(model.second.weight)
    model(probe.x)  # waits for no device to find out

    def use() -> None:
        if then == "other backward":
            torch.ones(1, requires_grad=True).sum().backward()
        probe.optimizer.step()

    with pytest.raises(DCTError, match=r"weights of second\.weight were written.*weights\(model\)"):
        use()
    assert torch.equal(model.second.weight, weight)
    assert model.second.weight.data_ptr() == storage
    model(probe.x)["loss"].backward()  # goes on
    assert torch.equal(model.seen[-1], weight - 0.25)
    assert torch.equal(model.second.weight, weight)


def test_a_write_within_the_forward_pass_is_refused_by_name(probe: Any) -> None:
    weight = probe.model.second.weight.detach().clone()
    probe.model.second.register_forward_pre_hook(lambda *_: _copied(probe.model.second.weight))
    with pytest.raises(DCTError, match=r"second\.weight"):
        probe.model(probe.x)["loss"].backward()
    assert torch.equal(probe.model.second.weight, weight)


def test_weights_are_read_and_written_within_a_block(probe: Any) -> None:
    model = probe.model
    weight = model.second.weight.detach().clone()
    loss = model(probe.x)["loss"]
    with weights(nn.Sequential(model)):  # also of what wraps it
        assert torch.equal(copy.deepcopy(model).second.weight, weight)
        backup = model.second.weight.detach().clone()
    assert torch.equal(model.second.weight, weight - 0.25)
    loss.backward()
    model(probe.x)
    with weights(model), torch.no_grad():
        _copied(model.second.weight)
    with torch.no_grad():
        model(probe.x)
    assert torch.equal(model.seen[-1], torch.ones(4, 4))
    with weights(model), torch.no_grad():
        model.second.weight.copy_(backup)
    model(probe.x)["loss"].backward()
    assert torch.equal(model.seen[-1], weight - 0.25)
    assert torch.equal(model.second.weight, weight)


def test_saving_within_a_forward_pass_leaves_it_displaced(probe: Any) -> None:
    model, saved = probe.model, []
    weight = model.second.weight.detach().clone()
    handle = model.first.register_forward_pre_hook(lambda *_: saved.append(model.state_dict()))
    model(probe.x)["loss"].backward()
    handle.remove()
    assert torch.equal(saved[0]["second.weight"], weight)
    assert torch.equal(model.seen[-1], weight - 0.25)
    assert torch.equal(model.second.weight, weight)


def test_a_written_weight_is_displaced_anew(probe: Any) -> None:
    probe.model(probe.x)["loss"].backward()
    _copied(probe.model.second.weight)
    probe.model(probe.x)["loss"].backward()
    assert torch.equal(probe.model.seen[-1], torch.full((4, 4), 0.75))


def test_a_module_is_pickled_without_what_displaces_it(probe: Any) -> None:
    file = io.BytesIO()
    torch.save(probe.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(probe.x)
    assert torch.equal(loaded.seen[-1], probe.model.second.weight)
    probe.model(probe.x)
    assert not torch.equal(probe.model.seen[-1], loaded.seen[-1])


# -- the coefficient ---


def _coefficients(
    rank: int, world_size: int, same: bool, at_owners: bool = False
) -> tuple[float, float, int, int]:
    """Two parameters, of which one is too small; the sizes of all-reduces go into the bytes sent."""
    config = DataParallelConfig(sparsity=0.9, feedback="step_ahead", min_numel=1000)
    reducer = GradientReducer(config)
    weights = [nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(10))]
    ahead = reducer.add_ons.step_ahead.prepare(
        list(zip("ab", weights, strict=True)), units_of(torch.optim.SGD(weights))
    )
    first = ahead.coefficients.of("a"), ahead.coefficients.gradient_ratio("a")
    generator = torch.Generator().manual_seed(1 if same else rank)
    samples = 0
    for step in range(4 * INTERVAL + 1):
        for _ in range(2):  # micro-batches
            pending = len(ahead.coefficients._measured)
            entries = [
                (n, torch.randn(w.numel(), generator=generator)) for n, w in zip("ab", weights, strict=True)
            ]
            if at_owners:
                shards = {n: shards_in(0, t.numel(), -(-t.numel() // world_size)) for n, t in entries}
                reducer.reduce_scatter([(n, t, shards[n]) for n, t in entries], scale=1 / world_size)
            else:
                reducer.all_reduce(entries, scale=1 / world_size)
            samples += len(ahead.coefficients._measured) - pending
        reducer.end_step(skipped=step == 5)
    assert first == (0.5 + 0.5 / world_size, 1.0)
    found = ahead.coefficients.of("a"), ahead.coefficients.gradient_ratio("a")
    state = reducer.state_dict()["ahead"]
    ahead.load_state_dict(state)
    assert found == (ahead.coefficients.of("a"), ahead.coefficients.gradient_ratio("a"))
    return *found, samples, len(state["moments"])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 5])
def test_coefficient_and_size_are_what_ranks_share(world_size: int) -> None:
    for coefficient, size, samples, moments in run(world_size, _coefficients, True):
        assert coefficient == pytest.approx(1.0, abs=0.1)  # ranks sample their thresholds each for itself
        assert size == pytest.approx(1.0, abs=0.1)
        assert (samples, moments) == (5, 1)
    for coefficient, size, _, _ in run(world_size, _coefficients, False):
        assert coefficient == pytest.approx(1 / world_size, abs=0.1)
        assert size == pytest.approx(world_size**-0.5 if world_size > 4 else 1.0, abs=0.1)


@pytest.mark.slow
def test_the_size_of_a_mean_gradient_of_which_owners_have_parts() -> None:
    for same, expected in ((True, 1.0), (False, 5**-0.5)):
        for _, size, _, _ in run(5, _coefficients, same, True):
            assert size == pytest.approx(expected, abs=0.1)


# -- owners ---


def _owners(rank: int, world_size: int, kept_in: str) -> tuple[Tensor, Tensor]:
    """Sum of the ranks' displacements with SGD at a learning rate of 1, and what it should be."""
    config = DataParallelConfig.of(
        residual_dtype=kept_in,
        sparsity=0.98,
        value_dtype="fp32",
        feedback="step_ahead",
        expert={"step_ahead_coefficient": 0.5},
        exchange="two_phase",
    )
    weight = nn.Parameter(torch.zeros(3 * MIN_SHARD))

    def prepared(state: dict[str, Any] | None = None) -> tuple[GradientReducer, StepAhead]:
        reducer = GradientReducer(config)
        if state is not None:
            reducer.load_state_dict(state)
        return reducer, reducer.add_ons.step_ahead.prepare(
            [("a", weight)], units_of(torch.optim.SGD([weight], lr=1.0))
        )

    def displacement(ahead: StepAhead) -> Tensor:
        ahead.displace()
        found = -weight.detach().clone()
        ahead.restore()
        return found

    reducer, ahead = prepared()
    generator = torch.Generator().manual_seed(rank)
    unsent = torch.zeros(weight.numel())  # by all together
    for _ in range(20):
        gradient = torch.randn(weight.numel(), generator=generator)
        total = gradient.clone()
        dist.all_reduce(total)
        reducer.all_reduce([("a", gradient)])
        unsent += total - gradient
        reducer.end_step()
    found = displacement(ahead)
    assert torch.equal(displacement(prepared(reducer.state_dict())[1]), found)
    dist.all_reduce(found)
    kept = reducer.group.streams["a"].residual
    assert kept is not None
    own = kept.current.clone()
    dist.all_reduce(own)
    return found, unsent - 0.5 * own


@pytest.mark.slow
@pytest.mark.parametrize(("kept_in", "rounding"), [("fp32", 1e-4), ("int8", 1.0)])
def test_owners_look_ahead_by_all_that_they_hold_back(kept_in: str, rounding: float) -> None:
    """The mean over the ranks is displaced by exactly the residuals of owners, after a restart, too."""
    for found, expected in run(3, _owners, kept_in):
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding)
        assert float(expected.abs().max()) > 5
        assert abs(float((found - expected).mean())) < 0.01


def _out_of_step(rank: int, world_size: int) -> str:
    config = DataParallelConfig(sparsity=0.9, feedback="step_ahead", min_numel=10)
    reducer = GradientReducer(config, step=INTERVAL + rank)
    weight = nn.Parameter(torch.zeros(100))
    reducer.add_ons.step_ahead.prepare([("a", weight)], units_of(torch.optim.SGD([weight])))
    try:
        reducer.all_reduce([("a", torch.ones(100))])
    except Exception as error:
        return type(error).__name__
    return "went on"


@pytest.mark.slow
def test_ranks_out_of_step_stop() -> None:
    assert run(2, _out_of_step) == ["DesyncError"] * 2


@pytest.mark.slow
def test_a_framework_without_step_ahead_is_refused() -> None:
    for name in run(2, _unprepared):
        assert name == "ConfigError"


def _unprepared(rank: int, world_size: int) -> str:
    reducer = GradientReducer(DataParallelConfig(feedback="step_ahead"))
    try:
        reducer.all_reduce([("a", torch.ones(100))])
    except Exception as error:
        return type(error).__name__
    return "went on"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
def test_modules_that_replay_a_cuda_graph_are_refused() -> None:
    """The function that torch puts in the place of ``forward``, without a GPU to record a graph on."""
    codes = [torch.cuda.graphs.make_graphed_callables.__code__]
    while codes[0].co_name != "new_fwd":
        codes[:1] = (each for each in codes[0].co_consts if isinstance(each, types.CodeType))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    cells = tuple(types.CellType() for _ in codes[0].co_freevars)
    model[1].forward = types.FunctionType(codes[0], {}, closure=cells)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="step_ahead': 1 replays a CUDA graph"):
        StepAhead.attach(SimpleNamespace(), model)  # type: ignore[arg-type]
