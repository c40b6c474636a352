"""Exact updates of the weights on DeepSpeed's real engines: training is bitwise that of dense gathers."""

from __future__ import annotations

from typing import Any

import pytest
from support import given_times
from support.deepspeed_launch import Results, Run, config, launch

pytest.importorskip("deepspeed")
from support.deepspeed_worker import Net, NetOfExperts

pytestmark = pytest.mark.slow

FP16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 4, "hysteresis": 1}
ACCUMULATE = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
STEPS = 16

CASES: dict[str, Any] = {
    "zero1-bf16": config(1, "bf16", optimizer="AdamW"),
    "zero1-bf16-fp32accumulation": config(
        1, "bf16", optimizer="AdamW", data_types={"grad_accum_dtype": "fp32"}
    ),
    "zero1-fp16": config(1, fp16=FP16, optimizer="AdamW"),
    "zero2-bf16-round-robin": config(2, "bf16", optimizer="AdamW", zero={"round_robin_gradients": True}),
    "zero2-fp16": config(2, fp16=FP16, optimizer="AdamW", **ACCUMULATE),
}
#: Gradients as DeepSpeed sums them: whatever differs comes from the weights.
EXACT = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100, "parameters": "exact"}}
AHEAD = {
    "data_parallel": {
        "sparsity": 0.9, "min_numel": 100, "feedback": "step_ahead", "warmup_steps": 1, "parameters": "exact",
    }
}  # fmt: skip
DEFAULT = {"data_parallel": {k: v for k, v in AHEAD["data_parallel"].items() if k != "parameters"}}
ON_DEVICE = {**EXACT, "kernels": {"backend": "deferred"}}
GATHERED = {"data_parallel": {**AHEAD["data_parallel"], "parameters": None}}


class FrozenNet(Net):
    """A model of which two layers are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.middle, self.embedding):
            layer.requires_grad_(False)


def _overwrite(engine: Any, step: int) -> None:
    """Write a weight before step 7, as a script may."""
    if step == 7:
        engine.module.head.weight.data.mul_(2.0)


def run(kind: str, name: str, dct: dict[str, Any] | None, **more: Any) -> Run:
    settings = CASES[name] if dct is None else {**CASES[name], "dct": dct}
    return {"id": f"{kind}/{name}", "config": settings, "steps": STEPS, **more}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("exact")
    plan: list[Run] = []
    for name in CASES:
        save = str(folder / name)
        plan += [
            run("plain", name, None, before_step=_overwrite),
            run("exact", name, EXACT, before_step=_overwrite, save=save, save_after=9),
            run("rest", name, EXACT, load=save, seed=2),
        ]
    plan += [
        run("chosen", name, EXACT, before_step=_overwrite, times=given_times.whole_gathers_are_faster)
        for name in CASES
    ]
    plan += [run("device", name, ON_DEVICE, before_step=_overwrite) for name in ("zero1-bf16", "zero2-fp16")]
    name = "zero1-bf16"
    verified = {"data_parallel": {**EXACT["data_parallel"], "verify": {"every": 1}}}
    at_save = {"data_parallel": {**EXACT["data_parallel"], "verify": {"every": 10_000}}}
    experts = config(1, "bf16", optimizer="Adam")
    whole = {"data_parallel": {**EXACT["data_parallel"], "parameters": None}}
    quality = {"data_parallel": {"quality": "dense", "min_numel": 100}}
    fp32 = {**config(1, optimizer="AdamW"), "dct": EXACT}
    plan += [
        run("ahead", name, AHEAD),
        run("gathered", name, GATHERED),
        run("default", name, DEFAULT),
        run("quality", name, quality, before_step=_overwrite),
        run("frozen", name, EXACT, model=FrozenNet),
        run("frozen and plain", name, None, model=FrozenNet),
        {"id": "experts", "model": NetOfExperts, "config": {**experts, "dct": EXACT}, "steps": 6},
        {"id": "experts gathered", "model": NetOfExperts, "config": {**experts, "dct": whole}, "steps": 6},
        {"id": "fp32", "config": fp32, "steps": 1, "expect_error": True},
        {"id": "stage3", "config": {**config(3, "bf16"), "dct": EXACT}, "steps": 1, "expect_error": True},
        # Last: after them the ranks' weights differ.
        run(
            "saved",
            name,
            at_save,
            save=str(folder / "saved"),
            save_after=9,
            ranks={1: {"before_step": _overwrite}},
            expect_error=True,
        ),
        run("verified", name, verified, ranks={1: {"before_step": _overwrite}}, expect_error=True),
    ]
    return launch(2, plan, folder / "two", DCT_TEST_FP16_ON_CPU="1")


@pytest.mark.parametrize("name", CASES)
def test_training_is_deepspeeds_bitwise(two: Results, name: str) -> None:
    """Also after the script wrote a weight, after steps that overflowed, and after a checkpoint."""
    for rank in two:
        plain, exact, rest = (rank[f"{kind}/{name}"] for kind in ("plain", "exact", "rest"))
        assert plain["losses"][9:] == exact["losses"] == rest["losses"]
        for what in ("hash", "after", "skipped"):
            assert exact[what] == plain[what], what
        assert rest["hash"] == plain["hash"]
        assert ("fp16" in name) == (plain["skipped"] > 0)
        part = exact["classes"]["parameter_exact"]
        assert 0 < part["density"] <= 1
        assert part["sent"] < part["dense"]
        assert exact["classes"]["parameter_full"]["sent"] > 0  # the first gather, and one after loading
        # These gathers are counted once; headers and small exchanges of the start are left.
        assert exact["classes"]["host_all_gather"]["sent"] < exact["classes"]["parameter_full"]["sent"] / 4
    assert two[0][f"exact/{name}"]["hash"] == two[1][f"exact/{name}"]["hash"]


@pytest.mark.parametrize("name", ["zero1-bf16", "zero2-fp16"])
def test_training_is_deepspeeds_where_figures_stay_on_a_device(two: Results, name: str) -> None:
    """The test backend leaves them there as a GPU's does."""
    for rank in two:
        plain, device = rank[f"plain/{name}"], rank[f"device/{name}"]
        for what in ("losses", "hash", "after", "skipped"):
            assert device[what] == plain[what], what
        part = device["classes"]["parameter_exact"]
        assert part["density"] == pytest.approx(
            rank[f"exact/{name}"]["classes"]["parameter_exact"]["density"], rel=0.5
        )


