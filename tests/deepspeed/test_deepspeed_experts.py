"""Experts on other ranks (DeepSpeed's MoE), with real engines in real processes."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import CONFIGS
from support.deepspeed_launch import Results, Run, config, launch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("deepspeed")
from support.deepspeed_worker import Net, NetOfExperts

pytestmark = pytest.mark.slow

DENSE = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100}}
READY = CONFIGS / "deepspeed_experts_dct.json"
METHODS: dict[str, dict[str, Any]] = {
    "8-bit": {"forward": {"method": "quantise", "bits": 8}},
    "4-bit": {
        "forward": {"method": "quantise", "bits": 4},
        "backward": {"method": "quantise", "bits": 8},
    },
    "bound": {"forward": {"method": "bound", "error_bound": 0.02}},
    "threshold": {
        "forward": {"method": "threshold", "sparsity": 0.5, "value_dtype": "int8"},
        "backward": {"method": "answer", "value_dtype": "int8"},
    },
}


#: Two experts of four on every rank, of which every token sees two.
PLACEMENT: dict[str, Any] = {"num_experts": 4, "ep_size": 2, "k": 2, "top2_2nd_expert_sampling": False}
APART = functools.partial(NetOfExperts, **PLACEMENT)


class Recomputed(NetOfExperts):
    """A model whose experts run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__(**PLACEMENT)

    def of_experts(self, h: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = checkpoint(super().of_experts, h, use_reentrant=True)
        return added


def _reduce_in_a_group_of_its_own(engine: Any) -> None:
    reduce, group = engine.optimizer.allreduce_and_scatter, dist.new_group()
    engine.optimizer.allreduce_and_scatter = lambda *arguments, **keywords: reduce(
        *arguments, **{**keywords, "process_group": group}
    )


def run(prefix: str, experts: dict[str, Any] | None, steps: int, stage: int = 0, **more: Any) -> Run:
    precision = more.pop("precision", "fp32")
    dct = None if experts is None else {**DENSE, "model_parallel": {"experts": experts}}
    settings = config(stage, precision, optimizer="AdamW", gradient_accumulation_steps=2, dct=dct)
    name = f"{prefix}/zero{stage}-{precision}"
    return {"id": name, "config": settings, "steps": steps, "model": APART, **more}


def resumed(folder: Path) -> list[Run]:
    section = {"forward": {"method": "threshold", "sparsity": 0.5}, "warmup_steps": 1}
    save = str(folder / "saved")
    return [
        run("whole", section, 6, 1),
        run("half", section, 3, 1, save=save),
        run("rest", section, 6, 1, load=save, seed=2),
    ]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("experts")
    lossless = {"forward": {"method": "quantise", "bits": 16}}
    plan = []
    for stage in (0, 1, 2):
        plan += [
            run("plain", None, 3, stage, precision="bf16"),
            run("lossless", lossless, 3, stage, precision="bf16"),
        ]
    plan += [run("plain", None, 6), run("none", {"forward": "none"}, 6)]
    plan += [run("off", {"forward": {"method": "threshold", "sparsity": 0}}, 3)]
    plan += [run(name, section, 6) for name, section in METHODS.items()]
    plan += [run("recomputed", METHODS["threshold"], 6, model=Recomputed)]
    plan += [run("tight", {"forward": {"method": "bound", "error_bound": 1e-5}}, 3)]
    plan += [run("dense-evaluation", {**METHODS["8-bit"], "evaluation": False}, 1)]
    plan += resumed(folder)
    ready = json.loads(READY.read_text())
    plan.append({"id": "ready", "config": ready, "model": APART, "steps": 3})
    return launch(2, plan, folder)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two copies of every expert."""
    folder = tmp_path_factory.mktemp("copies")
    plan: list[Run] = []
    for stage in (0, 1):
        plan.append(run("plain", None, 3, stage))
        for name, sparsity in (("exact", 0.0), ("sparse", 0.9)):
            section = {"sparsity": sparsity, "value_dtype": "fp32", "min_numel": 100}
            dct = {"data_parallel": section, "model_parallel": {"expert_gradients": True}}
            plan.append(run(name, None, 3 if name == "exact" else 6, stage))
            plan[-1]["config"]["dct"] = dct
        plan.append(run("left", None, 2, stage))
        plan[-1]["config"]["dct"] = {"data_parallel": {"sparsity": 0.9, "min_numel": 100}}
    plan.append(run("unknown", None, 2, 1, model=Net, prepare=_reduce_in_a_group_of_its_own))
    plan[-1]["config"]["dct"] = {"data_parallel": {"sparsity": 0.9, "min_numel": 100}}
    ahead = {"data_parallel": {"feedback": "step_ahead"}, "model_parallel": {"expert_gradients": True}}
    plan.append({**run("refused", None, 1), "expect_error": True})
    plan[-1]["config"]["dct"] = ahead
    return launch(4, plan, folder)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_experts_by_option(four: Results, stage: int) -> None:
    plain, exact, sparse = (
        [rank[f"{name}/zero{stage}-fp32"] for rank in four] for name in ("plain", "exact", "sparse")
    )
    for rank, (before, found) in enumerate(zip(plain, exact, strict=True)):
        assert found["losses"] == pytest.approx(before["losses"], rel=1e-5)
        assert found["sums"] == pytest.approx(before["sums"], rel=1e-5, abs=1e-3)
        other = sparse[(rank + 2) % 4]
        assert sparse[rank]["hash"] == other["hash"]  # of the same experts
        assert sparse[rank]["hash"] != sparse[(rank + 1) % 4]["hash"]
        assert sparse[rank]["experts"]
        assert sparse[rank]["losses"][-1] < sparse[rank]["losses"][0]


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("left/zero0-fp32", "experts", "experts (dct.model_parallel.expert_gradients is off)"),
        ("left/zero1-fp32", "experts", "experts (dct.model_parallel.expert_gradients is off)"),
        ("unknown/zero1-fp32", "unknown_group", "group of ranks not known"),
    ],
)
def test_gradients_that_cross_dense_are_told(four: Results, name: str, reason: str, words: str) -> None:
    for rank in four:
        classes = rank[name]["classes"]
        left = classes[f"uncompressed/gradient/{reason}"]
        assert (
            0
            < left["dense"]
            == left["sent"]
            <= sum(found["dense"] for cls, found in classes.items() if cls.startswith("host_"))
        )
    lines = [line for line in four[0][name]["log"] if "of gradient bytes went uncompressed: " in line]
    assert len(lines) == 1
    assert lines[0].endswith(words)
    active = next(line for line in four[0][name]["log"] if "active on" in line)
    compressed, whole = map(int, re.search(r"(\d+) of (\d+) parameters", active).groups())  # type: ignore
    assert (compressed < whole) == (reason == "experts")
    assert not any("uncompressed" in line for line in four[0]["exact/zero1-fp32"]["log"])


def test_gradients_of_experts_are_refused_with_step_ahead(four: Results) -> None:
    error = four[0]["refused/zero0-fp32"]["error"]
    assert 'dct.data_parallel.feedback = "step_ahead": expert_gradients: step-ahead displaces' in error


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_crosses_exactly_trains_bitwise_as_without_the_plugin(two: Results, stage: int) -> None:
    """bf16 tokens in 16 bits: slots without a token stay where they are, gradients come back to theirs."""
    for rank in two:
        plain, found = rank[f"plain/zero{stage}-bf16"], rank[f"lossless/zero{stage}-bf16"]
        assert found["losses"] == plain["losses"]
        assert found["norms"] == plain["norms"]
        assert found["hash"] == plain["hash"]
        total = found["classes"]
        assert total["experts"]["sent"] < 0.92 * total["experts"]["dense"]


def test_no_method_is_deepspeed(two: Results) -> None:
    for rank in two:
        assert rank["none/zero0-fp32"]["losses"] == rank["plain/zero0-fp32"]["losses"]
        assert rank["none/zero0-fp32"]["hash"] == rank["plain/zero0-fp32"]["hash"]
        assert rank["off/zero0-fp32"]["losses"] == rank["plain/zero0-fp32"]["losses"][:3]
        assert not {"experts", "experts_gradient"} & rank["none/zero0-fp32"]["classes"].keys()


def test_a_tight_bound_trains_nearly_as_without_the_plugin(two: Results) -> None:
    plain, found = two[0]["plain/zero0-fp32"], two[0]["tight/zero0-fp32"]
    assert found["losses"] == pytest.approx(plain["losses"][:3], rel=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_and_saves_bytes_both_ways(two: Results, name: str) -> None:
    plain = two[0]["plain/zero0-fp32"]
    for rank in two:
        found = rank[f"{name}/zero0-fp32"]
        assert found["losses"] == two[0][f"{name}/zero0-fp32"]["losses"]
        assert found["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.15)
        assert found["losses"] != plain["losses"]
        for cls in ("experts", "experts_gradient"):
            total = found["classes"][cls]
            assert 0 < total["sent"] < total["dense"] / 2, cls


def test_recomputed_layers_send_the_same_again(two: Results) -> None:
    for rank in two:
        found, once = rank["recomputed/zero0-fp32"], rank["threshold/zero0-fp32"]
        assert found["losses"] == once["losses"]
        assert found["hash"] == once["hash"]


def test_evaluation(two: Results) -> None:
    assert "experts_evaluation" in two[0]["8-bit/zero0-fp32"]["classes"]
    assert "experts_evaluation" not in two[0]["dense-evaluation/zero0-fp32"]["classes"]


def test_a_resumed_run_goes_on_bitwise(two: Results) -> None:
    for rank in two:
        whole, half, rest = (rank[f"{part}/zero1-fp32"] for part in ("whole", "half", "rest"))
        assert rest["loaded"]
        assert half["losses"] + rest["losses"] == whole["losses"]
        assert rest["hash"] == whole["hash"]


def test_the_ready_made_configuration(two: Results) -> None:
    assert two[0]["ready"]["steps"] == 3
    assert two[0]["ready"]["classes"]["experts"]["sent"]
    assert "experts: quantise, 8 bits" in two[0]["ready"]["log"][0]
