"""``dct_plugin.attach``: one call for torch's DDP, and what it says."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups_made import groups_made
from support.processes import TIMEOUT, Lines, launch, run
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin import ConfigError, DCTState, dct_hook
from dct_plugin.data_parallel.step_ahead.add_on import StepAheadAddOn
from dct_plugin.integrations.host.settings import steps_of
from dct_plugin.transport.lost_ranks import time_limit

SPARSE = {"sparsity": 0.99, "min_numel": 1000}


class Lion(torch.optim.Optimizer):
    """An optimizer whose step is not known."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Subclass(torch.optim.AdamW):
    """An optimizer of a known family."""


class Accelerated(torch.optim.Optimizer):
    """A wrapper that is no optimizer itself, as Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 1)))


def replicated() -> nn.Module:
    """Two replicas with FSDP2. A layer that does not train is sharded over both."""
    made, mesh = model().module, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    made.append(fully_shard(nn.Linear(1, 2).requires_grad_(False), mesh=init_device_mesh("cpu", (2,))))
    return fully_shard(made, mesh=mesh)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def train(ddp: nn.Module, optimizer: Any, rank: int, steps: range) -> torch.Tensor:
    for step in steps:
        x = torch.randn(16, 60, generator=torch.Generator().manual_seed(100 * rank + step))
        for parameter in ddp.parameters():
            parameter.grad = None
        ddp(x).square().mean().backward()
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
    return torch.cat([whole(each).detach().reshape(-1) for each in ddp.parameters() if each.requires_grad])


def muon(parameters: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for vectors."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim == 2 else vectors).append(parameter)
    return [torch.optim.Muon(matrices), torch.optim.AdamW(vectors)]


def _attached(rank: int, world_size: int) -> dict[str, Any]:
    found, log = {}, Lines()
    cases: dict[str, tuple[Any, dict[str, Any], int | None]] = {
        "AdamW": (torch.optim.AdamW, SPARSE, None),
        "short": (torch.optim.Adam, SPARSE, 40),
        "own start": (torch.optim.Adam, {**SPARSE, "warmup_steps": 2}, 40),
        "wrapped": (lambda p: Accelerated(Subclass(p)), SPARSE, 40),
        "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), SPARSE, 40),
        "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), SPARSE, 40),
        "Adagrad": (torch.optim.Adagrad, SPARSE, 40),
        "Lion": (Lion, SPARSE, 40),
        "any Lion": (Lion, {"min_numel": 1000}, 40),
        "gentle Lion": (Lion, {**SPARSE, "sparsity": 0.8}, 40),
        "Muon": (muon, {"min_numel": 1000}, 40),
        "sparse Muon": (muon, SPARSE, 40),
        "fine-tuning": (lambda p: torch.optim.AdamW(p, lr=1e-5), {"min_numel": 1000}, 40),
        "sparse fine-tuning": (lambda p: torch.optim.AdamW(p, lr=1e-5), SPARSE, 40),
        "local": (torch.optim.AdamW, {**SPARSE, "feedback": "local"}, 40),
        "exact": (torch.optim.AdamW, {"sparsity": 0, "value_dtype": "fp32"}, 40),
    }
    for name, (make, section, steps) in cases.items():
        ddp = model()
        optimizer = make(ddp.parameters())
        state = dct_plugin.attach(ddp, optimizer, {"dct": {"data_parallel": section}}, total_steps=steps)
        assert state is not None
        weights = train(ddp, optimizer, rank, range(6))
        settings = state.config.data_parallel
        found[name] = {
            "feedback": settings.feedback.label(),
            "sparsity": settings.sparsity,
            "start": (settings.dense_steps, settings.ramp_steps),
            "weights": weights,
            "log": log.take(),
            "names": sorted(state.reducer(weights.device).group.streams),
        }
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters())
    found["plain"] = {"weights": train(plain, optimizer, rank, range(6))}
    return found


@pytest.mark.slow
def test_feedback_follows_the_optimizer() -> None:
    first, second = run(2, _attached)
    for name, case in first.items():
        assert torch.equal(case["weights"], second[name]["weights"]), name
        assert not second[name].get("log")
    chosen = {
        name: (case["feedback"], case["sparsity"], case["start"])
        for name, case in first.items()
        if name != "plain"
    }
    assert chosen == {
        "AdamW": ("step_ahead", 0.99, (40, 822)),
        "short": ("step_ahead", 0.99, (4, 24)),
        "own start": ("step_ahead", 0.99, (2, 24)),
        "wrapped": ("step_ahead", 0.99, (4, 24)),
        "momentum": ("step_ahead", 0.99, (4, 24)),
        "SGD": ("local", 0.99, (0, 0)),
        "Adagrad": ("local", 0.99, (0, 0)),
        "Lion": ("local", 0.99, (4, 24)),
        "any Lion": ("local", 0, (0, 0)),
        "gentle Lion": ("local", 0.8, (4, 24)),
        "Muon": ("local", 0, (0, 0)),
        "sparse Muon": ("local", 0.99, (4, 24)),
        "fine-tuning": ("local", 0, (0, 0)),
        "sparse fine-tuning": ("step_ahead", 0.99, (4, 24)),
        "local": ("local", 0.99, (0, 0)),
        "exact": ("local", 0, (0, 0)),
    }
    assert torch.equal(first["exact"]["weights"], first["plain"]["weights"])
    assert first["SGD"]["names"] == ["0.weight"]
    active, note = first["short"]["log"]
    assert active.startswith(
        "dct: active on torch DDP, 4 of 4 parameters, 2 ranks, sparsity 0.99, bf16 values, "
        "feedback step_ahead"
    )
    assert note.startswith("dct: step-ahead for Adam, after 4 dense steps and a ramp of 24 (of 40 steps)")
    assert note.endswith("; learning rate 0.001, 2 ranks; measured with a GPT of 0.35M parameters")
    assert "step-ahead for Subclass" in first["wrapped"]["log"][1]
    assert len(first["SGD"]["log"]) == len(first["Adagrad"]["log"]) == len(first["exact"]["log"]) == 1
    assert "the step of Lion is not known: local error feedback at sparsity 0.99" in first["Lion"]["log"][1]
    assert "(known to lose with Adam 0.2 nats" in first["Lion"]["log"][1]
    assert "the step of Lion is not known: all entries are sent, in int8" in first["any Lion"]["log"][1]
    assert "known to lose" not in first["gentle Lion"]["log"][1]
    active, note = first["Muon"]["log"]
    assert "sparsity 0, int8 values, feedback local" in active
    assert note.startswith(
        "dct: Muon loses by thresholds (docs/quality.md#muon): all entries are sent, in int8, 3.9x"
    )
    assert "AdamW at 1e-05 is fine-tuning, which loses by thresholds" in first["fine-tuning"]["log"][1]
    assert "(known to lose 0.10 nats in fine-tuning" in first["sparse fine-tuning"]["log"][1]
    assert "(known to lose 0.07 nats" in first["sparse Muon"]["log"][1]
    warning = first["local"]["log"][1]
    assert "AdamW with feedback = 'local' at sparsity 0.99 is known to lose 0.2 nats" in warning
    assert 'better: leave "feedback" out' in warning


def _told_length(rank: int, world_size: int) -> dict[str, tuple[tuple[int, int], str]]:
    """Return the start and what the log says, by host and by how the length was told."""
    found, log = {}, Lines()
    for make in (model, replicated):
        for name, key, argument in (
            ("key", {"total_steps": 40}, None),
            ("argument", {}, 40),
            ("not", {}, None),
        ):
            made = make()
            optimizer = torch.optim.AdamW(made.parameters())
            section = {"data_parallel": {**SPARSE, **key}}
            state = dct_plugin.attach(made, optimizer, section, total_steps=argument)
            assert state is not None
            train(made, optimizer, rank, range(1))
            settings = state.config.data_parallel
            start = settings.dense_steps, settings.ramp_steps
            found[f"{make.__name__}, {name}"] = start, "".join(log.take())
    return found


@pytest.mark.slow
def test_a_short_run_has_a_shorter_start() -> None:
    found, _ = run(2, _told_length)
    unknown = (
        "a ramp of 822; the length of the run is not known (data_parallel.total_steps): its first 300 steps "
        "send 4x fewer bytes than fp32, its first 600 8x"
    )
    for name, (start, line) in found.items():
        is_told = not name.endswith(" not")
        assert start == ((4, 24) if is_told else (40, 822)), name
        assert ("4 dense steps and a ramp of 24 (of 40 steps)" if is_told else unknown) in line, name


def _added_group(rank: int, world_size: int) -> dict[str, tuple[list[bool], torch.Tensor, list[str]]]:
    """Return for each step whether the first layer, which the optimizer gets in step 4, was displaced."""
    log, found = Lines(), {}
    for make in (model, replicated):
        trained = make()
        layers = getattr(trained, "module", trained)
        optimizer = torch.optim.AdamW(layers[2].parameters(), lr=0.01)
        section = {**SPARSE, "feedback": "step_ahead", "warmup_steps": 1, "min_numel": 16}
        dct_plugin.attach(trained, optimizer, {"data_parallel": section})
        seen: list[torch.Tensor] = []
        displaced = []
        layers[0].register_forward_pre_hook(lambda layer, _, s=seen: s.append(layer.weight.detach().clone()))
        for step in range(8):
            if step == 4:
                optimizer.add_param_group({"params": layers[0].parameters(), "lr": 0.02})
            before = whole(layers[0].weight).clone()
            end = train(trained, optimizer, rank, range(step, step + 1))
            displaced.append(not torch.equal(seen[-1], before))
        found[make.__name__] = displaced, end, log.take()
    return found


@pytest.mark.slow
def test_groups_that_are_added_get_step_ahead() -> None:
    results = run(2, _added_group)
    for host, (displaced, end, lines) in results[0].items():
        assert displaced == results[1][host][0] == [False] * 5 + [True] * 3
        assert torch.equal(end, results[1][host][1])
        if host == "replicated":
            active = next(line for line in lines if "active on" in line)
            assert active.startswith("dct: active on FSDP2, 2 replicas, 1 of 2 parameter groups, sparsity")


class Around(torch.optim.Optimizer):
    """A wrapper, as Lookahead is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inside = inner

    def step(self, closure: Any = None) -> None:
        self.inside.step()


