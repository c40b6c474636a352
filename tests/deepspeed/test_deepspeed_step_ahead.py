"""Step-ahead error feedback on DeepSpeed's real engines.

As in test_deepspeed.py, all runs of a world size share one launch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.deepspeed_launch import Results, Run, config, launch

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FP16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 4, "hysteresis": 1}
AHEAD = {"feedback": "step_ahead", "min_numel": 100}
ACCUMULATE = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}

CASES: dict[str, Any] = {
    "zero0-fp32": config(0, optimizer="AdamW"),
    "zero0-bf16": config(0, "bf16", optimizer="AdamW", **ACCUMULATE),
    "zero1-fp32-accumulate": config(1, optimizer="AdamW", **ACCUMULATE),
    "zero1-bf16": config(1, "bf16", optimizer="Adam"),
    "zero1-bf16-fp32accumulation": config(
        1, "bf16", optimizer="AdamW", data_types={"grad_accum_dtype": "fp32"}
    ),
    "zero2-fp32-accumulate": config(2, optimizer="AdamW", **ACCUMULATE),
    "zero2-bf16-round-robin": config(2, "bf16", optimizer="AdamW", zero={"round_robin_gradients": True}),
    "zero2-separate": config(2, optimizer="AdamW", zero={"contiguous_gradients": False}),
    "zero2-allreduce": config(2, optimizer="AdamW", zero={"reduce_scatter": False}),
    "zero0-fp16": config(0, fp16=FP16, optimizer="AdamW"),
    "zero1-fp16": config(1, fp16=FP16, optimizer="AdamW"),
    "zero2-fp16": config(2, fp16=FP16, optimizer="AdamW", **ACCUMULATE),
}
#: SGD in units of its own, with every way in which a gradient comes of a sum over the ranks.
SUMS: dict[str, Any] = {
    "zero0": config(0),
    "zero0-predivide": config(0, gradient_predivide_factor=3.0),
    "zero1": config(1),
    "zero1-allreduce": config(1, zero={"reduce_scatter": False}),
    "zero2-separate": config(2, zero={"contiguous_gradients": False}),
}
#: A run of 40 steps, as its scheduler says.
DECAY: dict[str, Any] = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 40}}}
FOLLOWS = {"feedback": "auto", "sparsity": 0.99, "min_numel": 100}
AUTO: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("adam", config(1, optimizer="AdamW", **DECAY), FOLLOWS),
    (
        "by hand",
        config(1, optimizer="AdamW", **DECAY),
        {**FOLLOWS, **AHEAD, "warmup_steps": 4, "sparsity_warmup_steps": 24},
    ),
    ("momentum", config(0), FOLLOWS),
    ("zero3", config(3, optimizer="AdamW"), {**FOLLOWS, "total_steps": 40}),
]
RESUMED = ["zero0-fp32", "zero2-fp32-accumulate", "zero1-bf16-fp32accumulation", "zero1-fp16"]


def run(kind: str, name: str, steps: int, dct: dict[str, Any] | None, **more: Any) -> Run:
    section = {} if dct is None else {"dct": {"data_parallel": dct}}
    return {"id": f"{kind}/{name}", "config": {**CASES[name], **section}, "steps": steps, **more}


def _add_group(engine: Any, step: int) -> None:
    if step == 2:
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ahead")


@pytest.fixture(scope="module")
def two(folder: Path) -> Results:
    exact = {**AHEAD, "sparsity": 0, "value_dtype": "fp32"}
    sparse = {**AHEAD, "sparsity": 0.99}
    resumed = {**AHEAD, "sparsity": 0.95, "warmup_steps": 1}
    plan: list[Run] = []
    for name in CASES:
        plan += [run("plain", name, 3, None), run("exact", name, 3, exact), run("sparse", name, 12, sparse)]
    for name in RESUMED:
        save = str(folder / name)
        plan += [
            run("whole", name, 15, resumed),
            run("half", name, 12, resumed, save=save),
            run("rest", name, 15, resumed, load=save, seed=2),
        ]
    older = str(folder / "older")
    plan += [
        run("older", "zero0-fp32", 3, {"min_numel": 100, "sparsity": 0.9}, save=older),
        run("newer", "zero0-fp32", 6, sparse, load=older),
        run("poison", "zero0-fp32", 6, sparse, poison=[2]),
        run("added", "zero0-fp32", 6, sparse, before_step=_add_group),
    ]
    plan.append(run("between", "zero1-fp32-accumulate", 12, sparse, between=True))
    fixed = {**AHEAD, "sparsity": 0.9, "expert": {"step_ahead_coefficient": 0.5}}
    plan += [
        {"id": f"sums/{name}", "config": {**settings, "dct": {"data_parallel": fixed}}, "steps": 3}
        for name, settings in SUMS.items()
    ]
    plan += [
        {"id": f"auto/{name}", "config": {**settings, "dct": {"data_parallel": dct}}, "steps": 6}
        for name, settings, dct in AUTO
    ]
    client = {key: value for key, value in config(0).items() if key != "optimizer"}
    plan += [
        {
            "id": f"auto/{name}",
            "config": {**client, "dct": {"data_parallel": FOLLOWS}},
            "steps": 6,
            "client_optimizer": name,
        }
        for name in ("Adagrad", "Rprop")
    ]
    plan += [
        {
            "id": f"{kind}-optimizer",
            "config": {**client, "dct": {"data_parallel": sparse}},
            "steps": 1,
            "client_optimizer": "SGD",
            "ranks": {1: {"client_optimizer": "ASGD"}} if kind == "one" else {},
            "expect_error": True,
            **({"client_optimizer": "ASGD"} if kind == "all" else {}),
        }
        for kind in ("one", "all")
    ]
    return launch(2, plan, folder / "two", DCT_TEST_FP16_ON_CPU="1")


@pytest.mark.parametrize("name", CASES)
def test_sparsity_0_is_deepspeed(two: Results, name: str) -> None:
    for rank in two:
        plain, exact = rank[f"plain/{name}"], rank[f"exact/{name}"]
        for what in ("losses", "norms", "scales", "skipped", "hash", "before", "after"):
            assert exact[what] == plain[what], what


@pytest.mark.parametrize("name", CASES)
def test_ranks_in_step_at_99(two: Results, name: str) -> None:
    """Weights are bitwise the same on both ranks; passes were displaced, and everything else was not."""
    first, second = (rank[f"sparse/{name}"] for rank in two)
    assert first["hash"] == second["hash"]
    assert first["norms"] == second["norms"]
    assert first["losses"][-1] < first["losses"][0]
    for rank in first, second:
        assert rank["displaced"] > 0
        assert rank["storages_kept"]
        assert rank["finite"]


@pytest.mark.parametrize("name", [name for name in CASES if "fp16" in name])
def test_an_overflow_step_is_taken_back(two: Results, name: str) -> None:
    """Bitwise, apart from the change of the loss scale."""
    for rank in two:
        done = rank[f"sparse/{name}"]
        assert done["skipped"] > 0
        assert done["residuals_kept"]
        assert all(done["residuals_kept"])
        assert all(done["moments_kept"])


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_bitwise(two: Results, name: str) -> None:
    for rank in two:
        whole, rest = rank[f"whole/{name}"], rank[f"rest/{name}"]
        assert rest["losses"] == whole["losses"][-len(rest["losses"]) :]
        for what in ("hash", "residual", "moments", "coefficients"):
            assert rest[what] == whole[what], what
        assert whole["moments"]
        assert whole["coefficients"]


def test_older_checkpoints_and_other_world_sizes(two: Results, folder: Path) -> None:
    """Second moments start afresh."""
    assert all(rank["newer/zero0-fp32"]["loaded"] for rank in two)
    assert len({rank["newer/zero0-fp32"]["hash"] for rank in two}) == 1
    name = "zero0-fp32"
    dct = {**AHEAD, "sparsity": 0.95}
    four = launch(4, [run("load", name, 16, dct, load=str(folder / name))], folder / "four")
    assert len({rank[f"load/{name}"]["hash"] for rank in four}) == 1
    assert all(rank[f"load/{name}"]["displaced"] > 0 for rank in four)


def test_non_finite_gradients_are_forgotten(two: Results) -> None:
    for rank in two:
        done = rank["poison/zero0-fp32"]
        assert done["finite"]
        assert done["moments_finite"]


def test_units_do_not_depend_on_how_gradients_are_summed(two: Results) -> None:
    """SGD: displacements are in the optimizer's unit."""
    for rank in two:
        expected = rank["sums/zero0"]["displacement"]
        assert expected > 0
        for name in SUMS:
            assert rank[f"sums/{name}"]["displacement"] == pytest.approx(expected, rel=0.15), name


