"""Local steps under DDP, FSDP2 and DeepSpeed: real processes that train alone and exchange progress."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.alone import everyones, loss_of, sharded, train
from support.deferred_backend import DeferredBackend
from support.processes import launch, logged, run
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer, weights
from dct_plugin.errors import ConfigError
from dct_plugin.integrations.host.refusals import refuse
from dct_plugin.kernels import register_backend

pytestmark = pytest.mark.slow

#: Dense steps, and steps from one exchange to the next.
START, EVERY = 3, 4
SECTION = {"local_steps": EVERY, "warmup_steps": START, "min_numel": 100, "verify": {"every": 1}}
#: The mean of half of the tensors arrives two steps after their progress was sent.
LATER = {**SECTION, "local_steps": {"every": 6, "fragments": 2, "delay": 2}, "verify": None}
COMPARED = {**LATER, "verify": {"every": 1, "action": "stop"}}
#: The mean of the ranks' progress, exactly.
MEAN = {
    **SECTION,
    "value_dtype": "fp32",
    "local_steps": {"every": EVERY, "outer_lr": 1.0, "outer_momentum": 0.0},
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 3))


def own(model: nn.Module) -> list[Tensor]:
    """Return this rank's weights."""
    return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]


def saved(model: nn.Module) -> dict[str, Tensor]:
    """Return what ``state_dict`` of the model has, whole, under the names of a plain model."""
    state = getattr(model, "module", model).state_dict()
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)().clone() for name, each in state.items()
    }


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def ddp(section: dict[str, Any], **options: Any) -> tuple[nn.Module, Any, Any]:
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dct_plugin.attach(model, optimizer, {"data_parallel": section}, **options)
    return model, optimizer, state