def _replaced(rank: int, world_size: int) -> dict[str, list[str]]:
    """The lines about the optimizer that makes the last steps, which is not the one that was passed."""
    log, found = Lines(), {}
    makes: dict[str, Any] = {
        "another": lambda passed: torch.optim.SGD(passed.param_groups[0]["params"], lr=0.1),
        "another of its kind": lambda passed: torch.optim.AdamW(passed.param_groups[0]["params"], lr=1e-3),
        "a wrapper": Around,
        "itself": lambda passed: passed,
    }
    for host, (name, make) in itertools.product((model, replicated), makes.items()):
        trained = host()
        passed = torch.optim.AdamW(trained.parameters(), lr=0.01)
        dct_plugin.attach(trained, passed, {"data_parallel": {**SPARSE, "warmup_steps": 1}})
        train(trained, passed, rank, range(2))
        log.take()
        train(trained, make(passed), rank, range(2, 5))
        found[f"{host.__name__}, {name}"] = [line for line in log.take() if "in place of" in line]
    return found


@pytest.mark.slow
def test_an_optimizer_that_takes_the_place_of_the_passed_one_is_named() -> None:
    first, second = run(2, _replaced)
    assert not any(second.values())
    for case, lines in first.items():
        kind = {"another": "SGD", "another of its kind": "AdamW"}.get(case.split(", ")[1])
        assert len(lines) == (kind is not None), case
        for line in lines:
            assert f"dct: {kind} makes step 2 in place of the AdamW that was passed" in line


