"""Instances of Megatron's distributed optimizer (its HSDP), on CPU with gloo: two instances of two ranks."""

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

SPARSE = {"sparsity": 0.9, "min_numel": 256}


def run(*jobs: Job) -> list[list[Outcome]]:
    """Outcomes by job, then rank."""
    return [list(each) for each in zip(*processes.run(4, train_all, list(jobs)), strict=True)]


def section(**settings: Any) -> dict[str, Any]:
    return {"data_parallel": SPARSE | settings}


def test_activations_between_stages_are_compressed_beside_instances() -> None:
    job = Job(distributed_optimizer=True, instances=2, pp=2, steps=6, micro_batches=2, lr=2e-3)
    stages = {"pipeline": {"forward": {"method": "transform"}, "warmup_steps": 1}}
    plain, same, found = run(
        job,
        job.with_dct(section(sparsity=0, value_dtype="fp32")),
        job.with_dct(section() | {"model_parallel": stages}),
    )
    assert [each.losses for each in same] == [each.losses for each in plain]
    for name in ("gradient", "pipeline"):
        sent, dense = (
            sum(each.classes[name][key] for each in found) for key in ("sent_bytes", "dense_bytes")
        )
        assert 0 < sent < 0.5 * dense, name
    assert found[-1].losses[-1] < found[-1].losses[0]


def reducer(outcome: Outcome, step: int) -> dict[str, Any]:
    return outcome.history[step][2]["reducers"]["dense"]["state"]


def test_instances_are_summed_densely_and_thresholded_between(tmp_path: Path) -> None:
    job = Job(distributed_optimizer=True, instances=2, steps=4, micro_batches=1, evaluate=True)
    exact = section(sparsity=0, value_dtype="fp32")
    ahead = section(sparsity=0.95, feedback="step_ahead")
    folder = str(tmp_path)
    plain, same, overlapped, overlapped_same, bf16, bf16_same, *thresholded = run(
        job,
        job.with_dct(exact, through_codec=True),
        replace(job, overlap_grad_reduce=True),
        job.with_dct(exact, through_codec=True, overlap_grad_reduce=True),
        replace(job, bf16=True),
        job.with_dct(exact, through_codec=True, bf16=True),
        job.with_dct(section(verify={"every": 1}), steps=6, watch=True),
        job.with_dct(ahead, steps=6, overlap_grad_reduce=True),
        job.with_dct(
            section(verify={"every": 1}, parameters={"sparsity": 0.9}, feedback="step_ahead"),
            steps=6,
            bf16=True,
        ),
        job.with_dct(section(), bf16=True),
        job.with_dct(section(parameters="exact"), bf16=True),
        job.with_dct(ahead, steps=6, save=(folder, 4)),
    )
    for dense, ours in ((plain, same), (overlapped, overlapped_same), (bf16, bf16_same)):
        assert [each.losses for each in ours] == [each.losses for each in dense]
        assert [each.parameters for each in ours] == [each.parameters for each in dense]
        assert all(each.classes["gradient"]["sent_bytes"] for each in ours)
    sparse, displaced, updated, gathered, as_gathered, whole = thresholded
    for outcomes in (sparse, displaced, updated, as_gathered, whole):
        assert len({outcome.parameters for outcome in outcomes}) == 1
        assert outcomes[0].losses[-1] < outcomes[0].losses[0]
    assert [each.parameters for each in as_gathered] == [each.parameters for each in gathered]
    assert "parameters" in as_gathered[0].active
    # An instance is one compressor: each of its ranks holds a part of the residual.
    first, second, third, _ = (reducer(outcome, -1) for outcome in sparse)
    assert first["layout"] == [[0, 1], [2, 3]]
    name = next(name for name, (start, stop, numel) in first["parts"].items() if stop - start < numel)
    (start, middle, numel), (begin, end, _) = first["parts"][name], second["parts"][name]
    assert (start, middle, end) == (0, begin, numel)
    assert third["parts"][name] == first["parts"][name]
    sent = [sum(each.classes["gradient"]["sent_bytes"] for each in some) for some in (same, sparse)]
    assert sent[0] / 4 > 8 * sent[1] / 6
    assert updated[0].classes["parameter"]["dense_bytes"] > 5 * updated[0].classes["parameter"]["sent_bytes"]
    other = str(tmp_path / "flat")
    resumed, flat, _, split = run(
        job.with_dct(ahead, steps=6, load=(folder, 4)),
        job.with_dct(ahead, steps=6, load=(folder, 4), instances=1, load_optimizer=False),
        job.with_dct(ahead, save=(other, 4), instances=1),
        job.with_dct(ahead, steps=6, load=(other, 4), load_optimizer=False),
    )
    assert [each.parameters for each in resumed] == [each.parameters for each in whole]
    assert len({each.parameters for each in flat}) == len({each.parameters for each in split}) == 1
