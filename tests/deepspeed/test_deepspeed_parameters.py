"""Thresholded updates of the weights on DeepSpeed's real engines.

As in test_deepspeed.py, all runs of a world size share one launch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.deepspeed_launch import Results, Run, config, launch

pytest.importorskip("deepspeed")
from support.deepspeed_worker import NetOfExperts

pytestmark = pytest.mark.slow

FP16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 4, "hysteresis": 1}
ACCUMULATE = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
EXACT = {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100}
SPARSE = {"sparsity": 0.97, "min_numel": 100}

CASES: dict[str, Any] = {
    "zero1-fp32": config(1, optimizer="AdamW"),
    "zero1-bf16": config(1, "bf16", optimizer="AdamW"),
    "zero1-bf16-fp32accumulation": config(
        1, "bf16", optimizer="AdamW", data_types={"grad_accum_dtype": "fp32"}
    ),
    "zero1-fp16": config(1, fp16=FP16, optimizer="AdamW"),
    "zero2-fp32-accumulate": config(2, optimizer="AdamW", **ACCUMULATE),
    "zero2-bf16-round-robin": config(2, "bf16", optimizer="AdamW", zero={"round_robin_gradients": True}),
    "zero2-fp16": config(2, fp16=FP16, optimizer="AdamW", **ACCUMULATE),
}
RESUMED = ["zero1-fp32", "zero1-bf16-fp32accumulation", "zero1-fp16", "zero2-bf16-round-robin"]


def section(gradients: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    return {"data_parallel": {**gradients, "parameters": parameters}}


def run(kind: str, name: str, steps: int, dct: dict[str, Any] | None, **more: Any) -> Run:
    settings = CASES[name] if dct is None else {**CASES[name], "dct": dct}
    return {"id": f"{kind}/{name}", "config": settings, "steps": steps, **more}


def _lags(engine: Any) -> dict[str, Any]:
    """Return the lag of the working weights, and that after they are gathered in full."""
    before = _lag(engine)
    engine.dct.gather_parameters()
    return {"lag": before, "lag_after_gather": _lag(engine)}


def _lag(engine: Any) -> float:
    """Entries of this rank's part whose working weight is not the rounded master."""
    optimizer, rank = engine.optimizer, dist.get_rank()
    if hasattr(optimizer, "bit16_groups"):
        working, masters = (
            optimizer.parallel_partitioned_bit16_groups,
            optimizer.single_partition_of_fp32_groups,
        )
    else:
        working, masters = optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition
    return sum(
        float((parts[rank] != master.detach().to(parts[rank].dtype)).sum())
        for parts, master in zip(working, masters, strict=True)
    )