def _accumulated(rank: int, world_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Second moments of a step of three passes, of which the second one is not reduced, and those expected.

    DDP adds each pass to the gradients that it reduced before, and reduces both.
    """
    found = {}
    for view in (False, True):
        ddp = DistributedDataParallel(model().module, gradient_as_bucket_view=view)
        plain = model().module
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        section = {**SPARSE, "feedback": "step_ahead", "warmup_steps": 0, "min_numel": 16}
        state = dct_plugin.attach(ddp, optimizer, {"data_parallel": section})
        assert isinstance(state, DCTState)
        squares = []
        for number in range(3):
            x = torch.randn(16, 60, generator=torch.Generator().manual_seed(10 * rank + number))
            with ddp.no_sync() if number == 1 else contextlib.nullcontext():
                ddp(x).square().mean().backward()
            plain(x).square().mean().backward()
            if number != 1:  # the second pass's gradients are reduced with the third's
                squares.append(plain[0].weight.grad.square())
                plain.zero_grad()
        optimizer.step()
        assert state._ahead is not None
        moments = state._ahead.moments.of("0.weight")
        assert moments is not None
        found[f"view {view}"] = moments.rows.clone(), sum(squares).mean(1) * (1 - 0.999)
        assert not state.reducer(x.device).add_ons.earlier
    return found


@pytest.mark.slow
def test_second_moments_see_the_gradients_of_each_pass() -> None:
    for found in run(2, _accumulated):
        for rows, expected in found.values():
            torch.testing.assert_close(rows, expected)


def _resumed(rank: int, world_size: int, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a run of one piece, and of one that is resumed, by state and by files."""

    def make() -> tuple[Any, Any, DCTState]:
        ddp = model()
        optimizer = torch.optim.AdamW(ddp.parameters())
        state = dct_plugin.attach(ddp, optimizer, {"data_parallel": SPARSE}, total_steps=10)
        assert state is not None
        return ddp, optimizer, state

    ddp, optimizer, state = make()
    train(ddp, optimizer, rank, range(6))
    saved = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "dct": state.state_dict()}
    saved = copy.deepcopy(saved)
    state.save(folder)
    whole = train(ddp, optimizer, rank, range(6, 9))
    ends = []
    for by_files in (False, True):
        ddp, optimizer, state = make()
        again = copy.deepcopy(saved)
        ddp.load_state_dict(again["model"])
        optimizer.load_state_dict(again["optimizer"])
        if by_files:
            assert state.load(folder)
        else:
            state.load_state_dict(again["dct"])
        ends.append(train(ddp, optimizer, rank, range(6, 9)))
    assert torch.equal(ends[0], ends[1])
    return whole, ends[0]


