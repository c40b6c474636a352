"""fp16 with dynamic loss scale: steps that overflow, and scales that change.

DeepSpeed's CPU accelerator does not offer fp16, but only its list of types says so: with fp16 on that list,
DeepSpeed's own engine, optimizers and loss scalers run on the CPU, for this small model. The scale starts so
high that the first steps overflow, and grows again soon.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CONFIGS
from support.deepspeed_launch import Results, Run, config, launch, launch_with_torchrun

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FP16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 4, "hysteresis": 1}
EXACT = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100}}
SPARSE = {"data_parallel": {"sparsity": 0.9, "value_dtype": "bf16", "min_numel": 100}}

CASES = {
    "zero0": config(0, fp16=FP16),
    "zero1": config(1, fp16=FP16),
    "zero2": config(2, fp16=FP16),
    "zero2-accumulate": config(2, fp16=FP16, gradient_accumulation_steps=2, gradient_clipping=0.5),
    "zero1-allreduce": config(1, fp16=FP16, zero={"reduce_scatter": False}),
    "zero2-separate": config(2, fp16=FP16, zero={"contiguous_gradients": False}),
    "zero2-static": config(2, fp16={"enabled": True, "loss_scale": 256}),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    kinds: dict[str, tuple[Any, int]] = {"plain": (None, 6), "exact": (EXACT, 6), "sparse": (SPARSE, 18)}
    plan: list[Run] = [
        {"id": f"{kind}/{name}", "config": {**settings, **({"dct": dct} if dct else {})}, "steps": steps}
        for (name, settings), (kind, (dct, steps)) in itertools.product(CASES.items(), kinds.items())
    ]
    return launch(2, plan, tmp_path_factory.mktemp("fp16"), DCT_TEST_FP16_ON_CPU="1")


@pytest.mark.parametrize("name", CASES)
def test_sparsity_0_is_deepspeed(two: Results, name: str) -> None:
    """Also in which steps are skipped, and what becomes of the loss scale."""
    for rank in two:
        plain, exact = rank[f"plain/{name}"], rank[f"exact/{name}"]
        for what in ("losses", "norms", "scales", "skipped", "hash"):
            assert exact[what] == plain[what], what


@pytest.mark.parametrize("name", CASES)
def test_an_overflow_step_leaves_residuals_as_they_were(two: Results, name: str) -> None:
    """Bitwise, apart from the change of the loss scale (a power of two) since the step before."""
    for rank in two:
        found = rank[f"sparse/{name}"]
        assert found["skipped"] == two[0][f"sparse/{name}"]["skipped"]
        assert len(found["residuals_kept"]) <= found["skipped"]
        assert all(found["residuals_kept"])
        assert found["scales_of_residuals"] == found["scales"]
        assert found["finite"]
        assert found["steps"] == 18
    if "static" not in name:
        assert found["skipped"] >= 2
        # At least one overflow hit a run that had residuals, not only its very first step.
        assert found["residuals_kept"]
        assert len(set(found["scales"])) >= 3


@pytest.mark.parametrize("name", CASES)
def test_ranks_in_step_and_loss_falling(two: Results, name: str) -> None:
    first, second = (rank[f"sparse/{name}"] for rank in two)
    assert first["hash"] == second["hash"]
    assert first["losses"] == second["losses"]
    assert first["after"] < 0.9 * first["before"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fp16_on_gpus(tmp_path: Path) -> None:
    """As above, with DeepSpeed's CUDA accelerator and nccl; also the ready-made configurations for GPUs."""
    ranks = min(2, torch.cuda.device_count())
    ready = sorted(CONFIGS.glob("*_gpu.json"))
    plan: list[Run] = [
        {"id": f"{kind}/{name}", "config": {**settings, **({"dct": dct} if dct else {})}, "steps": 20}
        for (name, settings), (kind, dct) in itertools.product(
            CASES.items(), {"plain": None, "exact": EXACT, "sparse": SPARSE}.items()
        )
    ]
    plan += [{"id": path.name, "config": json.loads(path.read_text()), "steps": 3} for path in ready]
    devices = ",".join(map(str, range(ranks)))
    results = launch_with_torchrun(ranks, plan, tmp_path, DS_ACCELERATOR="cuda", CUDA_VISIBLE_DEVICES=devices)
    for name in CASES:
        plain, exact = (results[0][f"{kind}/{name}"] for kind in ("plain", "exact"))
        assert exact["skipped"] == plain["skipped"]
        assert exact["losses"] == pytest.approx(plain["losses"], rel=1e-3)
        for rank in results:
            found = rank[f"sparse/{name}"]
            assert found["hash"] == results[0][f"sparse/{name}"]["hash"]
            assert found["finite"]
            assert all(found["residuals_kept"])
    for path in ready:
        assert results[0][path.name]["attached"]
