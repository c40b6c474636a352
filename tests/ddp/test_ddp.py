"""torch's DistributedDataParallel with the hook, in real processes."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.processes import launch, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_plugin import DCTState, dct_hook
from dct_plugin.errors import ConfigError
from dct_plugin.integrations.ddp import AveragedResiduals
from dct_plugin.report.reading import read

pytestmark = pytest.mark.slow

SPARSE = {"data_parallel": {"sparsity": 0.95, "min_numel": 1000}}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 1))


def hooked(section: Any = SPARSE, model: nn.Module | None = None, **more: Any) -> tuple[nn.Module, DCTState]:
    ddp = DistributedDataParallel(network() if model is None else model)
    state = DCTState(section, **more)
    ddp.register_comm_hook(state, dct_hook)
    return ddp, state


def train(ddp: nn.Module, rank: int, steps: range, scaler: Any = None, poison: int = -1) -> torch.Tensor:
    """Plain descent; the parameters afterwards."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in steps:
        x = torch.randn(32, 100, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = ddp(x).square().mean() * (float("inf") if step == poison and rank == 0 else 1.0)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])


def residuals(state: DCTState) -> dict[str, torch.Tensor]:
    streams = state.state_dict()["reducer"]["streams"]
    return {name: s["residual"].clone() for name, s in streams.items() if s["residual"] is not None}


def _portable(rank: int, world_size: int, folder: str, save: bool) -> dict[str, Any]:
    """Return the residuals before saving, or after loading and before a step, and later weights."""
    model = network()
    ddp, state = hooked(model=model, named_parameters=list(model.named_parameters()))
    unsent = AveragedResiduals(state)
    if save:
        train(ddp, rank, range(5))
        dcp.save({"dct": unsent}, checkpoint_id=folder)
    else:
        dcp.load({"dct": unsent}, checkpoint_id=folder)
    found = residuals(state)
    step = state.state_dict()["reducer"]["step"]
    return {"unsent": found, "step": step, "weights": train(ddp, rank, range(5, 7))}


@pytest.mark.parametrize("world_size", [2, 4])
def test_torchs_distributed_checkpoints_keep_residuals(tmp_path: Path, world_size: int) -> None:
    saved = run(2, _portable, str(tmp_path), True)
    loaded = run(world_size, _portable, str(tmp_path), False)
    assert saved[0]["unsent"]
    for name in saved[0]["unsent"]:
        mean = sum(rank["unsent"][name] for rank in saved) / 2
        assert not torch.equal(mean, saved[0]["unsent"][name])
        for rank in loaded:
            torch.testing.assert_close(rank["unsent"][name], mean, rtol=1e-6, atol=1e-7)
    assert all(rank["step"] == 5 for rank in loaded)
    assert all(torch.equal(rank["weights"], loaded[0]["weights"]) for rank in loaded)


def _unnamed(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigError) as raised:
        AveragedResiduals(DCTState(SPARSE))
    with pytest.raises(ConfigError) as other:
        DCTState({"data_parallel": {"parameters": {}}})
    return f"{raised.value} {other.value}"


def test_names_are_needed_for_them_and_there_are_no_updates_of_weights() -> None:
    (text,) = run(1, _unnamed)
    assert "needs DCTState(..., named_parameters=" in text
    assert "dct.data_parallel.parameters = {}: torch DDP: every rank has the whole" in text


# -- training ---