@pytest.mark.slow
def test_what_it_returns_saves_and_loads(tmp_path: Any) -> None:
    for whole, resumed in run(2, _resumed, str(tmp_path)):
        assert torch.equal(whole, resumed)


def _several(rank: int, world_size: int) -> dict[str, Any]:
    """Two optimizers of one model; what is said about others."""
    found, log = {}, Lines()
    section = {"data_parallel": {**SPARSE, "warmup_steps": 2, "sparsity_warmup_steps": 0}}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def sharded() -> nn.Module:
        return fully_shard(model().module, mesh=mesh)

    class Both:
        def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
            self.optimizers = optimizers

        def step(self) -> None:
            for each in self.optimizers:
                each.step()

    for make in (model, sharded):
        ends = []
        for several in (False, True):
            wrapped = make()
            parts = [list(wrapped.parameters())[:2], list(wrapped.parameters())[2:]]
            optimizers = [torch.optim.AdamW(each, lr=1e-2) for each in parts if several]
            optimizers = optimizers or [torch.optim.AdamW(wrapped.parameters(), lr=1e-2)]
            state = dct_plugin.attach(wrapped, optimizers if several else optimizers[0], section)
            ends.append(train(wrapped, Both(*optimizers), rank, range(8)))
            assert state is not None
            assert state.steps.step == 8
            assert not [line for line in log.take() if "none of the optimizers" in line]
        found[make.__name__] = torch.equal(
            *(getattr(each, "full_tensor", lambda e=each: e)() for each in ends)
        )
        wrapped = make()
        dct_plugin.attach(wrapped, torch.optim.AdamW(list(wrapped.parameters())[:2]), section)
        found[f"one of two, {make.__name__}"] = [line for line in log.take() if "active" not in line]
        other = nn.Linear(3, 3)
        second = torch.optim.SGD(other.parameters())
        wrapped = make()
        for name, optimizer in {
            "others": second,
            "one of others": [torch.optim.AdamW(wrapped.parameters()), second],
            "dict": section,
            "model": other,
        }.items():
            with pytest.raises(ConfigError) as refused:
                dct_plugin.attach(wrapped, optimizer, section if name != "dict" else None)
            found[f"{name}, {make.__name__}"] = str(refused.value)
    tables = nn.Sequential(nn.EmbeddingBag(50, 60, sparse=True), *model().module)
    ddp = DistributedDataParallel(tables)
    optimizers = [torch.optim.SparseAdam(tables[0].parameters()), torch.optim.Adam(tables[1:].parameters())]
    keys = {**SPARSE, "warmup_steps": 1, "sparsity_warmup_steps": 0, "nonfinite_action": "skip"}
    state = dct_plugin.attach(ddp, optimizers, {"data_parallel": keys})
    for step in range(6):
        rows = torch.randint(50, (8, 4), generator=torch.Generator().manual_seed(10 * step + rank))
        ddp.zero_grad()
        loss = ddp(rows).square().mean() * (torch.inf if step == 3 and rank else 1.0)
        loss.backward()
        Both(*optimizers).step()
    found["tables"] = torch.cat([each.detach().reshape(-1) for each in ddp.parameters()])
    found["feedback"] = (
        state.config.data_parallel.feedback.label(),
        sorted(state.reducer("cpu").group.streams),
    )
    lines = log.take()
    found["said"] = [line for line in lines if "sparse gradients" in line]
    found["active"] = next((line for line in lines if "4 of 5 parameters" in line), "")
    ddp = model()
    first, second = (list(ddp.parameters())[:2], list(ddp.parameters())[2:])
    optimizers = [torch.optim.SGD(first, lr=0.1), Lion(second)]
    mixed = dct_plugin.attach(ddp, optimizers, {"data_parallel": SPARSE})
    found["mixed"] = mixed.config.data_parallel.feedback.label(), mixed.config.data_parallel.sparsity
    return found


