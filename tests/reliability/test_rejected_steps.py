"""Gradients that a script clears without ``optimizer.step()``: they are no step, and leave no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.processes import logged, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin import ConfigError, DCTState, dct_hook

pytestmark = pytest.mark.slow

KEYS = {"sparsity": 0.9, "min_numel": 16, "warmup_steps": 2, "sparsity_warmup_steps": 0}
SKIP = {**KEYS, "nonfinite_action": "skip"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))


def ddp(section: dict[str, Any], **more: Any) -> Any:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, dct_plugin.attach(model, optimizer, {"data_parallel": section}, **more)


def hooked(section: dict[str, Any], **more: Any) -> Any:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = DCTState({"data_parallel": {**section, "feedback": "local"}}, optimizer=optimizer, **more)
    model.register_comm_hook(state, dct_hook)
    return model, optimizer, state


def fsdp(section: dict[str, Any], **more: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, dct_plugin.attach(model, optimizer, {"data_parallel": section}, **more)


def clear(optimizer: torch.optim.Optimizer, way: str) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if way != "zeros" or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    batches: list[int],
    *,
    way: str = "none",
    micro: int = 1,
    scaler: Any = None,
) -> None:
    """Batches from 100 on are far off on rank 1, and rejected on all ranks."""
    for batch in batches:
        if way != "after forward":
            clear(optimizer, way)
        for part in range(micro):
            seed = 1000 * batch + 10 * part + rank
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean() * (1e4 if batch >= 100 and rank == 1 else 1.0)
            if way == "after forward" and not part:
                clear(optimizer, way)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if batch >= 100 and way == "and steps":
            clear(optimizer, "none")
        elif batch >= 100:
            continue
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())


def whole(model: nn.Module, state: Any) -> tuple[int, list[Tensor], dict[str, Any]]:
    """Steps, parameters, and all that is kept for the next step."""
    saved = state.state_dict()
    if "reducer" in saved:
        kept = saved["reducer"]
    else:
        kept = {name: each.full_tensor() for name, each in saved["residuals"].items()}
    parameters = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
    return state.steps.step, parameters, kept


Case = tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "DDP": (ddp, SKIP, {}),
    "DDP, zeros": (ddp, SKIP, {"way": "zeros"}),
    "DDP, cleared after the forward pass": (ddp, SKIP, {"way": "after forward"}),
    "DDP, accumulated": (ddp, SKIP, {"micro": 3}),
    "DDP, local": (ddp, {**SKIP, "feedback": "local"}, {}),
    "DDP, bf16 residuals": (ddp, {**SKIP, "residual_dtype": "bf16"}, {"micro": 2}),
    "DDP, hook alone": (hooked, SKIP, {}),
    "DDP, scaler": (ddp, KEYS, {"scaler": 1024.0}),
    "FSDP2": (fsdp, SKIP, {}),
    "FSDP2, zeros": (fsdp, SKIP, {"way": "zeros"}),
    "FSDP2, accumulated": (fsdp, SKIP, {"micro": 3}),
    "FSDP2, scaler": (fsdp, KEYS, {"scaler": 1024.0}),
}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def _rejects(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (make, section, options) in CASES.items():
        ends = []
        for batches in ([0, 1, 2, 3, 4, 100, 5, 101, 102, 6], [0, 1, 2, 3, 4, 5, 6]):
            more = dict(options)
            if scale := more.pop("scaler", None):
                more["scaler"] = torch.amp.GradScaler("cpu", init_scale=scale)
            model, optimizer, state = make(section, **{k: v for k, v in more.items() if k == "scaler"})
            train(model, optimizer, rank, batches, **more)
            ends.append(whole(model, state))
        found[name] = ends[0][0], ends[1][0], _same(ends[0][1], ends[1][1]), _same(ends[0][2], ends[1][2])
    return found


def test_no_trace_is_left() -> None:
    for found in run(2, _rejects):
        assert found == dict.fromkeys(CASES, (7, 7, True, True))


def _steps_on_nothing(rank: int, world_size: int) -> list[Any]:
    """The script clears the gradients and calls ``optimizer.step()`` all the same."""
    found = []
    for make in (ddp, fsdp):
        model, optimizer, state = make({**SKIP, "feedback": "local"})
        train(model, optimizer, rank, [0, 1, 2, 3])
        _, parameters, kept = whole(model, state)
        before = kept.get("streams", kept)
        train(model, optimizer, rank, [100], way="and steps")
        steps, after, kept = whole(model, state)
        found.append((steps, _same(parameters, after), _same(before, kept.get("streams", kept))))
    for make in (ddp, fsdp):  # the scaler ends a step that the optimizer did not make
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model, optimizer, state = make({**KEYS, "feedback": "local"}, scaler=scaler)
        train(model, optimizer, rank, [0, 1, 2, 3], scaler=scaler)
        _, parameters, kept = whole(model, state)
        before = kept.get("streams", kept)
        optimizer.zero_grad()
        scaler.scale(1e4 * model(torch.ones(4, 20)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps, after, kept = whole(model, state)
        found.append((steps, _same(parameters, after), _same(before, kept.get("streams", kept))))
    return found


def test_a_step_without_gradients_counts_and_leaves_residuals() -> None:
    for found in run(2, _steps_on_nothing):
        assert found == [(5, True, True)] * 4


def _without_the_key(rank: int, world_size: int) -> list[list[str]]:
    said = []
    for make, keys in ((ddp, KEYS), (fsdp, KEYS), (ddp, {**KEYS, "sparsity": 0.0, "feedback": "none"})):
        with logged() as lines:
            model, optimizer, _ = make(keys)
            train(model, optimizer, rank, [0, 1, 2, 100, 101, 3, 102, 4])
        said.append([line for line in lines if "cleared" in line])
    return said


def test_one_warning_says_what_happens_without_the_key() -> None:
    first, second = run(2, _without_the_key)
    *first, without_residuals = first
    assert second == [[], [], []]
    assert without_residuals == []
    for (line,) in first:
        assert "step 3: its gradients were cleared without optimizer.step()" in line
        assert "is set to zero, once. From now on a second residual, 5.6 kB on a rank" in line


# -- what counts as a step ---


def _counts(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Steps of the state and of its metrics, after five steps of the optimizer."""
    found = {}

    def note(name: str, state: Any) -> None:
        found[name] = state.steps.step, state.metrics.summary().steps

    for make in (ddp, hooked, fsdp):
        model, optimizer, state = make(KEYS)
        train(model, optimizer, rank, [0, 1, 2, 3, 4], micro=3)
        note(make.__name__, state)
    model, optimizer, state = ddp(KEYS)
    for _ in range(5):
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                model(torch.ones(4, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    note("no_sync", state)
    model, optimizer, state = ddp(KEYS, scaler=torch.amp.GradScaler("cpu", init_scale=16.0))
    scaler = state._optimizer_steps.scaler
    train(model, optimizer, rank, [0, 1, 2, 3, 4], micro=2, scaler=scaler)
    state.state_dict()
    note("scaler", state)

    model = DistributedDataParallel(network())
    closing = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with pytest.raises(ConfigError, match="compares gradients of several passes"):
        dct_plugin.attach(model, closing, {"data_parallel": SKIP})
    dct_plugin.attach(model, closing, {"data_parallel": {"quality": "dense"}}).detach()
    model, exact = DistributedDataParallel(network()), {**SKIP, "sparsity": 0.0, "value_dtype": "fp32"}
    closing = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    state = dct_plugin.attach(model, closing, {"data_parallel": exact})
    passes = 0

    def closure() -> Tensor:
        nonlocal passes
        passes += 1
        closing.zero_grad()
        loss = model(torch.ones(4, 20)).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        closing.step(closure)
    assert passes > 10
    note("closure", state)
    return found


def test_a_step_is_an_optimizer_step() -> None:
    for found in run(2, _counts):
        assert found == dict.fromkeys(found, (5, 5))
        assert len(found) == 6