def _look_ahead(engine: Any) -> dict[str, float]:
    """How far from the masters weights are at most: the working ones, and what the ranks see on average in
    training passes.
    """
    ahead, parameters = engine.dct.ahead, list(engine.module.parameters())
    working = [parameter.data.clone() for parameter in parameters]
    ahead.displace()
    seen = [parameter.data.clone() for parameter in parameters]
    ahead.restore()
    for mean in seen:
        dist.all_reduce(mean)
        mean.div_(dist.get_world_size())
    engine.dct.gather_parameters()
    masters = [parameter.data for parameter in parameters]

    def farthest(found: list[torch.Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(found, masters, strict=True))

    return {"working": farthest(working), "seen": farthest(seen)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("parameters")
    plan: list[Run] = []
    sparse = section(SPARSE, sparsity=0.97)
    for name in CASES:
        plan += [
            run("plain", name, 3, None),
            run("exact", name, 3, section(EXACT, sparsity=0, value_dtype="fp32")),
            run("sparse", name, 14, sparse, report=_lags),
        ]
    ahead = section({**SPARSE, "feedback": "step_ahead", "warmup_steps": 1}, sparsity=0.9)
    for name in RESUMED:
        save = str(folder / name)
        plan += [
            run("whole", name, 15, ahead, save=save, save_after=12),
            run("rest", name, 15, ahead, load=save, seed=2),
        ]
    dense = section({**EXACT, "feedback": "step_ahead"}, sparsity=0.97, value_dtype="fp32")
    plan.append(run("look", "zero1-fp32", 6, dense, report=_look_ahead))
    saved = str(folder / "zero1-fp32")
    plan += [
        run("without", "zero1-fp32", 14, None, load=saved),
        run("every", "zero1-fp32", 6, section(SPARSE, sparsity=0.97, full_every=3), report=_lags),
        {
            "id": "experts",
            "model": NetOfExperts,
            "config": {**config(1, "bf16", optimizer="Adam"), "dct": sparse},
            "steps": 6,
        },
        {"id": "stage0", "config": {**config(0), "dct": sparse}, "steps": 1, "expect_error": True},
    ]
    return launch(2, plan, folder / "two", DCT_TEST_FP16_ON_CPU="1")


@pytest.mark.parametrize("name", CASES)
def test_sparsity_0_is_deepspeed(two: Results, name: str) -> None:
    for rank in two:
        plain, exact = rank[f"plain/{name}"], rank[f"exact/{name}"]
        for what in ("losses", "norms", "scales", "skipped", "hash", "before", "after"):
            assert exact[what] == plain[what], what


@pytest.mark.parametrize("name", CASES)
def test_ranks_in_step(two: Results, name: str) -> None:
    """Working weights are bitwise the same on both ranks, and lag behind the masters until they are gathered
    in full.
    """
    first, second = (rank[f"sparse/{name}"] for rank in two)
    assert first["hash"] == second["hash"]
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    assert any(
        "before an evaluation or export call engine.dct.gather_parameters()" in line for line in first["log"]
    )
    for rank in first, second:
        assert rank["lag"] > 0
        assert rank["lag_after_gather"] == 0
        part = rank["classes"]["parameter"]
        assert part["density"] < 0.05
        assert part["sent"] < part["dense"] / 8
    if "fp16" in name.split("-"):
        assert first["skipped"] > 0


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_bitwise(two: Results, name: str) -> None:
    """Weights are gathered in full for the checkpoint; the run that wrote it goes on from there, too."""
    for rank in two:
        whole, rest = rank[f"whole/{name}"], rank[f"rest/{name}"]
        assert rest["losses"] == whole["losses"]
        for what in ("hash", "residual", "moments"):
            assert rest[what] == whole[what], what
    assert two[0][f"rest/{name}"]["hash"] == two[1][f"rest/{name}"]["hash"]


def test_owners_look_ahead_by_what_they_have_not_sent(two: Results) -> None:
    """No gradient is unsent: on average over the ranks, passes run at the masters."""
    for rank in two:
        found = rank["look/zero1-fp32"]
        assert found["working"] > 1e-3
        assert found["seen"] < 1e-6


def test_without_the_plugin_a_checkpoint_is_deepspeeds_own(two: Results) -> None:
    assert all(rank["without/zero1-fp32"]["loaded"] for rank in two)
    assert len({rank["without/zero1-fp32"]["hash"] for rank in two}) == 1


def test_full_every(two: Results) -> None:
    for rank in two:
        assert rank["every/zero1-fp32"]["lag"] == 0  # step 6 was one of them
        assert rank["every/zero1-fp32"]["classes"]["parameter_full"]["sent"] > 0


def test_expert_groups_stay_dense(two: Results) -> None:
    for rank in two:
        assert rank["experts"]["classes"]["parameter"]["density"] < 0.05
    assert two[0]["experts"]["hash"] == two[1]["experts"]["hash"]


def test_stage_0_is_refused(two: Results) -> None:
    for rank in two:
        assert "dct.data_parallel.parameters = {}: ZeRO stage 0" in rank["stage0"]["error"]