def _learns(
    rank: int, world_size: int, section: dict[str, Any] | None, steps: int, bucket_mb: float
) -> dict[str, Any]:
    model = DistributedDataParallel(network(), bucket_cap_mb=bucket_mb)
    state = None
    if section is not None:
        state = DCTState(section, named_parameters=model.module.named_parameters())
        model.register_comm_hook(state, dct_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    weights = torch.randn(100, generator=torch.Generator().manual_seed(99))
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 100, generator=generator)
        loss = (model(x).squeeze(1) - torch.tanh(x @ weights / 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    names = sorted(state.reducer(flat.device).group.streams) if state is not None else []
    steps = 0 if state is None else state.metrics.summary().steps
    return {"losses": losses, "parameters": flat, "streams": names, "steps": steps}


def _again(rank: int, world_size: int) -> bool:
    """DDP does not synchronize a second pass through one graph: its gradients are left alone."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    state = DCTState(SPARSE).register(model)
    train(model, rank, range(4))
    loss = model(torch.randn(32, 100, generator=torch.Generator().manual_seed(rank))).square().mean()
    loss.backward(retain_graph=True)
    before, kept = [p.grad.clone() for p in model.parameters()], residuals(state)
    loss.backward()
    own = [p.grad - b for p, b in zip(model.parameters(), before, strict=True)]
    alone = network()
    alone.load_state_dict(model.module.state_dict())
    alone(torch.randn(32, 100, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    for found, parameter in zip(own, alone.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
    after = residuals(state)
    assert all(torch.equal(after[name], kept[name]) for name in kept)
    weights = train(model, rank, range(4, 6))
    everybody = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(everybody, weights)
    return all(torch.equal(weights, other) for other in everybody)


def test_a_second_pass_through_a_graph_is_left_alone() -> None:
    assert all(run(2, _again))


def test_sparsity_zero_is_plain_ddp_bitwise() -> None:
    """Also where Accordion chooses between two such settings."""
    exact = {"sparsity": 0.0, "value_dtype": "fp32"}
    adaptive = {"adaptive": {"kind": "accordion", "sparsity": 0.0, "interval": 2}}
    plain = run(2, _learns, None, 4, 0.1)
    for more in ({}, adaptive):
        with_hook = run(2, _learns, {"data_parallel": {**exact, **more}}, 4, 0.1)
        assert torch.equal(plain[0]["parameters"], with_hook[0]["parameters"])
        assert plain[1]["losses"] == with_hook[1]["losses"]


def test_it_trains_in_step_and_streams_follow_parameters() -> None:
    """Small buckets: the layout changes after the first step, the streams (and their residuals) stay."""
    results = run(2, _learns, SPARSE, 60, 0.1)
    assert torch.equal(results[0]["parameters"], results[1]["parameters"])
    assert sum(results[0]["losses"][-10:]) < 0.5 * sum(results[0]["losses"][:10])
    assert results[0]["streams"] == ["0.weight", "2.weight"]
    assert results[0]["steps"] == 60


# -- start-up ---


def _starts(rank: int, world_size: int, case: str) -> None:
    section: Any = SPARSE
    if case == "settings" and rank == 1:
        section = {"data_parallel": {**SPARSE["data_parallel"], "sparsity": 0.9}}
    ddp = DistributedDataParallel(network())
    if case == "no hook" and rank == 1:
        pass
    else:
        state = DCTState(section, time_limit=3 if case == "no hook" else 60)
        if case == "steps" and rank == 1:
            state.load_state_dict({"reducer": {"step": 7, "loss_scale": 1.0, "streams": {}}})
        if case == "state" and rank == 1:
            state.load_state_dict({"reducer": {"foreign": 1}})
        ddp.register_comm_hook(state, dct_hook)
    train(ddp, rank, range(1))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("settings", "dct.data_parallel.sparsity differs: 0.95 on ranks 0, 2; 0.9 on rank 1"),
        ("steps", "optimizer steps so far differs: 0 on ranks 0, 2; 7 on rank 1"),
    ],
)
def test_a_rank_that_differs_stops_all(case: str, words: str) -> None:
    for rank, (kind, text) in enumerate(launch(3, _starts, case)):
        assert kind == "error"
        assert f"DesyncError: rank {rank}: {words}" in text


def test_a_rank_that_fails_before_its_first_bucket_stops_all() -> None:
    outcomes = launch(3, _starts, "state")
    assert [kind for kind, _ in outcomes] == ["error"] * 3
    assert "KeyError" in outcomes[1][1]
    for rank in (0, 2):
        assert f"DesyncError: rank {rank}: rank 1 failed at start-up: KeyError" in outcomes[rank][1]


def test_a_rank_without_the_hook_is_named_within_the_limit() -> None:
    outcomes = launch(3, _starts, "no hook")
    assert [kind for kind, _ in outcomes] == ["error"] * 3  # rank 1 is left alone in its all-reduce
    for rank in (0, 2):
        assert "rank 1 did not report within 3 s: crashed, or its model has no dct_hook" in outcomes[rank][1]


def _two_models_in_groups(rank: int, world_size: int) -> bool:
    """States are agreed on one by one, also over a part of the ranks."""
    pair = dist.new_group([0, 2])
    ddp, _ = hooked()
    train(ddp, rank, range(1))
    if rank != 1:
        part = DistributedDataParallel(network(), process_group=pair)
        part.register_comm_hook(DCTState(SPARSE, pair), dct_hook)
        train(part, rank, range(1))
    again, _ = hooked()
    train(again, rank, range(1))
    return True


def test_several_models() -> None:
    assert all(run(3, _two_models_in_groups))


def _two_groups(rank: int, world_size: int, folder: str) -> str:
    """Two groups of one job, with one section; the line that a rank prints at the end."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for name in ("rank_0", "of_{rank}"):
            section = {**SPARSE, "metrics": {"path": f"{folder}/{name}.jsonl", "every": 1}}
            ddp = DistributedDataParallel(network(), process_group=pairs[rank // 2])
            state = DCTState(section).register(ddp)
            train(ddp, rank, range(2 + rank // 2))
            state.close()
    return printed.getvalue()


def test_groups_of_one_job_have_files_of_their_own(tmp_path: Path) -> None:
    printed = run(4, _two_groups, str(tmp_path))
    assert [text.count(f"steps, rank {rank} sent") for rank, text in enumerate(printed)] == [2, 0, 2, 0]
    ranks, notes = read([tmp_path / "rank_0.jsonl"])
    assert ([(each.rank, len({row.step for row in each.rows})) for each in ranks], notes) == ([(0, 2)], [])
    ranks, _ = read([tmp_path / f"of_{rank}.jsonl" for rank in range(4)])
    assert [len({row.step for row in each.rows}) for each in ranks] == [2, 2, 3, 3]


def _fails_later(rank: int, world_size: int) -> None:
    ddp, state = hooked({"data_parallel": {"sparsity": 0.9, "min_numel": 1000}})
    train(ddp, rank, range(1))
    if rank == 0:
        state.reducer(torch.device("cpu")).planner.plan = None  # type: ignore[method-assign,assignment]
    train(ddp, rank, range(1, 2))


def test_a_failure_inside_the_hook_reaches_every_rank() -> None:
    outcomes = launch(2, _fails_later)
    assert [kind for kind, _ in outcomes] == ["error", "error"]
    assert "rank(s) [0] failed" in outcomes[1][1]


# -- checkpoints ---


def _resumes(rank: int, world_size: int, folder: str | None) -> bool:
    """Five steps, or two, save, load into new objects, and three more: the same parameters bitwise."""
    whole, _ = hooked()
    expected = train(whole, rank, range(5))
    first, before = hooked()
    train(first, rank, range(2))
    model = network()
    model.load_state_dict(first.module.state_dict())
    second, state = hooked(model=model)
    if folder is None:
        state.load_state_dict(before.state_dict())
    else:
        before.save(folder)
        assert state.load(folder)
    same = torch.equal(train(second, rank, range(2, 5)), expected)
    return same and state.steps.step == 5


def test_a_resumed_run_goes_on_bitwise(tmp_path: Path) -> None:
    assert all(run(2, _resumes, None))
    assert all(run(2, _resumes, str(tmp_path)))
    # Written by two ranks: three take the mean of their residuals.
    assert run(3, _loads, str(tmp_path)) == [(True, 2)] * 3
    assert run(2, _loads, str(tmp_path / "none")) == [(False, 0)] * 2


def _loads(rank: int, world_size: int, folder: str) -> tuple[bool, int]:
    ddp, state = hooked()
    found = state.load(folder)
    step = state.reducer(torch.device("cpu")).group.step
    train(ddp, rank, range(1))
    return found, step


# -- loss scaling ---


def _scaled(rank: int, world_size: int) -> bool:
    """Scales are powers of two: the same parameters bitwise as without."""
    plain, _ = hooked()
    expected = train(plain, rank, range(6))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    ddp, state = hooked(scaler=scaler)
    same = torch.equal(train(ddp, rank, range(6), scaler), expected)
    state.state_dict()
    return same and scaler.get_scale() == 8192.0 == state.reducer(torch.device("cpu")).group.loss_scale


def test_residuals_follow_the_loss_scale() -> None:
    assert all(run(2, _scaled))


def _skipped(rank: int, world_size: int) -> bool:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp, state = hooked(scaler=scaler)
    parameters = train(ddp, rank, range(2), scaler)
    before = residuals(state)
    assert torch.equal(train(ddp, rank, range(2, 3), scaler, poison=2), parameters)
    assert scaler.get_scale() == 512.0
    after = residuals(state)
    assert before.keys() == after.keys()
    return all(torch.equal(after[name], before[name] / 2) for name in before) and state.steps.step == 3


def test_a_skipped_step_is_taken_back() -> None:
    assert all(run(2, _skipped))


def _resumed_in_another_unit(rank: int, world_size: int, has_scaler: bool) -> None:
    """A run with a scaler goes on with none, or with one whose state is loaded last."""

    def started(scaler: Any) -> tuple[nn.Module, DCTState]:
        ddp = DistributedDataParallel(network())
        return ddp, DCTState(SPARSE, scaler=scaler).register(ddp)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp, state = started(scaler)
    train(ddp, rank, range(4), scaler)
    weights, saved, scale = copy.deepcopy(ddp.state_dict()), state.state_dict(), scaler.state_dict()
    expected = train(ddp, rank, range(4, 8), scaler)
    again = torch.amp.GradScaler("cpu", init_scale=2.0**20) if has_scaler else None
    ddp, state = started(again)
    ddp.load_state_dict(weights)
    state.load_state_dict(saved)
    if again is not None:
        again.load_state_dict(scale)
    torch.testing.assert_close(train(ddp, rank, range(4, 8), again), expected)


@pytest.mark.parametrize("has_scaler", [False, True])
def test_a_restart_with_another_loss_scale_changes_nothing(has_scaler: bool) -> None:
    run(2, _resumed_in_another_unit, has_scaler)


# -- step-ahead ---


def _looks_ahead(rank: int, world_size: int, case: str, folder: str) -> torch.Tensor:
    """AdamW with a schedule, gradient accumulation and clipping; the parameters at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=8) if case == "scaled" else None
    keys: dict[str, Any] = {"sparsity": 0.99, "min_numel": 1000, "feedback": "step_ahead"}
    if case in ("exact", "plain"):
        keys.update(sparsity=0.0, value_dtype="fp32")

    def made(model: nn.Module) -> tuple[Any, DCTState | None, torch.optim.Optimizer, Any]:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        if case == "plain":
            return ddp, None, optimizer, schedule
        state = DCTState({"data_parallel": keys}, scaler=scaler)
        ddp.register_comm_hook(state, dct_hook)
        state.step_ahead(ddp.module, optimizer)
        return ddp, state, optimizer, schedule

    ddp, state, optimizer, schedule = made(network())
    other, *_ = made(network())  # several models in one process
    moved = 0
    for step in range(24):
        if case == "resumed" and step == 13:
            assert state is not None
            state.save(folder)
            saved = [each.state_dict() for each in (ddp.module, optimizer, schedule)]
            ddp, state, optimizer, schedule = made(nn.Sequential(*network()))
            for each, content in zip((ddp.module, optimizer, schedule), saved, strict=True):
                each.load_state_dict(content)
            assert state.load(folder)
        at = [parameter.data_ptr() for parameter in ddp.parameters()]
        for micro in range(2):
            x = torch.randn(16, 100, generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro))
            with ddp.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = (ddp(x).squeeze(1) - x[:, 0]).square().mean()
                moved += sum(p.data_ptr() != a for p, a in zip(ddp.parameters(), at, strict=True))
                (loss if scaler is None else scaler.scale(loss)).backward()
            assert [parameter.data_ptr() for parameter in ddp.parameters()] == at
        if scaler is None:
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        optimizer.zero_grad()
    assert (moved > 0) == (case != "plain")
    other(x).sum().backward()
    return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()])


def test_displaced_weights_leave_ranks_in_step(tmp_path: Path) -> None:
    whole, second = run(2, _looks_ahead, "whole", "")
    assert torch.equal(whole, second)
    assert torch.equal(run(2, _looks_ahead, "resumed", str(tmp_path))[0], whole)
    assert torch.equal(run(2, _looks_ahead, "exact", "")[0], run(2, _looks_ahead, "plain", "")[0])
    for world_size, case in ((3, "whole"), (4, "scaled")):
        first, *others = run(world_size, _looks_ahead, case, "")
        assert all(torch.equal(first, other) for other in others)


def _skips_ahead(rank: int, world_size: int) -> bool:
    """A skipped step leaves no trace in second moments, but for the scale; evaluation does not end it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    section = {"data_parallel": {**SPARSE["data_parallel"], "feedback": "step_ahead"}}
    ddp, state = hooked(section, scaler=scaler)
    optimizer = torch.optim.Adam(ddp.parameters())
    state.step_ahead(ddp.module, optimizer)
    x = torch.randn(8, 100)
    states = []
    for step in range(3):
        loss = ddp(x).square().mean() * (float("inf") if step == 2 and rank == 0 else 1.0)
        scaler.scale(loss).backward()
        ddp.eval()
        ddp(x)
        ddp.train()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append(state.state_dict()["reducer"]["ahead"]["moments"])
    before, after = states[1:]
    assert scaler.get_scale() == 512.0
    return len(before) == 2 and all(
        torch.equal(after[name][part], before[name][part] / 4) and after[name]["steps"] == 2
        for name in before
        for part in ("rows", "columns")
    )


def test_a_skipped_step_leaves_second_moments() -> None:
    assert all(run(2, _skips_ahead))


def _forgets(rank: int, world_size: int, case: str) -> None:
    section = {"data_parallel": {**SPARSE["data_parallel"], "feedback": "step_ahead"}}
    ddp, state = hooked(section, time_limit=30)
    if case == "unknown optimizer":
        state.step_ahead(ddp.module, torch.optim.ASGD(ddp.parameters()))
    if case == "one rank" and rank == 0:
        state.step_ahead(ddp.module, torch.optim.SGD(ddp.parameters()))
    train(ddp, rank, range(1))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no rank", "ConfigError: dct.data_parallel.feedback = 'step_ahead' needs the model and its"),
        ("one rank", "ConfigError: dct.data_parallel.feedback = 'step_ahead' needs the model and its"),
        (
            "unknown optimizer",
            "ConfigError: dct.data_parallel.feedback = 'step_ahead': the step of ASGD",
        ),
    ],
)
def test_step_ahead_needs_the_optimizer_on_every_rank(case: str, words: str) -> None:
    for kind, text in launch(2, _forgets, case):
        assert kind == "error"
        assert words in text


# -- what torch does with a model ---


def _pickled(rank: int, world_size: int, folder: str) -> bool:
    section = {"data_parallel": {**SPARSE["data_parallel"], "sparsity": 0.9}}
    ddp = DistributedDataParallel(network())
    state = DCTState(section).register(ddp)
    train(ddp, rank, range(3))
    kept = residuals(state)
    path = f"{folder}/{rank}.pt"
    torch.save(ddp, path)
    loaded = torch.load(path, weights_only=False)
    copied = copy.deepcopy(ddp)
    for other in (loaded, copied):
        for one, two in zip(ddp.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
        (_, again), *_ = other._comm_hooks
        assert isinstance(again, DCTState)
        assert again.config == state.config
        # As with every hook of torch: it is registered again.
        again.register(other)
        again.load_state_dict(state.state_dict())
    assert residuals(state).keys() == kept.keys()
    expected = train(ddp, rank, range(3, 6))
    return all(torch.equal(train(other, rank, range(3, 6)), expected) for other in (loaded, copied))


def test_a_model_with_the_hook_is_saved_and_copied(tmp_path: Path) -> None:
    assert all(run(2, _pickled, str(tmp_path)))


def _joins(rank: int, world_size: int) -> None:
    ddp, _ = hooked(SPARSE, time_limit=30)
    with ddp.join():
        train(ddp, rank, range(4 if rank == 0 else 2))


def test_join_is_refused() -> None:
    (kind, other), (joined_kind, text) = launch(2, _joins)
    assert kind == joined_kind == "error"
    assert "DistributedDataParallel.join() does not work" in text
    assert "give all ranks the same number of batches" in text
    assert "DesyncError: rank 0: rank(s) [1] failed" in other


def _single_gradients(rank: int, world_size: int) -> None:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        ddp, _ = hooked()
        train(ddp, rank, range(1))
    finally:
        torch._dynamo.config.optimize_ddp = True


@pytest.mark.skipif(
    hasattr(DistributedDataParallel, "_should_disable_cpp_reducer"),
    reason="this torch reduces in Python only in compiled code",
)
def test_the_reducer_in_python_is_refused() -> None:
    for kind, text in launch(2, _single_gradients):
        assert kind == "error"
        assert "torch._dynamo.config.optimize_ddp = 'python_reducer'" in text


# -- names and reports ---


SCRIPT = """
import sys
import torch, torch.distributed as dist
import dct_plugin.data_parallel
assert "dct_plugin.integrations.ddp" not in sys.modules
from dct_plugin import DCTState, dct_hook
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
model.register_comm_hook(DCTState(), dct_hook)
for _ in range(2):
    model.zero_grad()
    model(torch.ones(1, 10)).sum().backward()
print("done")
"""


def test_names_are_public_and_the_run_ends_with_its_summary(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\ndct: 2 steps, nothing sent (1 rank)\n"
