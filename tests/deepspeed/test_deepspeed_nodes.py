"""Nodes on DeepSpeed's real engines: four ranks as two nodes of two, all runs in one launch."""

from __future__ import annotations

from typing import Any

import pytest
from support.deepspeed_launch import Results, Run, config, launch

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FP16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 4, "hysteresis": 1}
EXACT = {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100, "nodes": 2}
SPARSE = {"sparsity": 0.95, "min_numel": 100, "nodes": 2, "feedback": "step_ahead", "warmup_steps": 1}
UPDATES = {"parameters": {"sparsity": 0.9}}

CASES: dict[str, Any] = {
    "zero0-fp32": config(0, optimizer="AdamW"),
    "zero0-fp16": config(0, fp16=FP16, optimizer="AdamW"),
    "zero1-fp32": config(1, optimizer="AdamW"),
    "zero2-bf16": config(2, "bf16", optimizer="AdamW", gradient_accumulation_steps=2),
}


def run(kind: str, name: str, steps: int, settings: dict[str, Any] | None, **more: Any) -> Run:
    dct = {} if settings is None else {"dct": {"data_parallel": settings}}
    return {"id": f"{kind}/{name}", "config": {**CASES[name], **dct}, "steps": steps, **more}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("nodes")
    plan: list[Run] = []
    for name in CASES:
        save = str(folder / name)
        settings = SPARSE if name.startswith("zero0") else SPARSE | UPDATES
        plan += [
            run("plain", name, 3, None),
            run("exact", name, 3, EXACT),
            run("whole", name, 9, settings, save=save, save_after=6),
            run("rest", name, 9, settings, load=save, seed=2),
            run("flat", name, 8, settings | {"nodes": 1}, load=save, seed=2),
        ]
    plan += [
        run("updates", "zero1-fp32", 3, EXACT | {"parameters": {"sparsity": 0, "value_dtype": "fp32"}}),
        {
            "id": "zero3",
            "config": {**config(3, "bf16"), "dct": {"data_parallel": {"sparsity": 0.9, "nodes": 2}}},
            "steps": 3,
        },
        {
            "id": "three",
            "config": {**config(0), "dct": {"data_parallel": {"nodes": 3}}},
            "steps": 1,
            "expect_error": True,
        },
    ]
    return launch(4, plan, folder / "four", DCT_TEST_FP16_ON_CPU="1")


@pytest.mark.parametrize("name", CASES)
def test_sparsity_0_is_deepspeed_to_rounding(four: Results, name: str) -> None:
    for rank in four:
        plain, exact = rank[f"plain/{name}"], rank[f"exact/{name}"]
        tolerance = 1e-4 if name.endswith("fp32") else 2e-2
        assert exact["losses"] == pytest.approx(plain["losses"], rel=tolerance)
        assert exact["skipped"] == plain["skipped"]


@pytest.mark.parametrize("name", CASES)
def test_ranks_stay_in_step_and_resume(four: Results, name: str) -> None:
    for kind in ("whole", "rest", "flat"):
        assert len({rank[f"{kind}/{name}"]["hash"] for rank in four}) == 1, kind
    for rank in four:
        whole = rank[f"whole/{name}"]
        assert whole["after"] < whole["before"]
        assert whole["hash"] == rank[f"rest/{name}"]["hash"]
        assert any(rank[f"flat/{name}"]["restored"].values())
        if not name.startswith("zero0"):
            assert whole["classes"]["parameter"]["sent"] < whole["classes"]["parameter"]["dense"] / 2


def test_process_groups_of_nodes_are_made_before_the_first_pass(four: Results) -> None:
    for rank in four:
        assert {run: found["groups_made"] for run, found in rank.items() if found.get("groups_made")} == {}


def test_updates_in_full_are_deepspeeds_gather(four: Results) -> None:
    for rank in four:
        assert rank["updates/zero1-fp32"]["losses"] == pytest.approx(
            rank["plain/zero1-fp32"]["losses"], rel=1e-4
        )


def test_other_stages_and_other_numbers(four: Results) -> None:
    assert len({rank["zero3"]["hash"] for rank in four}) == 1
    for rank in four:
        assert "dct.data_parallel.nodes = 3: 4 ranks" in rank["three"]["error"]
