"""Runs of pipelines for the pipeline tests: many small ones in one process per rank.

What a run does follows from its DeepSpeed configuration alone, as for any user; only ``capacity``, the room
of a message, is no option of the plugin. A plan is a list of runs ``{"id", "config", "steps", ...}``; the
results have one entry per run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from dct_plugin.model_parallel.compressors import threshold
from support import deepspeed_worker
from support.deepspeed_worker import digest, sent_by_class

VOCABULARY, WIDTH, LENGTH = 48, 32, 12


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
    """What the plugin is to do at a boundary, by plain torch: entries below the k-th largest magnitude of the
    step's first micro-batch become zeros, and their gradients, too.
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


def make_model(run: dict[str, Any]) -> PipelineModule:
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
    stages = run.get("stages", 2)
    return PipelineModule(
        layers=[first, *middle, last],
        num_stages=stages,
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


def _execute(run: dict[str, Any], result: dict[str, Any]) -> None:
    with patch.object(threshold, "CAPACITY", run.get("capacity", threshold.CAPACITY)):
        _train(run, result)


def _train(run: dict[str, Any], result: dict[str, Any]) -> None:
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


def main(plan: list[dict[str, Any]]) -> dict[str, Any]:
    return deepspeed_worker.main(plan, _execute)
