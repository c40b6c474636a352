"""Measurements of a training run: bytes by class, and a comparison of the ranks' weights."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from dct_plugin.host_traffic import own_traffic
from dct_plugin.metrics import Metrics


@contextmanager
def unrecorded(model: nn.Module, metrics: Metrics) -> Iterator[None]:
    """Inside, nothing that is sent is counted: bytes of an evaluation are not those of training."""
    modules: list[Any] = [m for m in model.modules() if getattr(m, "metrics", None) is metrics]
    for module in modules:
        module.metrics = None
    try:
        with own_traffic():
            yield
    finally:
        for module in modules:
            module.metrics = metrics


def bytes_per_step(engine: Any, metrics: Metrics, steps: int) -> dict[str, dict[str, float]]:
    """``{class: {dense, sent}}`` bytes per optimizer step, all ranks together. A collective.

    Args:
        engine: After training.
        metrics: Of its sharded tables.
        steps: Optimizer steps that it did.
    """
    attached = engine.__dict__.get("dct")
    sources = [metrics] if attached is None else [metrics, attached.metrics]
    mine = [
        (name, summary.dense_bytes, summary.sent_bytes)
        for source in sources
        for name, summary in source.summary().classes.items()
    ]
    shared = sum(p.numel() for p in engine.module.parameters() if getattr(p, "allreduce", True))
    ranks = dist.get_world_size()
    ring = steps * 2 * (ranks - 1) / ranks * 4 * shared  # a ring all-reduce in fp32
    if attached is None:
        mine.append(("gradient", ring, ring))
    dense_gather = attached is None or attached.config.data_parallel.parameters is None
    if engine.zero_optimization_stage() > 0 and dense_gather:
        # DeepSpeed's own gather of updated weights: half of what an all-reduce of as many sends.
        mine.append(("parameter_full", ring / 2, ring / 2))
    everyones: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(everyones, mine)
    found: dict[str, dict[str, float]] = {}
    for name, *amounts in sorted(itertools.chain.from_iterable(everyones)):
        total = found.setdefault(name, {"dense": 0.0, "sent": 0.0})
        for kind, amount in zip(total, amounts, strict=True):
            total[kind] += amount
    return {name: {kind: sent / steps for kind, sent in total.items()} for name, total in found.items()}


def same_on_all_ranks(parameters: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether these are bitwise the same on all ranks."""
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.int64, device=device)
    return all(torch.equal(mine, other) for other in gathered(mine))


def gathered(tensor: Tensor) -> list[Tensor]:
    """Gather the tensors of all ranks, which have one shape and dtype."""
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return everyones