def fsdp(section: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    model = sharded(model_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, dct_plugin.attach(model, optimizer, {"data_parallel": section})


def by_hand(
    rank: int, world_size: int, every: int = EVERY, fragments: int = 1, delay: int = 0
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield a rank's weights and the common ones after each local step in plain torch, all ranks in one
    process: gradients and progress are added in rank order.
    """
    under_way: list[tuple[int, Any, Tensor, list[Tensor]]] = []
    models = [model_of() for _ in range(world_size)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    common = [parameter.detach().clone() for parameter in models[0].parameters()]
    for step in itertools.count():
        for number, model in enumerate(models):
            model.zero_grad()
            loss_of(model, step, number).backward()
        together = list(zip(*(each.parameters() for each in models), strict=True))
        for parameters in together if step < START else ():
            mean = sum(p.grad for p in parameters) / world_size
            for parameter in parameters:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        for weight, parameters in zip(common, together, strict=True) if step < START else ():
            weight.copy_(parameters[0])
        turn, rest = divmod(step + 1 - START, every // fragments)
        crossing = zip(common, together, strict=True) if step >= START and not rest else ()
        for weight, parameters in list(crossing)[(turn - 1) % fragments :: fragments]:
            sent = [parameter.detach().clone() for parameter in parameters]
            under_way.append((step + delay, parameters, weight, sent))
        while under_way and under_way[0][0] == step:
            _, parameters, weight, sent = under_way.pop(0)
            weight.add_(sum(each - weight for each in sent) / world_size)
            for parameter, then in zip(parameters, sent, strict=True):
                parameter.data.copy_(parameter.data + (weight - then) if delay else weight)
        yield own(models[rank]), common


def _equals_local_sgd(rank: int, world_size: int) -> None:
    model, optimizer, _ = ddp(MEAN)
    for step, (weights_by_hand, common) in zip(range(13), by_hand(rank, world_size), strict=False):
        train(model, optimizer, rank, range(step, step + 1))
        assert same(own(model), weights_by_hand), step
        assert same([model.module.state_dict()[name] for name, _ in model.module.named_parameters()], common)


def test_whole_progress_is_local_sgd_bitwise() -> None:
    run(2, _equals_local_sgd)


def _later(rank: int, world_size: int, way: str, folder: str) -> None:
    """Exchange half of the tensors every 3 steps; their mean arrives 2 steps later. With two ranks, where
    the order of a sum does not matter, all weights equal those by hand bitwise; else biases are left out, one
    of which has rounding errors alone for its gradient.
    """
    register_backend("deferred", DeferredBackend)
    os.environ |= {"gloo": {"DCT_TRANSPORT": "gloo"}, "slots": {"DCT_KERNELS": "deferred"}}.get(way, {})
    rule = {"every": 6, "fragments": 2, "delay": 2}
    section = {**MEAN, "local_steps": {**MEAN["local_steps"], **rule}, "verify": None}
    with logged() as lines:
        model, optimizer, state = ddp(section)
        steps = zip(range(19), by_hand(rank, world_size, **rule), strict=False)
        for step, (weights_by_hand, common) in steps:
            train(model, optimizer, rank, range(step, step + 1))
            held = [model.module.state_dict()[name] for name, _ in model.module.named_parameters()]
            compared = zip([*own(model), *held], [*weights_by_hand, *common], strict=True)
            for ours, theirs in list(compared)[:: 1 if world_size == 2 else 2]:
                torch.testing.assert_close(
                    ours, theirs, **({"rtol": 0, "atol": 0} if world_size == 2 else {})
                )
            assert all(same(held, each) for each in everyones(held))
    if rank == 0:
        assert any("exchange 1/2 of their progress every 3 steps" in line for line in lines)
        assert any("its mean arrives 2 steps later" in line for line in lines)
    assert {each.group.backend.lengths_on_host for each in state.reducers} == {way != "slots"}
    # The mean of step 18 is on its way: a save takes it over. Both go on alike.
    assert all(each.add_ons.local_steps.is_open for each in state.reducers)
    state.save(f"{folder}/dct")
    again, optimizer_again, state_again = ddp(section)
    again.load_state_dict(model.state_dict())
    optimizer_again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert state_again.load(f"{folder}/dct")
    assert same(own(again), own(model))
    for each, its in ((model, optimizer), (again, optimizer_again)):
        train(each, its, rank, range(19, 26))
    assert same(own(again), own(model))
    state_again.detach()
    assert all(same(own(again), each) for each in everyones(own(again)))


@pytest.mark.parametrize(
    ("ranks", "way"), [(2, "connections"), (3, "connections"), (2, "gloo"), (3, "slots")]
)
def test_fragments_that_arrive_later_are_as_by_hand(ranks: int, way: str, tmp_path: Path) -> None:
    run(ranks, _later, way, str(tmp_path))


def _interrupted(rank: int, world_size: int, folder: str) -> None:
    """Load weights while an exchange is on its way; then send small tensors in an exchange of their own."""
    model, optimizer, state = ddp(COMPARED)
    train(model, optimizer, rank, range(START + 4))  # the common weights have moved, the rank's own have not
    mine = own(model)
    state.save(f"{folder}/dct")
    assert not same(own(model), mine)
    state.close()
    model, optimizer, state = ddp(LATER)
    train(model, optimizer, rank, range(START + 4))
    assert all(each.add_ons.local_steps.is_open for each in state.reducers)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(before)
    train(model, optimizer, rank, range(START + 4, START + 13))
    model.load_state_dict(before)
    state.save(f"{folder}/dct")
    state.detach()
    assert same(*everyones(own(model))[:2])
    ends = []
    for topology in ("direct", "two_phase"):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 400), nn.Tanh(), nn.Linear(400, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        section = {**LATER, "exchange": topology, "min_numel": 2000, "value_dtype": "fp32"}
        state = dct_plugin.attach(model, optimizer, {"data_parallel": section})
        train(model, optimizer, rank, range(12))
        state.detach()
        ends.append(own(model))
        assert all(same(ends[-1], each) for each in everyones(ends[-1]))
    for left, right in zip(*ends, strict=True):
        torch.testing.assert_close(left, right)


def test_an_exchange_on_its_way_is_interrupted(tmp_path: Path) -> None:
    run(3, _interrupted, str(tmp_path))


def _momentum(rank: int, world_size: int) -> None:
    section = {**MEAN, "local_steps": {"every": EVERY, "outer_lr": 0.7, "outer_momentum": 0.9}}
    model, optimizer, _ = ddp(section)
    train(model, optimizer, rank, range(START))
    common = own(model)
    outer = torch.optim.SGD([nn.Parameter(w.clone()) for w in common], lr=0.7, momentum=0.9, nesterov=True)
    for first in range(START, START + 3 * EVERY, EVERY):
        train(model, optimizer, rank, range(first, first + EVERY - 1))
        assert not same(own(model), [p.detach() for p in outer.param_groups[0]["params"]])
        with _before_exchange(model) as before:
            train(model, optimizer, rank, range(first + EVERY - 1, first + EVERY))
        for parameter, trained in zip(outer.param_groups[0]["params"], before, strict=True):
            progress = torch.stack(everyones(trained - parameter.detach())).mean(0)
            parameter.grad = -progress
        outer.step()
        for mine, parameter in zip(own(model), outer.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def _before_exchange(model: nn.Module) -> Any:
    """Give the weights at the moment before progress is exchanged."""
    found: list[Tensor] = []
    original = GradientReducer.end_step

    def end_step(self: GradientReducer, **options: Any) -> None:
        found.extend(own(model))
        original(self, **options)

    GradientReducer.end_step = end_step  # type: ignore[method-assign]
    yield found
    GradientReducer.end_step = original  # type: ignore[method-assign]


def test_the_outer_optimizer_is_sgd_of_torch_with_nesterov_momentum() -> None:
    run(2, _momentum)


def _resumes(rank: int, world_size: int, kind: str, section: dict[str, Any], folder: str) -> None:
    make: Callable[..., Any] = {"ddp": ddp, "fsdp": fsdp}[kind]
    model, optimizer, state = make(section)
    train(model, optimizer, rank, range(9))
    mine, common = own(model), saved(model)
    assert all(torch.equal(each["0.weight"], common["0.weight"]) for each in everyones(common))
    assert not torch.equal(*[everyones(mine[0])[i] for i in (0, world_size // 2)])
    # Evaluation sees the common weights, and leaves the own ones as they are.
    model.eval()
    plain = model_of().eval()
    plain.load_state_dict(common)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, 0, 0), loss_of(plain, 0, 0))
    model.train()
    assert same(own(model), mine)
    with weights(model):  # under FSDP the weights that it gathers, not its parameters
        assert same(own(model), mine) == (kind == "fsdp")
    state.save(f"{folder}/dct")
    of_optimizer = optimizer.state_dict() if kind == "fsdp" else everyones(optimizer.state_dict())[0]
    torch.save(of_optimizer, f"{folder}/optimizer{rank}")
    of_model = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, optimizer, rank, range(9, 16))
    model_again, optimizer_again, state_again = make(section)
    model_again.load_state_dict(of_model)
    with pytest.raises(ConfigError, match="load the model and its optimizer before"):
        state_again.load(f"{folder}/dct")
    optimizer_again.load_state_dict(torch.load(f"{folder}/optimizer{rank}", weights_only=False))
    assert state_again.load(f"{folder}/dct")
    assert same(own(model_again), mine)
    train(model_again, optimizer_again, rank, range(9, 16))
    assert same(own(model_again), own(model))
    # After detach() ranks exchange gradients, and stay equal: weights and optimizer states are averaged.
    state_again.detach()
    train(model_again, optimizer_again, rank, range(16, 19))
    assert not [
        name
        for name in saved(model_again)
        if "running" not in name
        and len({each[name].numpy().tobytes() for each in everyones(saved(model_again))}) > 1
    ]


@pytest.mark.parametrize("section", [SECTION, LATER], ids=["at once", "later"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_evaluation_saving_resuming_and_the_end(kind: str, section: dict[str, Any], tmp_path: Path) -> None:
    run(4 if kind == "fsdp" else 2, _resumes, kind, section, str(tmp_path))


def _saves(rank: int, world_size: int, folder: str) -> None:
    model, optimizer, state = ddp(SECTION)
    train(model, optimizer, rank, range(9))
    state.save(folder)
    if rank == 0:
        save_file(model.module.state_dict(), f"{folder}/model")


def _goes_on(rank: int, world_size: int, folder: str) -> bool:
    model, optimizer, state = ddp(SECTION)
    common = load_file(f"{folder}/model")
    model.module.load_state_dict(common)
    assert state.load(folder)
    train(model, optimizer, rank, range(9, 10))
    found = model.module.state_dict()
    return all(torch.equal(found[name], common[name]) for name, _ in model.module.named_parameters())


def test_another_number_of_ranks_starts_at_the_common_weights(tmp_path: Path) -> None:
    run(2, _saves, str(tmp_path))
    assert all(run(3, _goes_on, str(tmp_path)))


class Masked(nn.Module):
    """Statistics that change, one of them from step 9 on, and a mask that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = model_of(), 0
        self.register_buffer("mask", torch.ones(300, 300))
        self.register_buffer("late", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 9:
            self.late = self.late + x.mean()
        return self.inner(x) * self.mask[0, 0]


def _changes(rank: int, world_size: int) -> None:
    """Train in eval() mode, with errors inside ``weights()``, and with buffers that change."""
    ends = []
    for mode in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        dct_plugin.attach(model, optimizer, {"data_parallel": SECTION})
        model.train(mode)
        for step in range(14):
            with contextlib.suppress(KeyError), weights(model):
                raise KeyError("an evaluation that fails")
            train(model, optimizer, rank, range(step, step + 1))
        ends.append(own(model))
    assert same(*ends)
    model = DistributedDataParallel(Masked())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dct_plugin.attach(model, optimizer, {"data_parallel": SECTION})
    for step in range(START + 4 * EVERY):
        train(model, optimizer, rank, range(step, step + 1))
        if step == START + 2 * EVERY:
            assert len({tuple(late) for late in everyones(model.module.late.tolist())}) == 2
    for each in everyones(dict(model.module.named_buffers())):
        assert all(torch.equal(each[name], buffer) for name, buffer in model.module.named_buffers())
    sent = {name: figures.sent_bytes for name, figures in state.metrics.summary().classes.items()}
    assert 0 < sent["gradient_small"] < 300 * 300 * 4
    in_parts = {**SECTION, "local_steps": {"every": 20, "fragments": 10}}
    with pytest.raises(ConfigError, match="fragments = 10: at most 6, the number of trained tensors"):
        dct_plugin.attach(model, optimizer, {"data_parallel": in_parts})
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer sends every rank's weights"):
        dct_plugin.attach(model, sharded, {"data_parallel": SECTION})


def test_passes_with_gradients_train_and_buffers_that_change_cross() -> None:
    run(2, _changes)


def _with_scaler(rank: int, world_size: int) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer, state = ddp(SECTION, scaler=scaler)
    train(model, optimizer, rank, range(12), scaler)  # rank 0 alone skips step 6, which ends with an exchange
    model.module.eval()
    assert state.steps.step == 11, "the last step ends when the next pass begins"
    return list(saved(model.module).values())[:2]


def test_a_rank_that_skips_a_step_takes_part_in_the_exchange() -> None:
    first, second = run(2, _with_scaler)
    assert same(first, second)


def _leaves_out(rank: int, world_size: int, section: dict[str, Any], clears_late: bool) -> None:
    """Leave out steps whose gradients are not finite on rank 0, by the norm that a rank sees by itself."""
    model, optimizer, state = ddp({"verify": {"every": 1, "action": "stop"}, **section})
    last = START + 5 * EVERY + (section == COMPARED)  # ranks that compare wait for another pass
    for step in range(last):
        if not clears_late:
            optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        if clears_late:
            optimizer.zero_grad()
        (loss * torch.nan if rank == 0 and step in BAD else loss).backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
    made = int(next(iter(optimizer.state.values()))["step"])
    others = BAD if "exchange_of" in section else () if section in (LATER, COMPARED) else AT_EXCHANGES
    left_out = others if rank else BAD  # the first rank alone sees what is not finite
    assert made == last - len(left_out)
    assert state.steps.step == last - (last - 1 in left_out)  # the last one is noted when another pass begins
    state.state_dict()  # a rank that has left out its step takes over here what has arrived
    common = [saved(model)[name] for name, _ in model.module.named_parameters()]
    assert all(same(common, each) for each in everyones(common))
    state.detach()
    assert all(same(own(model), each) for each in everyones(own(model)))


#: Steps with gradients that are not finite: at an exchange, the last one, between exchanges.
AT_EXCHANGES = (START + EVERY - 1, START + 5 * EVERY - 1)
BAD = (*AT_EXCHANGES, START + EVERY + 1, START + 2 * EVERY)


@pytest.mark.parametrize("clears_late", [False, True])
@pytest.mark.parametrize(
    "section", [SECTION, LATER, COMPARED, {"exchange_of": "updates", "warmup_steps": START}]
)
def test_a_script_that_leaves_out_steps_on_one_rank(section: dict[str, Any], clears_late: bool) -> None:
    run(3 if section in (LATER, COMPARED) else 2, _leaves_out, section, clears_late)


def _attaches_again(rank: int, world_size: int, kind: str, section: dict[str, Any]) -> None:
    made = fsdp if kind == "fsdp" else ddp
    model, optimizer, state = made(section)
    train(model, optimizer, rank, range(START + EVERY + 2))
    common = saved(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dct_plugin.attach(model, optimizer, {"data_parallel": {"sparsity": 0, "verify": {"every": 1}}})
    assert all(
        torch.equal(each, common[name]) for name, each in saved(model).items() if "running" not in name
    )
    train(model, optimizer, rank, range(3))
    trained = own(model)
    others = everyones(trained)[rank % 2 :: 2] if kind == "fsdp" else everyones(trained)
    assert all(same(trained, each) for each in others)
    state.close()


@pytest.mark.parametrize("section", [SECTION, {"exchange_of": "updates"}])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_model_that_is_attached_again_has_the_common_weights(kind: str, section: dict[str, Any]) -> None:
    run(4 if kind == "fsdp" else 2, _attaches_again, kind, section)


def _unfreezes(rank: int, world_size: int, section: dict[str, Any]) -> list[str]:
    """Train the first layer from step 6 on; torch DDP does not reduce its gradients."""
    inner = model_of()
    for parameter in inner[0].parameters():
        parameter.requires_grad_(False)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    settings = {**section, "verify": {"every": 1, "action": "warn"}}
    with logged() as lines:
        state = dct_plugin.attach(model, optimizer, {"data_parallel": settings})
        train(model, optimizer, rank, range(6))
        for parameter in inner[0].parameters():
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": list(inner[0].parameters())})
        train(model, optimizer, rank, range(6, 12))
        state.detach()
    trained = [parameter for name, parameter in inner.named_parameters() if not name.startswith("0.")]
    assert all(same(trained, each) for each in everyones([each.detach() for each in trained]))
    return lines


@pytest.mark.parametrize("section", [SECTION, {"exchange_of": "updates"}])
def test_parameters_that_are_unfrozen_are_named(section: dict[str, Any]) -> None:
    lines, _ = run(2, _unfreezes, section)
    assert any("unfrozen during the training: 0.bias, 0.weight" in line for line in lines)
    assert any("tensors differ between the ranks" in line and "0.weight" in line for line in lines)


def _engine(rank: int, world_size: int, folder: str) -> None:
    import deepspeed

    section = {"train_micro_batch_size_per_gpu": 16, "dct": {"data_parallel": LATER}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}

    def made(**more: Any) -> Any:
        model = model_of()
        config = {**section, "optimizer": optimizer, **more}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def steps(engine: Any, which: range) -> None:
        for step in which:
            engine.backward(loss_of(engine, step, rank))
            engine.step()

    engine = made()
    steps(engine, range(9))
    mine, common = own(engine.module), saved(engine.module)
    assert all(torch.equal(each["0.weight"], common["0.weight"]) for each in everyones(common))
    engine.save_checkpoint(folder, tag="saved")
    steps(engine, range(9, 16))
    again = made()
    again.load_checkpoint(folder, tag="saved")
    assert same(own(again.module), mine)
    steps(again, range(9, 16))
    assert same(own(again.module), own(engine.module))
    dct_plugin.detach(again)
    steps(again, range(16, 19))
    assert same(*(everyones(own(again.module))[rank] for rank in range(2)))
    stage_1 = {"zero_optimization": {"stage": 1}}
    for more in (stage_1, {**stage_1, "bf16": {"enabled": True}}):
        with pytest.raises(ConfigError, match="ZeRO stage 0 with fp32 weights"):
            made(**more)


def test_deepspeed_zero_0_trains_saves_and_resumes_bitwise(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    run(2, _engine, str(tmp_path))


def _ends_early(rank: int, world_size: int, is_killed: bool, section: dict[str, Any]) -> None:
    model, optimizer, _ = ddp({**section, "verify": None})
    train(model, optimizer, rank, range(5 if rank == 1 else 9))
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "section", [SECTION, LATER, {"exchange_of": "updates"}], ids=["local", "later", "updates"]
)
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_exchange_names_a_rank_that_has_ended(is_killed: bool, section: dict[str, Any]) -> None:
    (kind, text), (ended, _) = launch(2, _ends_early, is_killed, section, killed=1)
    assert kind == "error"
    assert ended == ("killed" if is_killed else "value")
    assert text.startswith("DesyncError: rank 0: ")
    assert re.search(r"rank 1|rank\(s\) \[1\]", text.splitlines()[0])


def test_what_does_not_go_with_local_steps_is_named() -> None:
    for other, named in {
        "parameters": {},
        "quality": "safe",
        "adaptive": "accordion",
        "nodes": 2,
        "feedback": "local",
        "sparsity": 0.9,
    }.items():
        with pytest.raises(ConfigError, match=f"local_steps does not go with {other}"):
            DataParallelConfig.of({"local_steps": 30, other: named})
    with pytest.raises(ConfigError, match="local_steps"):
        DataParallelConfig.of({"local_steps": 0})
    for rule, text in {
        (30, 4, 0): "no multiple of fragments = 4",
        (30, 3, 10): "delay = 10: less than",
    }.items():
        with pytest.raises(ConfigError, match=text):
            DataParallelConfig.of(
                {"local_steps": dict(zip(("every", "fragments", "delay"), rule, strict=True))}
            )
    with pytest.raises(ConfigError, match=r"dct\.data_parallel\.local_steps = .*: torchft"):
        refuse("torchft", DataParallelConfig.of({"local_steps": 30}))
