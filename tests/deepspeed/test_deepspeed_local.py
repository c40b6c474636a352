"""Local updates (``update: "local"``) on DeepSpeed's real engines.

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

LOCAL = {"feedback": "local_updates", "min_numel": 100, "verify": {"every": 1}}
ACCUMULATE = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}

CASES: dict[str, Any] = {
    "fp32": config(0, optimizer="AdamW"),
    "fp32-accumulate": config(0, optimizer="AdamW", **ACCUMULATE),
    "bf16": config(0, "bf16", optimizer="AdamW", **ACCUMULATE),
    "autocast": config(
        0, optimizer="AdamW", torch_autocast={"enabled": True, "dtype": "bfloat16"}, gradient_clipping=0.5
    ),
    "sgd": config(0),
    "linear": config(0, gradient_clipping=0.0),  # DeepSpeed's default is to clip at 1
    "sparse": {**config(0), "optimizer": {"type": "Adagrad", "params": {"lr": 0.02}}},
    "experts": config(0, optimizer="AdamW"),
}
RESUMED = ["fp32", "bf16"]


def run(kind: str, name: str, steps: int, dct: dict[str, Any] | None, **more: Any) -> Run:
    section = {} if dct is None else {"dct": {"data_parallel": dct}}
    if name in ("sparse", "experts"):
        more["model"] = name
    return {"id": f"{kind}/{name}", "config": {**CASES[name], **section}, "steps": steps, **more}


def refused(name: str, settings: dict[str, Any], **keys: Any) -> Run:
    section = {"dct": {"data_parallel": {**LOCAL, **keys}}}
    return {"id": name, "config": {**settings, **section}, "steps": 1, "expect_error": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def two(folder: Path) -> Results:
    sparse = {**LOCAL, "sparsity": 0.95}
    resumed = {**sparse, "warmup_steps": 1, "feedback": {"kind": "local_updates", "every": 2}}
    exact = {**LOCAL, "sparsity": 0.0, "value_dtype": "fp32"}
    plan: list[Run] = [run("sparse", name, 24, sparse) for name in CASES]
    plan += [
        run("rare", name, 24, {**sparse, "feedback": {"kind": "local_updates", "every": 4}}) for name in CASES
    ]
    plan += [run("plain", "linear", 6, None), run("exact", "linear", 6, exact)]
    plan += [run("plain", "fp32", 4, None), run("warm", "fp32", 4, {**sparse, "warmup_steps": 4})]
    for name in RESUMED:
        save = str(folder / name)
        plan += [
            run("whole", name, 11, resumed),
            run("half", name, 7, resumed, save=save),
            run("rest", name, 11, resumed, load=save, seed=2),
        ]
    older = str(folder / "older")
    plan += [
        run("older", "fp32", 3, {"min_numel": 100, "sparsity": 0.9}, save=older),
        run("newer", "fp32", 8, sparse, load=older),
        run("dense", "fp32", 8, None, load=str(folder / "fp32")),
        refused("zero1", config(1)),
        refused("zero2", config(2)),
        refused("zero1-bf16", config(1, "bf16", data_types={"grad_accum_dtype": "fp32"})),
        refused("fp16", config(0, fp16={"enabled": True})),
    ]
    return launch(2, plan, folder / "two", DCT_TEST_FP16_ON_CPU="1")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["sparse", "rare"])
def test_anchors_are_equal_and_local_weights_are_not(two: Results, kind: str, name: str) -> None:
    first, second = (rank[f"{kind}/{name}"] for rank in two)
    if name != "experts":  # these keep what DeepSpeed does with them
        assert first["hash"] == second["hash"]
    assert first["after"] == second["after"]
    assert first["local"].keys() == second["local"].keys()
    assert first["local"] != second["local"]
    assert first["losses"][-1] < first["losses"][0]
    assert first["after"] < first["before"]
    assert first["steps"] == 24


@pytest.mark.parametrize("name", CASES)
def test_bytes_fall_with_the_steps_between_exchanges(two: Results, name: str) -> None:
    often, rare = (
        [part for kind, part in two[0][f"{run}/{name}"]["classes"].items() if kind.startswith("gradient")]
        for run in ("sparse", "rare")
    )
    assert sum(part["dense"] for part in rare) == sum(part["dense"] for part in often)
    assert 3.4 < sum(part["sent"] for part in often) / sum(part["sent"] for part in rare) < 4.6


def test_dense_local_steps_of_sgd_are_deepspeed(two: Results) -> None:
    """Also with momentum, up to rounding; ranks are bitwise equal."""
    for rank in two:
        plain, exact = rank["plain/linear"], rank["exact/linear"]
        assert exact["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert exact["sums"] == pytest.approx(plain["sums"], rel=1e-5)
        assert exact["hash"] == two[0]["exact/linear"]["hash"]


def test_a_dense_start_is_deepspeed_bitwise(two: Results) -> None:
    for rank in two:
        for what in ("losses", "norms", "hash", "after"):
            assert rank["warm/fp32"][what] == rank["plain/fp32"][what], what


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_bitwise(two: Results, name: str, folder: Path) -> None:
    for number, rank in enumerate(two):
        whole, half, rest = (rank[f"{kind}/{name}"] for kind in ("whole", "half", "rest"))
        assert rest["before"] == half["after"]
        assert rest["losses"] == whole["losses"][-len(rest["losses"]) :]
        for what in ("hash", "local", "after"):
            assert rest[what] == whole[what], what
        file = folder / name / "global_step7" / f"dct_rank_{number:05d}.pt"
        assert torch.load(file, weights_only=True)["state"]["local"]["optimizer"]


def test_checkpoints_are_the_anchor(two: Results) -> None:
    """They start a run without the plugin, and those of other runs start this one."""
    for rank in two:
        assert rank["dense/fp32"]["loaded"]
        assert rank["dense/fp32"]["before"] == rank["half/fp32"]["after"]
        assert rank["newer/fp32"]["before"] == rank["older/fp32"]["after"]
        assert rank["newer/fp32"]["hash"] == two[0]["newer/fp32"]["hash"]


def test_other_world_sizes_start_at_the_mean(two: Results, folder: Path) -> None:
    section = {**LOCAL, "sparsity": 0.95}
    plan = [run("load", name, 14, section, load=str(folder / name)) for name in ("fp32", "bf16")]
    three = launch(3, plan, folder / "three")
    for name in ("fp32", "bf16"):
        first, *others = (rank[f"load/{name}"] for rank in three)
        assert first["before"] == two[0][f"half/{name}"]["after"]
        assert all(other["hash"] == first["hash"] for other in others)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero1", "under ZeRO stage 1 a rank's optimizer has a part of the weights, and needs all"),
        ("zero2", "under ZeRO stage 2 a rank's optimizer has a part"),
        ("zero1-bf16", "under ZeRO stage 1 a rank's optimizer has a part"),
        ("fp16", "dct.data_parallel.feedback = 'local_updates': under fp16 a rank that skips a step"),
    ],
)
def test_other_engines_are_refused_at_start(two: Results, name: str, words: str) -> None:
    for rank in two:
        assert rank[name]["error"].startswith("ConfigError")
        assert words in rank[name]["error"]
