"""Every compressor class of activations in the real megatron-core: pipelines, tensor parallelism, DP."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.megatron_gpt import Job, Outcome, train_all

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

CLASSES: dict[str, dict[str, Any]] = {
    "threshold": {
        "forward": {"method": "threshold", "sparsity": 0.8, "value_dtype": "int4"},
        "backward": {"method": "answer", "value_dtype": "int4"},
    },
    "quantise": {
        "forward": {"method": "quantise", "bits": 4},
        "backward": {"method": "quantise", "bits": 3},
    },
    "transform": {"forward": {"method": "transform", "rate": 0.5}},
}
OFF = {"enabled": False}


def pipeline(**section: Any) -> dict[str, Any]:
    return {"data_parallel": OFF, "model_parallel": {"pipeline": section}}


def tensor(**section: Any) -> dict[str, Any]:
    return {"data_parallel": OFF, "model_parallel": {"tensor": section}}


def run(world_size: int, *jobs: Job) -> list[list[Outcome]]:
    """Outcomes by job, then rank."""
    by_rank = processes.run(world_size, train_all, list(jobs))
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def losses(outcomes: list[Outcome]) -> list[float]:
    return next(outcome.losses for outcome in outcomes if outcome.losses)


def fewer(outcomes: list[Outcome], cls: str) -> float:
    parts = [outcome.classes[cls] for outcome in outcomes if cls in outcome.classes]
    return sum(p["dense_bytes"] for p in parts) / sum(p["sent_bytes"] for p in parts)


def assert_learns(outcomes: list[Outcome], by: float) -> None:
    values = losses(outcomes)
    assert values[-1] < values[0] - by, values


def test_pipelines(tmp_path: Path) -> None:
    job = Job(pp=2, micro_batches=2, lr=2e-3, steps=6, evaluate=True)
    saved = (str(tmp_path), 4)
    remembering = job.with_dct(pipeline(**CLASSES["transform"]))
    plain, none, spared, *found, recomputed, through, interleaved = run(
        2,
        job,
        job.with_dct(pipeline(forward="none")),
        job.with_dct(pipeline(**{**CLASSES["transform"], "boundaries": [1]})),
        *(job.with_dct(pipeline(**section)) for section in CLASSES.values()),
        replace(remembering, recompute="full"),
        replace(remembering, save=saved),
        job.with_dct(pipeline(**CLASSES["transform"]), vpp=2, layers=4, overlap_p2p=True),
    )
    for same in (none, spared):
        assert [o.parameters for o in same] == [o.parameters for o in plain]
        assert not any(outcome.classes for outcome in same)
    for outcomes in found:
        assert_learns(outcomes, 0.3)
        assert fewer(outcomes, "pipeline") > 6
        assert fewer(outcomes, "pipeline_gradient") > 6
        assert losses(outcomes) != losses(plain)
        assert "pipeline_evaluation" in outcomes[0].classes
    assert_learns(interleaved, 0.2)
    assert losses(recomputed) == losses(found[-1])
    (resumed,) = run(2, replace(remembering, load=saved))
    assert losses(through)[4:] == losses(resumed)
    assert [o.parameters for o in through] == [o.parameters for o in resumed]


def test_tensor_and_sequence_parallel() -> None:
    job = Job(tp=2, micro_batches=2, lr=2e-3, sequence_parallel=True, steps=6)
    quantised = tensor(**CLASSES["quantise"], gather=True)
    plain, none, nothing_left_out, *found, recomputed, alone = run(
        2,
        replace(job, steps=3),
        job.with_dct(tensor(forward="none", gather=True), steps=3),
        job.with_dct(tensor(forward={"method": "threshold", "sparsity": 0.0}, gather=True), steps=3),
        *(job.with_dct(tensor(**section, gather=True)) for section in CLASSES.values()),
        job.with_dct(quantised, recompute="full"),
        job.with_dct(tensor(**CLASSES["transform"]), sequence_parallel=False),
    )
    for same in (none, nothing_left_out):
        assert [o.parameters for o in same] == [o.parameters for o in plain]
        assert losses(same) == losses(plain)
        assert not any(outcome.classes for outcome in same)
    for outcomes in found:
        assert_learns(outcomes, 0.3)
        assert fewer(outcomes, "tensor") > 6
        assert fewer(outcomes, "tensor_gradient") > 6
    assert losses(recomputed) == losses(found[list(CLASSES).index("quantise")])
    assert_learns(alone, 0.3)
