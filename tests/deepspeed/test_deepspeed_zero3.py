"""ZeRO-3 with real engines in real processes: gradients thresholded to the owners of the partitions."""

from __future__ import annotations

from typing import Any

import pytest
from support.deepspeed_launch import Results, Run, assert_resumed_bitwise, config, launch

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

EXACT = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100}}
ACCUMULATE = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
#: The steps of a high initial scale overflow.
FP16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 4, "hysteresis": 1}


def sparse(sparsity: float = 0.99, **more: Any) -> dict[str, Any]:
    return {"data_parallel": {"sparsity": sparsity, "min_numel": 100, **more}}


def settings(precision: str = "fp32", zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    keys = {"stage3_param_persistence_threshold": 100, **(zero or {})}  # biases stay on all ranks
    return config(3, precision, optimizer="AdamW", zero=keys, **more)


CASES = {
    "fp32": settings(),
    "fp32-allreduce": settings(zero={"reduce_scatter": False}),
    "fp32-separate": settings(zero={"contiguous_gradients": False}),
    "fp32-predivide3": settings(zero={"reduce_scatter": False}, gradient_predivide_factor=3.0),
    "bf16-overlap": settings("bf16", zero={"overlap_comm": True}),
    "bf16-accumulate": settings("bf16", **ACCUMULATE),
    "bf16-communicate-fp32": settings("bf16", communication_data_type="fp32"),
    "fp16": settings(fp16=FP16),
}
IN_STEP = ["bf16-accumulate", "fp16", "fp32-allreduce"]
RESUMED = {"fp32": "auto", "bf16-accumulate": "bf16"}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "step_ahead": ({"feedback": "step_ahead"}, {}, 'feedback = "step_ahead": under ZeRO stage 3'),
    "parameters": ({"parameters": {}}, {}, "parameters = {}: ZeRO stage 3"),
    "verify": ({"verify": {"every": 5}}, {}, 'verify = {"every": 5}: ZeRO stage 3'),
    "nonfinite": ({"nonfinite_action": "skip"}, {}, 'nonfinite_action = "skip": ZeRO stage 3'),
    "quantized": ({}, {"zero_quantized_gradients": True}, "zero_optimization.zero_quantized_gradients"),
    "offload": ({}, {"offload_param": {"device": "cpu"}}, "zero_optimization.offload_param.device = cpu"),
}


