"""DeepSpeed's pipeline engine, with real engines in real processes: two stages of two replicas each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import CONFIGS
from support.deepspeed_launch import Results, Run, config, launch
from torch import Tensor, nn

from dct_plugin.model_parallel.compressors import threshold

pytest.importorskip("deepspeed")
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from support.deepspeed_worker import digest, sent_by_class

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY, WIDTH, LENGTH = 48, 32, 12
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


class Block(nn.Module):
    """One of the inner layers; ``extra``: beside the activation comes a second one, a scalar and integers."""

    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.extra = extra

    def forward(self, given: Any) -> Any:
        h = given[0] if self.extra else given
        h = h + self.shrink(torch.relu(self.grow(self.norm(h))))
        if not self.extra:
            return h
        if len(given) == 2:
            return h * given[1].unsqueeze(-1), given[1]
        _, mean, scale, ids = given
        return h, mean + h.mean(dim=1), scale * 1.01, ids


class Embed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.kind = kind

    def forward(self, ids: Tensor) -> Any:
        h = self.embedding(ids.long())
        if self.kind == "mask":
            return h, ids % 7 != 0
        # Two activations, a scalar with a gradient, and integers.
        return (h, h.sum(dim=1), self.scale * 1.0, ids) if self.kind == "tuple" else h


class Head(nn.Module):
    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.extra = extra

    def forward(self, given: Any) -> Tensor:
        if not self.extra:
            return self.out(given)
        if len(given) == 2:
            return self.out(given[0])
        h, mean, scale, ids = given
        return self.out(h + mean.unsqueeze(1)) * scale + 0.01 * (ids % 2).unsqueeze(-1)


class Thresholded(nn.Module):
    """Does by plain torch what the plugin is to do at a boundary: entries below the k-th largest magnitude of
    the step's first micro-batch become zeros, and their gradients, too.
    """

    def __init__(self, share: float, micro_batches: int) -> None:
        super().__init__()
        self.share, self.micro_batches, self.calls, self.tau = share, micro_batches, 0, 0.0

    def forward(self, h: Tensor) -> Tensor:
        if self.calls % self.micro_batches == 0:
            kept = max(1, round(self.share * h.numel()))
            self.tau = float(h.detach().abs().flatten().sort(descending=True).values[kept - 1])
        self.calls += 1
        return h * (h.detach().abs() >= self.tau)


class TiedEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids.long(), self.weight)


def _logits(module: TiedEmbed, h: Tensor) -> Tensor:
    return h @ module.weight.T


def make_model(run: Run) -> PipelineModule:
    kind = run.get("model", "plain")
    extra = kind in ("tuple", "mask")
    if kind == "tied":
        first = TiedLayerSpec("words", TiedEmbed)
        last = TiedLayerSpec("words", TiedEmbed, forward_fn=_logits)
    else:
        first, last = LayerSpec(Embed, kind), LayerSpec(Head, extra)
    middle = [LayerSpec(Block, extra) for _ in range(4)]
    if kind == "thresholded":
        middle.insert(2, LayerSpec(Thresholded, *run["threshold"]))
    elif kind == "identity":  # in its place, since layers are seeded by position
        middle.insert(2, LayerSpec(nn.Identity))
    return PipelineModule(
        layers=[first, *middle, last],
        num_stages=run.get("stages", 2),
        partition_method="uniform",
        loss_fn=lambda out, labels: nn.functional.cross_entropy(
            out.float().flatten(0, 1), labels.long().flatten()
        ),
        activation_checkpoint_interval=run.get("checkpoint_interval", 0),
        checkpointable_layers=["Block"],
        seed_layers=True,
        # At every layer of every forward pass; torch.manual_seed formats a stack for each absent device.
        seed_fn=torch.default_generator.manual_seed,
        base_seed=run.get("seed", 1),
    )


def batches(first: int, replica: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches by number: the same in every run, and after a restart."""
    while True:
        generator = torch.Generator().manual_seed(7919 * first + 31 * replica + 1)
        ids = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
        yield ids, (ids * 5 + 1) % VOCABULARY
        first += 1


def _execute(run: Run, result: Run) -> None:
    """Train a pipeline. ``capacity``, the room of a message, is no option of the plugin."""
    torch.default_generator.manual_seed(run.get("seed", 1))
    model = make_model(run)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=run["config"]
    )
    engine.has_bool_tensors = run.get("model") == "mask"  # there is no other way to say so
    result |= {"losses": [], "evaluated": []}
    first = 0
    if "load" in run:
        result["loaded"] = engine.load_checkpoint(run["load"])[0] is not None
        first = engine.global_steps
    size, micro = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    replica = engine.grid.get_data_parallel_id()
    data = batches(first * micro, replica, size)
    with patch.object(threshold, "CAPACITY", run.get("capacity", threshold.CAPACITY)):
        for step in range(first, run["steps"]):
            result["losses"].append(float(engine.train_batch(data)))
            if run.get("evaluate") and step % 2:
                result["evaluated"].append(float(engine.eval_batch(batches(10**6, replica, size))))
    if "save" in run:
        engine.save_checkpoint(run["save"])
    result.update(
        hash=digest(engine.module),
        tied=[digest(module) for module in engine.module.tied_modules.values()],
        stage=engine.stage_id,
        norm=float(engine.get_global_grad_norm() or 0.0),
        attached="dct" in engine.__dict__,
    )
    if result["attached"]:
        result.update(
            steps=engine.dct.steps.step,
            streams=sorted(engine.dct.reducer.group.streams),
            boundaries=sorted(
                name for hooks in engine.dct.activations.values() for name in hooks.streams.state_dict()
            ),
            classes=sent_by_class(engine.dct.metrics.summary()),
        )
    engine.destroy()


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
    return launch(4, [{**job, "execute": _execute} for job in plan], folder)


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