@pytest.mark.slow
def test_several_optimizers_and_others() -> None:
    results = run(2, _several)
    assert torch.equal(results[0]["tables"], results[1]["tables"])
    for rank, found in enumerate(results):
        assert found["tables"].isfinite().all()
        assert found["feedback"] == ("step_ahead", ["1.weight"])
        assert len(found["said"]) == 2 * (rank == 0)
        if rank == 0:
            assert "torch DDP, 4 of 5 parameters, 2 ranks" in found["active"]  # sparse ones are DDP's
            assert found["said"][0] == "dct: DDP all-reduces sparse gradients by itself: 0.weight"
            assert found["said"][1].endswith("of gradient bytes went uncompressed: sparse gradients")
        assert found["mixed"] == ("local", 0.99)  # what the least known of them gets
        for host in ("model", "sharded"):
            assert found[host], "two optimizers train as one"
            said = found[f"one of two, {host}"]
            assert len(said) == (rank == 0)
            if rank == 0:
                assert "2 parameters are in none of the optimizers that were passed" in said[0]
                assert "local error feedback at sparsity 0.99: 2.weight, 2.bias; pass all" in said[0]
            assert "the optimizer (SGD, 1 of 1) has no parameter of the model" in found[f"others, {host}"]
            assert "the optimizer (SGD, 2 of 2) has no parameter" in found[f"one of others, {host}"]
            assert "a dict is in the place of the optimizer" in found[f"dict, {host}"]
            assert "the section is the argument after it" in found[f"dict, {host}"]
            assert "a Linear is in the place of the optimizer" in found[f"model, {host}"]


