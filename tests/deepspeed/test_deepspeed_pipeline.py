"""DeepSpeed's pipeline engine, with real engines in real processes: two stages of two replicas each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import CONFIGS
from support.deepspeed_launch import Results, Run, config, launch

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

THRESHOLD = {"method": "threshold", "sparsity": 0.8}
EXACT = {
    "data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100},
    "model_parallel": {"pipeline": {"forward": {"method": "threshold", "sparsity": 0}}},
}
SPARSE = {
    "data_parallel": {"sparsity": 0.9, "min_numel": 100},
    "model_parallel": {"pipeline": {"forward": THRESHOLD}},
}
CLASSES: dict[str, dict[str, Any]] = {
    "quantise": {"forward": {"method": "quantise", "bits": 4}},
    "transform": {"forward": "transform"},
}
READY = CONFIGS / "deepspeed_pipeline_dct.json"


def settings(stage: int = 0, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    return config(
        stage,
        precision,
        optimizer="AdamW",
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=3,
        gradient_clipping=1.0,
        **more,
    )


CASES: dict[str, Run] = {
    "zero0-fp32": {"config": settings()},
    "zero0-bf16": {"config": settings(0, "bf16")},
    "zero1-bf16": {"config": settings(1, "bf16")},
    "tuple": {"config": settings(), "model": "tuple"},
    "mask": {"config": settings(1), "model": "mask"},
    "recomputed": {"config": settings(), "checkpoint_interval": 1},
    "zero0-tied": {"config": settings(), "model": "tied"},
    "zero1-tied": {"config": settings(1), "model": "tied"},
    "zero1-tied-separate": {
        "config": settings(1, zero={"contiguous_gradients": False}),
        "model": "tied",
    },
    "four-stages": {"config": settings(), "stages": 4},
}


def run(name: str, dct: dict[str, Any] | None, steps: int, prefix: str, **more: Any) -> Run:
    case = CASES[name]
    section = {} if dct is None else {"dct": dct}
    return {**case, "id": prefix + name, "config": {**case["config"], **section}, "steps": steps, **more}


def thresholded() -> list[Run]:
    """The plugin, and plain DeepSpeed around a model that thresholds by itself."""
    pipeline = {
        "forward": {"method": "threshold", "sparsity": 0.75, "value_dtype": "fp32"},
        "backward": {"method": "answer", "value_dtype": "fp32"},
    }
    dct = {"data_parallel": {"enabled": False}, "model_parallel": {"pipeline": pipeline}}
    reference = run("zero0-fp32", None, 2, "reference/", model="thresholded", threshold=[0.25, 3])
    return [reference, run("zero0-fp32", dct, 2, "thresholded/", model="identity", capacity=2.0)]


def resumed(name: str, folder: Path) -> list[Run]:
    """Four steps at a stretch, and in two halves with a checkpoint between them; with step-ahead."""
    dct = {
        "data_parallel": {"sparsity": 0.9, "min_numel": 100, "feedback": "step_ahead"},
        "model_parallel": {"pipeline": {"forward": THRESHOLD, "warmup_steps": 1}},
    }
    save = str(folder / name)
    return [
        run(name, dct, 4, "whole/"),
        run(name, dct, 2, "half/", save=save),
        run(name, dct, 4, "rest/", load=save, seed=2),
    ]


RESUMED = ["zero0-tied", "zero1-bf16"]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("pipeline")
    plan = [r for name in CASES for r in (run(name, None, 2, "plain/"), run(name, EXACT, 2, "exact/"))]
    plan.append(run("zero0-fp32", {**EXACT, "model_parallel": {"pipeline": {"forward": "none"}}}, 2, "none/"))
    plan += [run(name, SPARSE, 2, "sparse/") for name in CASES]
    for name, pipeline in CLASSES.items():
        dct = {"data_parallel": {"enabled": False}, "model_parallel": {"pipeline": pipeline}}
        plan.append(run("zero0-fp32", dct, 3, f"{name}/"))
    plan += thresholded()
    plan += [r for name in RESUMED for r in resumed(name, folder)]
    for name, steps, evaluation in (("learning/", 8, True), ("dense-evaluation/", 2, False)):
        dct = {
            "data_parallel": {"enabled": False},
            "model_parallel": {"pipeline": {"forward": THRESHOLD, "evaluation": evaluation}},
        }
        plan.append(run("zero0-fp32", dct, steps, name, evaluate=True))
    updates = {"data_parallel": {"parameters": {}}}
    plan.append(run("zero1-tied", updates, 1, "tied-updates/", expect_error=True))
    ready = json.loads(READY.read_text())
    ready["dct"]["model_parallel"]["pipeline"]["warmup_steps"] = 1
    plan.append({"id": "ready", "config": ready, "steps": 3})
    return launch(4, plan, folder, worker="deepspeed_pipeline_worker")


@pytest.mark.parametrize("name", CASES)
def test_sparsity_0_is_deepspeed(four: Results, name: str) -> None:
    """Losses, gradient norms and parameters, bitwise."""
    for rank in four:
        plain, exact = rank[f"plain/{name}"], rank[f"exact/{name}"]
        assert exact["attached"]
        assert not plain["attached"]
        assert exact["losses"] == plain["losses"]
        assert exact["norm"] == plain["norm"]
        assert exact["hash"] == plain["hash"]


def test_no_method_is_deepspeed(four: Results) -> None:
    for rank in four:
        plain, none = rank["plain/zero0-fp32"], rank["none/zero0-fp32"]
        assert none["losses"] == plain["losses"]
        assert none["hash"] == plain["hash"]
        assert not {"pipeline", "pipeline_gradient"} & none["classes"].keys()


@pytest.mark.parametrize("name", CASES)
def test_replicas_and_tied_weights_stay_equal(four: Results, name: str) -> None:
    found = [rank[f"sparse/{name}"] for rank in four]
    for stage in {part["stage"] for part in found}:
        assert len({part["hash"] for part in found if part["stage"] == stage}) == 1
    assert len({digest for part in found for digest in part["tied"]}) == ("tied" in name)
    assert any("uncompressed/gradient/shared_weights" in part["classes"] for part in found) == (
        "tied" in name
    )
    assert all(part["losses"] == found[0]["losses"] for part in found)
    assert found[0]["losses"] != four[0][f"plain/{name}"]["losses"]


def test_what_crosses(four: Results) -> None:
    """Activations forward from the first stage, gradients back from the last, both in fewer bytes."""
    for name in CASES:
        first, last = four[0][f"sparse/{name}"], four[-1][f"sparse/{name}"]
        for part, cls in ((first, "pipeline"), (last, "pipeline_gradient")):
            total = part["classes"][cls]
            assert 0 < total["sent"] < total["dense"] / (2 if "bf16" in name else 4)
            assert 0.15 < total["density"] <= 0.2
        assert "pipeline_gradient" not in first["classes"]
    middle = four[1]["sparse/four-stages"]
    assert {"pipeline", "pipeline_gradient"} <= middle["classes"].keys()
    assert middle["boundaries"] == ["pipeline boundary 0", "pipeline boundary 1"]
    both = four[0]["sparse/tuple"]["boundaries"]
    assert {"pipeline boundary 0", "pipeline boundary 0 tensor 1"} <= set(both)


def test_activations_and_gradients_are_those_of_a_model_that_thresholds(four: Results) -> None:
    for rank in four:
        reference, found = rank["reference/zero0-fp32"], rank["thresholded/zero0-fp32"]
        assert found["losses"] == reference["losses"]
        assert found["hash"] == reference["hash"]
        assert not found["streams"]  # gradients of the replicas are DeepSpeed's
        total = found["classes"]["pipeline" if rank is four[0] or rank is four[1] else "pipeline_gradient"]
        assert total["density"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("name", CLASSES)
def test_other_compressor_classes(four: Results, name: str) -> None:
    found = [rank[f"{name}/zero0-fp32"] for rank in four]
    assert found[0]["hash"] == found[1]["hash"]
    assert found[2]["hash"] == found[3]["hash"]
    assert found[0]["losses"][-1] < found[0]["losses"][0]
    for part, cls in ((found[0], "pipeline"), (found[-1], "pipeline_gradient")):
        total = part["classes"][cls]
        assert 0 < total["sent"] < total["dense"] / 4


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_bitwise(four: Results, name: str) -> None:
    for rank in four:
        whole, half, rest = (rank[f"{part}/{name}"] for part in ("whole", "half", "rest"))
        assert rest["loaded"]
        assert half["losses"] + rest["losses"] == whole["losses"]
        assert rest["hash"] == whole["hash"]
        assert rest["steps"] == whole["steps"] == 4
        said = ("known to lose", "updated weights cross where", "dct: resumed at step 2")
        told = [line for line in rest["log"][1:] if not any(words in line for words in said)]
        assert not [line for line in told if "uncompressed" not in line]  # no word of a missing state


def test_the_loss_falls_and_evaluation_is_as_trained(four: Results) -> None:
    found = four[0]["learning/zero0-fp32"]
    assert found["losses"][-1] < found["losses"][0] - 0.5
    assert found["evaluated"][-1] < found["evaluated"][0]
    assert found["classes"]["pipeline_evaluation"]["density"] == pytest.approx(0.18, abs=0.03)
    assert "pipeline_evaluation" not in four[0]["dense-evaluation/zero0-fp32"]["classes"]


def test_refusals_name_the_key_and_the_reason(four: Results) -> None:
    tied = four[0]["tied-updates/zero1-tied"]["error"]
    assert "dct.data_parallel.parameters = {}: ZeRO stage 0 to 2: stages of the pipeline" in tied


def test_the_ready_made_configuration(four: Results) -> None:
    found = four[0]["ready"]
    assert found["steps"] == 3
    assert found["classes"]["pipeline"]["sent"]
    assert "2 pipeline stages; pipeline: transform, 1.42 bits per entry" in found["log"][0]
