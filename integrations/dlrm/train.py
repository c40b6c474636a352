"""Train a DLRM on click data: an ordinary DeepSpeed script, with all settings of the engine in its JSON.

    torchrun --nproc-per-node 2 -m dct_plugin.integrations.dlrm.train --deepspeed_config ds.json --epochs 2

Rank 0 appends one JSON object per line to ``--events``: ``start``, a ``step`` for every optimizer step,
``evaluate`` and ``result`` (AUC and log loss on the test part, bytes by the interface counters, step times).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_plugin.metrics import InterfaceCounter

from .data import Rows, epoch_batches, load
from .models import DLRM


def main() -> None:
    arguments = parse_arguments()
    # A rank that died must not keep the others waiting for the default of half an hour.
    deepspeed.init_distributed(timeout=timedelta(minutes=5))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    report = reporter(arguments.events if rank == 0 else None)
    clicks = load(arguments.format, arguments.data, seed=arguments.seed, max_rows=arguments.max_rows)
    model = DLRM(
        clicks.dense.shape[1],
        clicks.cardinalities,
        embedding_dim=arguments.embedding_dim,
        bottom=arguments.bottom,
        top=arguments.top,
        seed=arguments.seed,
    )
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    micro_batch = engine.train_micro_batch_size_per_gpu()
    accumulation = engine.gradient_accumulation_steps()
    batch_size = world_size * micro_batch * accumulation
    report(
        "start",
        data=clicks.name,
        rows=len(clicks),
        training_rows=clicks.num_train,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        batch_size=batch_size,
        steps=arguments.epochs * (clicks.num_train // batch_size),
        all_reduce_ms=time_all_reduce(model, engine.device),
    )

    to_tensors = tensors_of(clicks.train, engine)
    step_ms: list[float] = []
    counter = InterfaceCounter([arguments.interface] if arguments.interface else None)
    dist.barrier()
    counter.start()
    begin = time.perf_counter()
    for epoch in range(arguments.epochs):
        for batch in epoch_batches(clicks.num_train, batch_size, seed=arguments.seed, epoch=epoch):
            started = time.perf_counter()
            losses = []
            for part in batch.reshape(accumulation, world_size, micro_batch)[:, rank]:
                dense, categorical, label = to_tensors(part)
                loss = binary_cross_entropy_with_logits(engine(dense, categorical).float(), label)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            step_ms.append(1e3 * (time.perf_counter() - started))
            report("step", step=len(step_ms), loss=statistics.fmean(losses), ms=round(step_ms[-1], 3))
    dist.barrier()
    seconds = time.perf_counter() - begin
    counter.stop()

    report("evaluate")
    probability = predict(engine, clicks.test)
    report(
        "result",
        auc=float(roc_auc_score(clicks.test.label, probability)),
        log_loss=float(log_loss(clicks.test.label, probability)),
        seconds=seconds,
        interface_bytes=counter.tx if counter.available else None,
        ranks_in_step=same_on_all_ranks(model, engine.device),
        device=get_accelerator().current_device_name(),
    )
    dist.barrier()  # a rank that tears down its connections while others still use them can abort them
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a DLRM on click data with DeepSpeed.")
    parser.add_argument("--format", default="diabetes", help="diabetes or criteo")
    parser.add_argument("--data", help="file to read; without it the data set that ships with the package")
    parser.add_argument("--max-rows", type=int, help="read the first rows only")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--embedding-dim", type=int, default=32)
    parser.add_argument("--bottom", type=widths, default=[512], help="hidden widths, such as 512,64")
    parser.add_argument("--top", type=widths, default=[512, 256], help="hidden widths, such as 512,256")
    parser.add_argument("--events", help="JSON lines file that rank 0 writes")
    parser.add_argument("--interface", help="network interface whose bytes are counted; all if left out")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def widths(text: str) -> list[int]:
    return [int(width) for width in text.split(",")]


def reporter(path: str | None) -> Callable[..., None]:
    """A function that appends an event and its fields to the JSON lines file ``path``, or does nothing."""
    if path is None:
        return lambda event, **fields: None
    file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - open until the process ends

    def report(event: str, **fields: Any) -> None:
        file.write(json.dumps({"event": event, **fields}) + "\n")

    return report


def tensors_of(rows: Rows, engine: Any) -> Callable[[Any], tuple[Tensor, Tensor, Tensor]]:
    """A function from row numbers (or a slice) to (dense, categorical, label) on the engine's device."""
    dtype = next(engine.module.parameters()).dtype

    def to_tensors(at: Any) -> tuple[Tensor, Tensor, Tensor]:
        dense, categorical, label = (torch.from_numpy(column[at]).to(engine.device) for column in rows)
        return dense.to(dtype), categorical, label

    return to_tensors


@torch.no_grad()
def predict(engine: Any, rows: Rows, batch: int = 4096) -> np.ndarray:
    """Probability of label 1 for every row, float32 [rows]."""
    to_tensors = tensors_of(rows, engine)
    engine.eval()
    parts = []
    for start in range(0, len(rows.label), batch):
        dense, categorical, _ = to_tensors(slice(start, start + batch))
        parts.append(engine(dense, categorical).float().sigmoid())
    engine.train()
    return torch.cat(parts).cpu().numpy()


def time_all_reduce(model: nn.Module, device: torch.device, repeats: int = 7) -> float:
    """Milliseconds that one all-reduce of all gradients takes on this link (fp32, median)."""
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()), device=device)
    times = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(gradients)
        get_accelerator().synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def same_on_all_ranks(model: nn.Module, device: torch.device) -> bool:
    """Whether all ranks ended with bitwise the same weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.int64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)


if __name__ == "__main__":
    main()