def _switched_off(rank: int, world_size: int) -> tuple[list[bool], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain descent: after the step that pays, weights are where dense training is, up to rounding."""
    dense_after, ends = [], []
    for section in (None, {"data_parallel": {**SPARSE, "feedback": "local", "value_dtype": "fp32"}}):
        ddp = model()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)  # so small that gradients hardly change
        state = None if section is None else dct_plugin.attach(ddp, optimizer, section)
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()])
        before = train(ddp, optimizer, rank, range(8)) - weights
        if state is not None:
            dct_plugin.detach(state)
        ends.append((before, train(ddp, optimizer, rank, range(8, 9)) - weights))
        if state is not None:
            for step in (9, 10):
                dense_after.append(state.fallback_hook is not None)
                train(ddp, optimizer, rank, range(step, step + 1))
    ddp = model()
    by_hand = dct_plugin.DCTState({"data_parallel": {**SPARSE, "feedback": "local"}})
    ddp.register_comm_hook(by_hand, dct_plugin.dct_hook)
    for step in range(3):
        if step == 1:
            by_hand.detach()
        dense_after.append(by_hand.fallback_hook is not None)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank, range(step, step + 1))
    dense_after.append(by_hand.fallback_hook is not None)
    (_, dense), (early, paid) = ends
    return dense_after, dense, early, paid


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_switching_off_sends_the_residuals(world_size: int) -> None:
    results = run(world_size, _switched_off)
    dense_after, dense, early, paid = results[0]
    assert (early - dense).norm() > 0.3 * dense.norm()
    assert (paid - dense).norm() < 0.02 * dense.norm()
    assert all(torch.equal(paid, other[3]) for other in results)
    assert dense_after == [False, True, *[False] * 3, True]


def _refused(rank: int, world_size: int) -> list[str]:
    said: list[str] = []

    def note(call: Any) -> None:
        with pytest.raises(ConfigError) as raised:
            call()
        said.append(str(raised.value))

    plain = nn.Linear(60, 40)
    optimizer = torch.optim.Adam(plain.parameters())
    note(lambda: dct_plugin.attach(plain, optimizer, {}))
    note(lambda: dct_plugin.attach(replicate(nn.Linear(60, 40)), optimizer, {}))
    note(lambda: DCTState().register(plain))  # type: ignore[arg-type]
    note(lambda: dct_plugin.attach(fully_shard(nn.Linear(60, 40)), optimizer, {}))
    note(
        lambda: dct_plugin.attach(FullyShardedDataParallel(nn.Linear(60, 40), device_id="cpu"), optimizer, {})
    )
    fsdp = FullyShardedDataParallel(
        nn.Linear(60, 40), device_id="cpu", sharding_strategy=torch.distributed.fsdp.ShardingStrategy.NO_SHARD
    )
    fsdp.register_comm_hook(DCTState(), dct_hook)
    note(lambda: fsdp(torch.ones(2, 60)).sum().backward())
    ddp = model()
    local = DCTState({"data_parallel": {"feedback": "local"}})
    note(lambda: local.step_ahead(ddp, torch.optim.Adam(ddp.parameters())))
    ddp = model()
    DCTState({"data_parallel": {"feedback": "step_ahead"}}).register(ddp)
    note(lambda: ddp(torch.ones(2, 60)).sum().backward())
    delayed = nn.Sequential(nn.Linear(60, 40), nn.Linear(40, 40))
    ddp = DistributedDataParallel(
        delayed,
        delay_all_reduce_named_params=[("1.weight", delayed[1].weight)],
        param_to_hook_all_reduce=delayed[0].weight,
    )
    note(lambda: dct_plugin.attach(ddp, torch.optim.Adam(ddp.parameters()), {}))
    stepping = nn.Linear(60, 40)
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(stepping)
    note(lambda: dct_plugin.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), {}))
    log = Lines()
    ddp = model()
    state = DCTState({"data_parallel": SPARSE}).register(ddp)
    train(ddp, torch.optim.Adam(ddp.parameters()), rank, range(2))
    assert state.config.data_parallel.feedback.label() == "local"
    # torch's own call tells the optimizer, and not the model
    ddp = model()
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp.register_comm_hook(DCTState({"data_parallel": SPARSE}, optimizer=optimizer), dct_hook)
    train(ddp, optimizer, rank, range(2))
    return said + [line for line in log.take() if "active" not in line] * (rank == 0)


@pytest.mark.slow
def test_refusals_say_what_to_do_instead() -> None:
    for rank, said in enumerate(run(2, _refused)):
        unwrapped, composed, no_ddp, fsdp2, fsdp1, hook, local, ahead, delayed, stepping, *log = said
        assert "Linear is not wrapped" in unwrapped
        assert "DistributedDataParallel(model)" in unwrapped
        assert "replicate() makes its DistributedDataParallel in the first forward pass" in composed
        assert "Linear is no DistributedDataParallel" in no_ddp
        assert "make it after fully_shard, which replaces the parameters" in fsdp2
        assert "FullyShardedDataParallel (FSDP1)" in fsdp1
        assert "dct_plugin.attach(model, optimizer, section)" in hook
        assert "needs dct.data_parallel.feedback = 'step_ahead', it is 'local'" in local
        assert "call dct_plugin.attach(model, optimizer, section)" in ahead
        assert "state.step_ahead(model, optimizer)" in ahead
        assert "delay_all_reduce_named_params=...) does not wait" in delayed
        assert "call optimizer.step() after the backward pass" in stepping
        if rank == 0:
            untold, unnamed = log
            assert "dct: the optimizer was not told (dct_plugin.attach(model, optimizer)" in untold
            assert "0.2 nats" in untold
            assert "register_comm_hook does not tell the model" in unnamed


def test_before_the_process_group_exists(caplog: pytest.LogCaptureFixture) -> None:
    assert not dist.is_initialized()
    assert DCTState({"dct": {"data_parallel": {"sparsity": 0.9}}}).config.data_parallel.sparsity == 0.9
    plain = nn.Linear(6, 4)
    state = dct_plugin.attach(plain, torch.optim.Adam(plain.parameters()), {})
    assert "nothing to do: the training has one process" in caplog.text
    state.load_state_dict(state.state_dict())
    state.save("nowhere")
    assert not state.load("nowhere")
    state.detach()
    state.close()
    assert state.metrics.summary().steps == 0
    with pytest.raises(ConfigError, match="did you mean"):
        dct_plugin.attach(plain, None, {"data_parallel": {"sparsitty": 0.9}})


@pytest.mark.parametrize("steps", [-1, "100", float("nan"), float("inf")])
def test_a_wrong_number_of_steps_is_named(steps: Any) -> None:
    plain = nn.Linear(6, 4)
    with pytest.raises(ConfigError, match=f"total_steps = {steps!r}: must be the number of optimizer steps"):
        dct_plugin.attach(plain, None, {}, total_steps=steps)


def test_schedulers_say_how_long_a_run_is() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = torch.optim.lr_scheduler
    assert steps_of(schedulers.OneCycleLR(optimizer, 1.0, total_steps=70)) == 70
    assert steps_of(schedulers.CosineAnnealingLR(optimizer, 80)) == 80
    assert steps_of(schedulers.StepLR(optimizer, 80)) is None
    assert steps_of(None) is None
    transformers = pytest.importorskip("transformers")
    assert steps_of(transformers.get_linear_schedule_with_warmup(optimizer, 3, 90)) == 90


def _applied(rank: int, world_size: int) -> tuple[dict[str, Any], str, list[str], int, Any]:
    ddp, log = model(), Lines()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    section = {"min_numel": 1000, "warmup_steps": 1, "sparsity_warmup_steps": 0, "quality": None}
    state = dct_plugin.attach(ddp, optimizer, {"data_parallel": section})
    train(ddp, optimizer, rank, range(4))
    summary = state.metrics.summary()
    reducer = state.reducer(torch.device("cpu"))
    assert reducer.config == state.config.data_parallel == state.applied.settings
    density = getattr(summary.classes.get("gradient"), "density", None)
    settings = state.config.data_parallel.model_dump(include={"sparsity", "value_dtype"})
    return settings, state.config.fingerprint(), log.take(), state.applied.compressors, density


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "sparsity", "values"), [(1, 0.99, "bf16"), (2, 0.99, "bf16"), (5, 0.96, "int4"), (9, 0, "int8")]
)
def test_configuration_log_and_bytes_agree(count: int, sparsity: float, values: str) -> None:
    results = run(count, _applied)
    for settings, fingerprint, log, compressors, density in results:
        assert settings == {"sparsity": sparsity, "value_dtype": values}
        assert fingerprint == results[0][1]
        assert compressors == count
        if count > 1 and sparsity:
            assert density == pytest.approx(1 - sparsity, rel=0.5)
        for line in log[:1]:
            assert f"sparsity {sparsity:g}, {values} values" in line
            assert line.endswith(f", config {fingerprint}")
    assert len(results[0][2]) >= (count > 1)


def _displaced_when_it_is_registered(rank: int, world_size: int, told: bool) -> int:
    made, ddp = list[Any](), model()
    prepare = StepAheadAddOn.prepare
    StepAheadAddOn.prepare = lambda *args, **keys: made.append(prepare(*args, **keys)) or made[-1]  # type: ignore
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    section = {"data_parallel": {**SPARSE, "warmup_steps": 1, "feedback": "step_ahead"}}
    state = DCTState(section, optimizer=optimizer if told else None).register(ddp)
    state.step_ahead(ddp, optimizer)
    ahead = state._ahead
    train(ddp, optimizer, rank, range(4))
    assert state._ahead is ahead
    return len(made)


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_a_registered_model_is_displaced_once(told: bool) -> None:
    assert run(2, _displaced_when_it_is_registered, told) == [1, 1]


def _displaced_before_it_is_registered(rank: int, world_size: int) -> list[str]:
    log, ddp = Lines(), model()
    optimizer, first = torch.optim.AdamW(ddp.parameters(), lr=1e-2), copy.deepcopy(ddp.module.state_dict())
    section = {**SPARSE, "warmup_steps": 2, "sparsity_warmup_steps": 0, "feedback": "step_ahead"}
    state = DCTState({"data_parallel": section}, optimizer=optimizer)
    state.step_ahead(ddp.module, optimizer)
    state.register(ddp)
    train(ddp, optimizer, rank, range(6))
    ddp.module.load_state_dict(first)
    train(ddp, optimizer, rank, range(6, 8))
    return log.take()


@pytest.mark.slow
def test_a_model_that_is_displaced_before_it_is_registered_is_watched_all_the_same() -> None:
    said = run(2, _displaced_before_it_is_registered)[0]
    assert any("load_state_dict has changed the weights of" in line for line in said)


def _on_nodes(rank: int, world_size: int) -> list[tuple[dict[str, int], float]]:
    found = []
    for settings in ({"nodes": 2}, {**SPARSE, "nodes": 2, "feedback": "local"}):
        ddp = model()
        optimizer = torch.optim.AdamW(ddp.parameters())
        with groups_made() as made:
            state: Any = dct_plugin.attach(ddp, optimizer, {"data_parallel": settings})
            train(ddp, optimizer, rank, range(3))
        (reducer,) = state.reducers
        limits = {time_limit(exchange.peers.group) for exchange in reducer.group.exchanges}
        found.append((made, limits.pop()))
        assert not limits
        state.close()
    return found


@pytest.mark.slow
def test_process_groups_of_nodes_are_made_before_the_first_pass() -> None:
    """They have the time limit of DDP's group."""
    for found in run(4, _on_nodes):
        assert found == [({"before": 2, "in passes": 0}, TIMEOUT.total_seconds())] * 2


def _fails_on_nodes(rank: int, world_size: int) -> None:
    state = DCTState({"data_parallel": {**SPARSE, "nodes": 2}})
    if rank == 1:
        state.load_state_dict({"reducer": {"foreign": 1}})
    state.register(model())


@pytest.mark.slow
def test_a_rank_that_fails_before_they_are_made_stops_all() -> None:
    for rank, (kind, text) in enumerate(launch(4, _fails_on_nodes)):
        assert kind == "error"
        assert ("KeyError" if rank == 1 else f"rank {rank}: rank 1 failed at start-up: KeyError") in text


def _in_float64(rank: int, world_size: int) -> list[list[str]]:
    """The lines at the start, for small tensors of float64, large ones, and large ones of fp32."""
    log, found = Lines(), []
    for dtype, size in ((torch.float64, 40), (torch.float64, 100), (torch.float32, 100)):
        ddp = DistributedDataParallel(nn.Linear(size, size, dtype=dtype))
        optimizer = torch.optim.AdamW(ddp.parameters())
        dct_plugin.attach(ddp, optimizer, {})
        ddp(torch.ones(2, size, dtype=dtype)).square().mean().backward()
        optimizer.step()
        found.append([line for line in log.take() if "float64" in line])
    return found


@pytest.mark.slow
def test_gradients_that_are_rounded_to_fp32_are_named() -> None:
    first, second = run(2, _in_float64)
    assert first == [[], ["dct: gradients of float64 cross in fp32 or fewer bits"], []]
    assert not any(second)


def _in_fp16(rank: int, world_size: int) -> list[torch.Tensor]:
    """Return the gradients, whose sums fp16 does not hold, of DDP alone and with the plugin."""
    found = []
    for settings in (None, {"sparsity": 0.9, "min_numel": 10, "warmup_steps": 1}):
        ddp = DistributedDataParallel(nn.Linear(2000, 1, bias=False).half())
        if settings is not None:
            dct_plugin.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), {"data_parallel": settings})
        ddp(torch.full((1, 2000), 40_000.0 + 1024 * rank).half()).sum().backward()
        found.append(ddp.module.weight.grad.clone())
    return found


@pytest.mark.slow
def test_dense_means_of_fp16_overflow_where_those_of_ddp_do() -> None:
    for plain, ours in run(2, _in_fp16):
        assert plain.isfinite().all()
        assert torch.equal(plain, ours)
