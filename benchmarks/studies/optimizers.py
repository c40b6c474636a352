"""Error feedback under SGD, Adam and AdamW: quality against dense training, on real data, with paired seeds.

Trains a small DLRM on Diabetes 130-US hospitals with data-parallel workers inside one process: each worker
has its own share of every batch and its own compressors, the decoded payloads are averaged as the direct
exchange does. Nothing is timed; what is reported is the difference in AUC to the dense run of the same seed,
with its 95 % interval.

    python benchmarks/studies/optimizers.py --seeds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from dct_plugin import Compressor
from dct_plugin.data_parallel.step_ahead.add_on import StepAhead, Unsent
from dct_plugin.data_parallel.step_ahead.residual_coefficients import INTERVAL
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.recommender.data import epoch_batches, load
from dct_plugin.recommender.intervals import paired
from dct_plugin.recommender.models import DLRM

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.3),
    "SGD momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=1e-2),
}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "0.9": {"sparsity": 0.9},
    "0.9, int8 values": {"sparsity": 0.9, "value_dtype": "int8"},
    "0.97": {"sparsity": 0.97},
    "0.99": {"sparsity": 0.99},
    "0.99, no feedback": {"sparsity": 0.99, "feedback": "none"},
    "0.99, 10 % warm-up + 10 % ramp": {"sparsity": 0.99, "ramp": True},
    "0.999": {"sparsity": 0.999},
    "0.9, step-ahead": {"sparsity": 0.9, "feedback": "step_ahead"},
    "0.99, step-ahead": {"sparsity": 0.99, "feedback": "step_ahead"},
    "0.99, step-ahead, 10 + 20 steps": {
        "sparsity": 0.99,
        "feedback": "step_ahead",
        "warmup_steps": 10,
        "sparsity_warmup_steps": 20,
    },
    "0.99, step-ahead, 20 + 60 steps": {
        "sparsity": 0.99,
        "feedback": "step_ahead",
        "warmup_steps": 20,
        "sparsity_warmup_steps": 60,
    },
}


def batches(rows: int, batch: int, epochs: int, seed: int) -> Iterator[Any]:
    for epoch in range(epochs):
        yield from epoch_batches(rows, batch, seed=seed, epoch=epoch)


def split(rows: Any, worker: int, args: argparse.Namespace) -> Any:
    """A worker's share of a batch: every n-th row, or with ``--skew`` the n-th part of it."""
    if not args.skew:
        return rows[worker :: args.workers]
    return rows[worker * len(rows) // args.workers : (worker + 1) * len(rows) // args.workers]


def look_ahead(
    model: nn.Module, optimizer: torch.optim.Optimizer, streams: dict[str, Compressor], workers: int
) -> StepAhead:
    """Step-ahead of one worker."""

    def residual_of(name: str) -> torch.Tensor | None:
        kept = streams[name].residual
        return None if kept is None else kept.current

    named = [(n, p) for n, p in model.named_parameters() if n in streams]
    return StepAhead(named, units_of(optimizer), Unsent(residual_of), world_size=workers)


def compare_residuals(aheads: list[StepAhead], names: list[str], step: int) -> None:
    """What the reducer does after an exchange, and the end of the step."""
    if not step % INTERVAL and (sampled := aheads[0].coefficients.due(names)):
        own = [ahead.coefficients.samples(sampled, step, torch.device("cpu")) for ahead in aheads]
        for ahead, mine in zip(aheads, own, strict=True):
            ahead.coefficients.measure(sampled, mine, sum(own) / len(own))
    for ahead in aheads:
        ahead.end_step(skipped=False)


def train(data: Any, optimizer: str, variant: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """One run; AUC and log loss on the test rows, density over the run."""
    rows = data.train
    model = DLRM(rows.dense.shape[1], data.cardinalities, seed=seed)
    step_with = OPTIMIZERS[optimizer](model.parameters())
    loss_of = nn.BCEWithLogitsLoss()
    settings = VARIANTS[variant]
    steps = list(batches(len(rows.label), args.batch_size, args.epochs, seed))
    streams: list[dict[str, Compressor]] = []
    if settings is not None:
        settings = dict(settings)
        if settings.pop("ramp", False):
            settings |= {"warmup_steps": len(steps) // 10, "sparsity_warmup_steps": len(steps) // 10}
        streams = [
            {
                n: Compressor(name=n, rank=w, **settings)
                for n, p in model.named_parameters()
                if p.numel() >= 4096
            }
            for w in range(args.workers)
        ]
    looks = settings is not None and settings.get("feedback") == "step_ahead"
    aheads = [look_ahead(model, step_with, stream, args.workers) for stream in streams] if looks else []
    kept = total = 0
    dense, sparse, label = (torch.as_tensor(t) for t in rows)
    for number, at in enumerate(steps):
        sums: dict[str, torch.Tensor] = {}
        if args.skew:
            at = at[data.train.label[at].argsort(kind="stable")]
        for worker in range(args.workers):
            part = torch.as_tensor(split(at, worker, args))
            step_with.zero_grad()
            if looks:
                aheads[worker].displace()
            loss_of(model(dense[part].float(), sparse[part].long()), label[part].float()).backward()
            if looks:
                aheads[worker].restore()
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                assert grad is not None
                if streams and name in streams[worker]:
                    if looks:
                        aheads[worker].observe([(name, grad.view(-1))])
                    payload = streams[worker][name].compress(grad)
                    kept, total = kept + payload.nnz, total + payload.numel
                    grad = streams[worker][name].decompress(payload)
                sums[name] = grad.clone() if name not in sums else sums[name] + grad
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / args.workers
        step_with.step()
        if looks:
            compare_residuals(aheads, list(streams[0]), number)
    with torch.no_grad():
        test_dense, test_sparse, test_label = (torch.as_tensor(t) for t in data.test)
        scores = torch.sigmoid(model(test_dense.float(), test_sparse.long())).double().numpy()
    truth = test_label.numpy()
    return {
        "auc": float(roc_auc_score(truth, scores)),
        "log_loss": float(log_loss(truth, scores)),
        "density": kept / total if total else 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=512, help="over all workers")
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--data", type=Path, help="Criteo text file instead of the shipped set")
    parser.add_argument("--skew", action="store_true", help="share out every batch by label, not at random")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = load("criteo" if args.data else "diabetes", args.data)
    table = Table("optimizer", "variant", "density", "AUC", "AUC - dense (95 %)", "log loss")
    results = []
    variants = ["dense", *(v for v in args.variants if v != "dense")]
    runs = [(o, v) for o in args.optimizers for v in variants if "momentum" not in v or "momentum" in o]
    dense_auc: list[float] = []
    for optimizer, variant in track(runs, description="training", console=Console(stderr=True)):
        seeds = [train(data, optimizer, variant, seed, args) for seed in range(args.seeds)]
        aucs = [run["auc"] for run in seeds]
        if variant == "dense":
            dense_auc = aucs
        difference = paired([a - b for a, b in zip(aucs, dense_auc, strict=True)])
        row = {
            "optimizer": optimizer,
            "variant": variant,
            "density": statistics.mean(run["density"] for run in seeds),
            "auc": statistics.mean(aucs),
            "difference": difference.mean,
            "interval": difference.half_width,
            "log_loss": statistics.mean(run["log_loss"] for run in seeds),
        }
        results.append(row)
        shown = "" if variant == "dense" else str(difference)
        auc, loss = f"{row['auc']:.4f}", f"{row['log_loss']:.4f}"
        table.add_row(optimizer, variant, f"{row['density']:.4f}", auc, shown, loss)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1, default=str))


if __name__ == "__main__":
    main()
