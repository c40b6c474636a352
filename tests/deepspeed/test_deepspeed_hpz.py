"""ZeRO-3 with hpZ on real engines: thresholded updates for copies in two nodes of two ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
from support.deepspeed_launch import Results, Run, config, launch

pytest.importorskip("deepspeed")
from deepspeed.runtime.zero import partition_parameters
from support.deepspeed_worker import exactness

divide = inspect.getsource(partition_parameters)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("max(0, min(param.ds_numel" not in divide, reason="cannot divide small parameters"),
]

FP16 = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 4, "hysteresis": 1}
EXACT = {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100, "nodes": 2}
SPARSE = {"sparsity": 0.95, "min_numel": 100, "nodes": 2, "feedback": "step_ahead", "warmup_steps": 1}
#: Everything that differs is sent, but DeepSpeed's own gather is not asked.
ALL = {"parameters": {"sparsity": 1e-9, "value_dtype": "fp32"}}
UPDATES = {"parameters": {"sparsity": 0.9}}


def settings(precision: str = "fp32", zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    keys = {"stage3_param_persistence_threshold": 100, "zero_hpz_partition_size": 2, **(zero or {})}
    return config(3, precision, optimizer="AdamW", zero=keys, **more)


CASES: dict[str, Any] = {
    "fp32": settings(),
    "bf16": settings("bf16", gradient_accumulation_steps=2, gradient_clipping=0.1),
    # Every module gathers its parameters anew in the backward pass; sums of four gradients in bf16 are exact.
    "bf16-twice-communicate-fp32": settings(
        "bf16",
        {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
        communication_data_type="fp32",
    ),
    "fp16": settings(fp16=FP16),
}
#: Those that run once a week.
WEEKLY = ("bf16-twice-communicate-fp32", "fp16")
#: Cases with thresholded updates. The other is "bf16" with other gathers and sums of gradients around them.
UPDATED = ["fp32", "bf16", "fp16"]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no nodes": ({"nodes": "auto"}, {}, "a copy in each 2 consecutive ranks of 4, and the nodes are none"),
    "larger nodes": (
        {"nodes": 4},
        {},
        "a copy in each 2 consecutive ranks of 4, and the nodes are [0, 1, 2, 3]",
    ),
    "one copy": ({}, {"zero_hpz_partition_size": 4}, "a copy in each 4 consecutive ranks of 4"),
    "fp32 exactly": ({"parameters": "exact"}, {}, "nearly all fp32 weights change in a step"),
    "no copies": (
        {},
        {"zero_hpz_partition_size": 1},
        "copies of the weights that DeepSpeed keeps",
    ),
}


def each_of(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) if name in WEEKLY else name for name in names]


def run(kind: str, name: str, steps: int, section: dict[str, Any] | None, **more: Any) -> Run:
    dct = {} if section is None else {"dct": {"data_parallel": section}}
    return {"id": f"{kind}/{name}", "config": {**CASES[name], **dct}, "steps": steps, **more}


def tolerance(name: str) -> float:
    return 1e-4 if name == "fp32" else 2e-2


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    folder, weekly = tmp_path_factory.mktemp("hpz"), request.config.getoption("--long")
    plan: list[Run] = []
    for name in [name for name in CASES if (name in WEEKLY) == weekly]:
        save = str(folder / name)
        plan += [
            run("plain", name, 3, None),
            run("gathered", name, 3, EXACT),
            run("full", name, 3, EXACT | {"parameters": {"sparsity": 0, "value_dtype": "fp32"}}),
            run("all", name, 3, EXACT | ALL),
        ]
        if name != "fp32":
            plan.append(run("exactly", name, 3, EXACT | {"parameters": "exact"}))
        if name in UPDATED:
            plan += [
                run("updated", name, 6, SPARSE | UPDATES, save=save, save_after=3),
                run("rest", name, 6, SPARSE | UPDATES, load=save, seed=2),
            ]
    if weekly:
        return launch(4, plan, folder / "four", DCT_TEST_FP16_ON_CPU="1")
    plan += [
        run(kind, "fp32", 4, SPARSE | UPDATES, between=kind == "between") for kind in ("same", "between")
    ]
    for kind, section in (("nothing written", {}), ("all entries", {"sparsity": 0, "value_dtype": "int8"})):
        plan.append(run(kind, "bf16", 4, {"min_numel": 100, "nodes": 2, **section}))
    plan.append(run("exact", "fp32", 4, SPARSE | UPDATES | {"feedback": "local"}, report=exactness))
    for kind, section in (("gathers", EXACT), ("updates", EXACT | {"parameters": "exact"})):
        plan.append(run(f"written after {kind}", "bf16", 4, section, report=exactness))
    for name, (section, zero, _) in REFUSED.items():
        changed = settings(zero=zero, dct={"data_parallel": SPARSE | UPDATES | section})
        plan.append({"id": name, "config": changed, "steps": 1, "expect_error": True})
    return launch(4, plan, folder / "four", DCT_TEST_FP16_ON_CPU="1")


@pytest.mark.parametrize("name", each_of(CASES))
def test_sparsity_0_is_deepspeed(four: Results, name: str) -> None:
    """With the same gradients the same bits; nodes add up gradients in another order than DeepSpeed."""
    for rank in four:
        plain, gathered, full = (rank[f"{kind}/{name}"] for kind in ("plain", "gathered", "full"))
        for what in ("losses", "norms", "scales", "skipped", "hash"):
            assert full[what] == gathered[what], what
        if "communicate-fp32" in name:
            assert full["hash"] == plain["hash"]
        assert full["losses"] == pytest.approx(plain["losses"], rel=tolerance(name))


@pytest.mark.parametrize("name", each_of(CASES))
def test_copies_that_get_every_update_are_the_weights(four: Results, name: str) -> None:
    for rank in four:
        gathered, updated = rank[f"gathered/{name}"], rank[f"all/{name}"]
        if name.startswith("bf16"):  # differences of weights in 16 bits are exact
            for what in ("losses", "norms", "hash"):
                assert updated[what] == gathered[what], what
        assert updated["losses"] == pytest.approx(gathered["losses"], rel=tolerance(name))
    assert four[0][f"all/{name}"]["classes"]["parameter"]["sent"] > 0


@pytest.mark.parametrize("name", each_of([name for name in CASES if name != "fp32"]))
def test_exact_updates_of_copies_are_gathers(four: Results, name: str) -> None:
    for rank in four:
        gathered, exact = rank[f"gathered/{name}"], rank[f"exactly/{name}"]
        for what in ("losses", "norms", "scales", "skipped", "hash"):
            assert exact[what] == gathered[what], what
    assert four[0][f"exactly/{name}"]["classes"]["parameter_exact"]["sent"] > 0


def test_copies_get_exact_updates_unless_the_section_says_otherwise(four: Results) -> None:
    for rank in four:
        for kind in ("nothing written", "all entries"):
            assert rank[f"{kind}/bf16"]["classes"]["parameter_exact"]["sent"] > 0
        gradients = rank["all entries/bf16"]["classes"]["gradient"]
        assert 0 < gradients["sent"] < 0.6 * gradients["dense"]  # of bf16


@pytest.mark.parametrize("name", each_of(UPDATED))
def test_the_loss_falls_and_ranks_stay_in_step(four: Results, name: str) -> None:
    for rank in four:
        found = rank[f"updated/{name}"]
        assert found["hash"] == four[0][f"updated/{name}"]["hash"]
        assert found["after"] < found["before"]
    # Slices of two owners each: of the first one both are in the first node.
    sent = [rank[f"updated/{name}"]["classes"]["parameter"] for rank in four]
    assert [bool(each["dense"]) for each in sent] == [True, False, False, True]
    assert sum(each["sent"] for each in sent) < sum(each["dense"] for each in sent) / 2


def test_an_evaluation_before_the_backward_pass_changes_nothing(four: Results) -> None:
    for rank in four:
        same, between = rank["same/fp32"], rank["between/fp32"]
        assert same["losses"] == between["losses"]
        assert same["hash"] == between["hash"]


def test_weights_are_exact_outside_training_passes(four: Results) -> None:
    for rank in four:
        for what, (engine, weights) in rank["exact/fp32"]["exact"].items():
            assert (engine == pytest.approx(weights, rel=1e-5)) == (what != "trained"), what


def test_weights_written_in_gathered_parameters_are_those_of_gathers(four: Results) -> None:
    for rank in four:
        gathers, updates = (rank[f"written after {kind}/bf16"] for kind in ("gathers", "updates"))
        assert updates["exact"] == gathers["exact"]
        assert updates["losses"] == gathers["losses"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(four: Results, name: str) -> None:
    for rank in four:
        assert rank[name]["error"].startswith("ConfigError: ")
        assert REFUSED[name][2] in rank[name]["error"]


@pytest.mark.parametrize("name", each_of(UPDATED))
def test_a_resumed_run_goes_on_bitwise(four: Results, name: str) -> None:
    """Also the run that wrote the checkpoint has dropped its copies."""
    for rank in four:
        updated, rest = rank[f"updated/{name}"], rank[f"rest/{name}"]
        assert rest["loaded"]
        for what in ("losses", "norms", "hash", "residual"):
            assert rest[what] == updated[what], what