@pytest.mark.parametrize("name", CASES)
def test_training_is_deepspeeds_where_gathers_are_chosen(two: Results, name: str) -> None:
    """Ranks go from gathers to exact updates and back, in trials."""
    for rank in two:
        plain, chosen = rank[f"plain/{name}"], rank[f"chosen/{name}"]
        for what in ("losses", "hash", "after", "skipped"):
            assert chosen[what] == plain[what], what
        dense = {part: chosen["classes"][f"parameter_{part}"]["dense"] for part in ("full", "exact")}
        share = dense["full"] / (dense["full"] + dense["exact"])
        # Of six steps three are whole: two of a trial, and one after its decision, which may be skipped.
        whole = sum(step % 6 in (0, 1, 5) for step in range(STEPS)) / STEPS
        assert share == pytest.approx(whole, rel=0.2 if plain["skipped"] else 0.01)
    said = [line for line in two[0][f"chosen/{name}"]["log"] if "cross in whole gathers" in line]
    assert len(said) == 1


def test_step_ahead_is_that_of_gathered_weights(two: Results) -> None:
    for rank in two:
        assert rank["ahead/zero1-bf16"]["displaced"] > 0
        for what in ("losses", "hash", "residual", "coefficients"):
            assert rank["ahead/zero1-bf16"][what] == rank["gathered/zero1-bf16"][what], what
        assert not any("gather_parameters" in line for line in rank["ahead/zero1-bf16"]["log"])


def test_it_is_the_default_of_thresholded_gradients(two: Results) -> None:
    name = "zero1-bf16"
    for rank in two:
        for what in ("losses", "hash"):
            assert (
                rank[f"default/{name}"][what] == rank[f"ahead/{name}"][what] == rank[f"gathered/{name}"][what]
            )
        assert rank[f"default/{name}"]["classes"]["parameter_exact"]["sent"] > 0
        assert "parameter_exact" not in rank[f"gathered/{name}"]["classes"]
    said = [line for line in two[0][f"default/{name}"]["log"] if "updated weights cross where" in line]
    assert len(said) == 1


def test_the_class_exact_of_the_automatic_mode_takes_it(two: Results) -> None:
    for rank in two:
        found = rank["quality/zero1-bf16"]
        assert found["hash"] == rank["exact/zero1-bf16"]["hash"]
        assert found["classes"]["parameter_exact"]["sent"] > 0


def test_expert_groups_stay_deepspeeds_and_frozen_weights_as_they_are(two: Results) -> None:
    for rank in two:
        for kind, other in (
            ("experts", "experts gathered"),
            ("frozen/zero1-bf16", "frozen and plain/zero1-bf16"),
        ):
            assert rank[kind]["losses"] == rank[other]["losses"]
            assert rank[kind]["hash"] == rank[other]["hash"]
            assert rank[kind]["classes"]["parameter_exact"]["sent"] > 0


def test_what_cannot_be_exact_is_refused(two: Results) -> None:
    for rank in two:
        assert 'dct.data_parallel.parameters = "exact": ZeRO' in rank["fp32"]["error"]
        assert "'exact' is for bf16 and fp16" in rank["fp32"]["error"]
        assert "every rank is a node, and an exact copy of all weights" in rank["stage3"]["error"]


def test_weights_that_one_rank_overwrote_are_found(two: Results) -> None:
    for rank in two:
        for kind in ("verified", "saved"):
            assert "head.weight" in rank[f"{kind}/zero1-bf16"]["error"], kind
        assert "after step 9" in rank["saved/zero1-bf16"]["error"]