def run(name: str, dct: dict[str, Any] | None, steps: int, prefix: str, **more: Any) -> Run:
    section = {} if dct is None else {"dct": dct}
    return {"id": prefix + name, "config": {**CASES[name], **section}, "steps": steps, **more}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("zero3")
    plan = [r for name in CASES for r in (run(name, None, 3, "plain/"), run(name, EXACT, 3, "exact/"))]
    plan.append(run("fp32", sparse(0.9), 30, "sparse/"))
    plan += [run(name, sparse(), 6, "sparse/") for name in IN_STEP]
    plan.append(
        run(
            "fp32",
            sparse(0.9, adaptive={"kind": "accordion", "sparsity": 0.5, "interval": 2}),
            5,
            "adaptive/",
        )
    )
    plan += [run("fp32", sparse(residual_dtype=kind), 3, f"{kind}/") for kind in ("fp32", "bf16")]
    plan.append(run("fp32", sparse(0.9, feedback="none"), 3, "none/"))
    plan.append(run("fp32", sparse(warmup_steps=9), 3, "warmup/"))
    plan.append(run("fp32", sparse(), 4, "poison/", poison=[2]))
    for name, kind in RESUMED.items():
        dct, save = sparse(0.95, residual_dtype=kind, warmup_steps=1), str(folder / name)
        plan.append(run(name, dct, 6, "whole/"))
        plan.append(run(name, dct, 3, "half/", save=save))
        plan.append(run(name, dct, 6, "rest/", load=save, seed=2))
    for name, (section, zero, _) in REFUSED.items():
        changed = settings(zero=zero, dct=sparse(**section))
        plan.append({"id": name, "config": changed, "steps": 1, "expect_error": True})
    return launch(2, plan, folder / "two", DCT_TEST_FP16_ON_CPU="1")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Parts that are padded, and one parameter of fewer entries than ranks; weights kept in groups of two."""
    plan = [
        run("fp32", None, 3, "plain/"),
        run("fp32", EXACT, 3, "exact/"),
        run("fp32", sparse(), 6, "sparse/"),
    ]
    grouped = settings("bf16", zero={"zero_hpz_partition_size": 2})
    plan.append({"id": "grouped", "config": {**grouped, "dct": sparse()}, "steps": 4})
    return launch(4, plan, tmp_path_factory.mktemp("four"))


def in_step(results: Results, key: str) -> Run:
    for rank in results:
        assert rank[key]["attached"]
        assert rank[key]["finite"]
        assert rank[key]["hash"] == results[0][key]["hash"]
        assert rank[key]["losses"] == results[0][key]["losses"]
    return results[0][key]


@pytest.mark.parametrize("name", CASES)
def test_sparsity_0_is_deepspeed_on_two_ranks(two: Results, name: str) -> None:
    """Losses, gradient norms, loss scales and parameters, bitwise."""
    for rank in two:
        plain, exact = rank[f"plain/{name}"], rank[f"exact/{name}"]
        assert exact["attached"]
        assert exact["streams"]
        for what in ("losses", "norms", "scales", "skipped", "hash"):
            assert exact[what] == plain[what], what


def test_dense_warm_up_is_deepspeed(two: Results) -> None:
    assert two[0]["warmup/fp32"]["hash"] == two[0]["plain/fp32"]["hash"]


def test_four_ranks(four: Results) -> None:
    """The order of summation differs from the transport's."""
    for rank in four:
        plain, exact = rank["plain/fp32"], rank["exact/fp32"]
        assert exact["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert exact["sums"] == pytest.approx(plain["sums"], rel=1e-5, abs=1e-3)
    in_step(four, "sparse/fp32")
    in_step(four, "grouped")


def test_the_loss_falls(two: Results) -> None:
    found = in_step(two, "sparse/fp32")
    assert found["after"] < 0.85 * found["before"]
    assert found["sent"] < found["dense"] / 4


@pytest.mark.parametrize("name", IN_STEP)
def test_ranks_gather_the_same_parameters(two: Results, name: str) -> None:
    found = in_step(two, f"sparse/{name}")
    assert found["sent"] < found["dense"]


def test_an_overflow_step_is_taken_back(two: Results) -> None:
    for rank in two:
        assert rank["sparse/fp16"]["skipped"] > 0
        assert all(rank["sparse/fp16"]["residuals_kept"])
        assert rank["sparse/fp16"]["residuals_kept"]


def test_other_settings(two: Results) -> None:
    for key in ("adaptive/fp32", "fp32/fp32", "bf16/fp32", "none/fp32"):
        in_step(two, key)
    assert not two[0]["none/fp32"]["residual"]


def test_non_finite_gradients_never_enter_a_residual(two: Results) -> None:
    for rank in two:
        assert rank["poison/fp32"]["finite"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_bitwise(two: Results, name: str) -> None:
    assert_resumed_bitwise(two, name)


def test_residuals_are_in_int8_unless_asked_otherwise(two: Results) -> None:
    for key, kind in (("exact/fp32", "int8"), ("fp32/fp32", "fp32"), ("bf16/fp32", "bf16")):
        assert f"ZeRO stage 3, fp32, reduce-scatter, residuals in {kind}" in two[0][key]["log"][0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(two: Results, name: str) -> None:
    for rank in two:
        assert rank[name]["error"].startswith("ConfigError: ")
        assert REFUSED[name][2] in rank[name]["error"]