def test_a_group_that_is_added_is_told_once(two: Results) -> None:
    first, second = (rank["added/zero0-fp32"] for rank in two)
    told = [line for line in first["log"] if "groups that were added to the optimizer" in line]
    assert len(told) == 1
    assert first["hash"] == second["hash"]


def test_feedback_follows_the_optimizer(two: Results) -> None:
    names = [*(name for name, *_ in AUTO), "Adagrad", "Rprop"]
    first, second = ({name: rank[f"auto/{name}"] for name in names} for rank in two)
    for name in first:
        assert first[name]["hash"] == second[name]["hash"]
        assert not second[name]["log"]
    assert first["adam"]["hash"] == first["by hand"]["hash"]
    logs = {name: found["log"] for name, found in first.items()}
    assert "feedback step_ahead, config" in logs["adam"][0]
    assert logs["adam"][1] == (
        "dct: step-ahead for AdamW, after 4 dense steps and a ramp of 24 (of 40 steps); "
        "2 ranks, fp32; measured with a GPT of 0.35M parameters"
    )
    assert logs["momentum"][1] == (
        "dct: step-ahead for SGD, after 40 dense steps and a ramp of 822; the length of the run is not known "
        "(data_parallel.total_steps): its first 300 steps send 4x fewer bytes than fp32, its first 600 8x; "
        "learning rate 0.02, 2 ranks, fp32; measured with a small ResNet of 0.70M parameters"
    )
    assert "feedback local, config" in logs["Adagrad"][0]
    assert not logs["Adagrad"][1:]
    assert "the step of Rprop is not known: local error feedback at sparsity 0.99, after" in logs["Rprop"][1]
    assert (
        "a ramp of 180; the length of the run is not known (data_parallel.total_steps): its first 300 steps "
        "send 4x fewer bytes than fp32, its first 600 7x"
    ) in logs["Rprop"][1]
    assert "under ZeRO stage 3 no rank has the whole weights" in logs["zero3"][1]
    assert "after 4 dense steps and a ramp of 24 (of 40 steps) (known to lose 0.23 nats" in logs["zero3"][1]


def test_unknown_optimizers_are_refused_on_every_rank(two: Results) -> None:
    for rank in two:
        assert "the step of ASGD is not known" in rank["all-optimizer"]["error"]
        assert "known are Adam, AdamW" in rank["all-optimizer"]["error"]
    assert two[1]["one-optimizer"]["error"].startswith("ConfigError")
    assert two[0]["one-optimizer"]["error"].startswith("DesyncError")


def test_an_evaluation_before_the_backward_pass_changes_nothing(two: Results) -> None:
    for rank in two:
        same, between = (rank[f"{kind}/zero1-fp32-accumulate"] for kind in ("sparse", "between"))
        assert same["losses"] == between["losses"]
        assert same["hash"] == between["hash"]
