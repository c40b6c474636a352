"""Measure the share of a step that the guard takes, by timers around its methods.

Two gloo ranks on this machine train a stack of linear layers under torch DDP with AdamW and step-ahead. The
guard counts displaced tensors in each step (coverage), and compares residuals and replicas after compressed
steps 1, 10, 100 and then every 1,000; a comparison includes the time in which it waits for the other rank.

    python benchmarks/guard.py                            # 24 layers of 128 x 128: 48 tensors
    python benchmarks/guard.py --layers 128 --width 64    # 256 tensors
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import dct_plugin
from dct_plugin.data_parallel.residual_checks import ResidualChecks
from dct_plugin.data_parallel.step_ahead.displaced_weights import Coverage
from dct_plugin.integrations.host.replica_checksums import ReplicaChecksums

PARTS: dict[type, tuple[str, ...]] = {
    Coverage: ("show", "reduce", "end_step", "report"),
    ResidualChecks: ("begin_step", "before_reduce", "after_reduce", "returned", "undo", "end_step"),
    ReplicaChecksums: ("check",),
}
_seconds: dict[str, float] = dict.fromkeys((kind.__name__ for kind in PARTS), 0.0)


def time_methods(kind: type, names: tuple[str, ...]) -> None:
    """Add up the time in methods of a class."""

    def timed(instance: Any, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(instance, *arguments, **keywords)
        finally:
            _seconds[kind.__name__] += time.perf_counter() - began

    for name in names:
        setattr(kind, name, functools.partialmethod(timed, getattr(kind, name)))


def train(rank: int, options: argparse.Namespace, store: str) -> None:
    """Train on one rank; the first one prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind, names in PARTS.items():
        time_methods(kind, names)
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = dct_plugin.attach(model, optimizer, options.section)
    x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(rank))
    settings = state.config.data_parallel
    steps: list[float] = []
    guard: dict[bool, list[float]] = {True: [], False: []}
    for step in range(1, options.steps + 1):
        began, before = time.perf_counter(), sum(_seconds.values())
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        steps.append(time.perf_counter() - began)
        guard[settings.verify.is_due(step, settings.dense_steps)].append(sum(_seconds.values()) - before)
    if rank == 0:
        total, median = sum(_seconds.values()), statistics.median(steps)
        print("| part of the guard | ms in all | share of all steps |\n|---|--:|--:|")
        for name, seconds in {**_seconds, "all": total}.items():
            print(f"| {name} | {1e3 * seconds:.1f} | {100 * seconds / sum(steps):.2f} % |")
        rest, once = statistics.median(guard[False]), statistics.median(guard[True])
        long_run = (rest + once / settings.verify.every) / median
        print(
            f"{len(steps)} steps of {1e3 * median:.1f} ms (medians); {len(guard[True])} comparisons of "
            f"{1e3 * once:.1f} ms, {1e3 * rest:.3f} ms in other steps; with a comparison in "
            f"{settings.verify.every} steps {100 * long_run:.3f} % of a step"
        )
    state.detach()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="samples per rank")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--section", type=json.loads, help="of dct, JSON")
    options = parser.parse_args()
    options.section = options.section or {
        "data_parallel": {"sparsity": 0.99, "feedback": "step_ahead", "warmup_steps": 10, "min_numel": 1000}
    }
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (options, str(Path(folder) / "store")), 2)


if __name__ == "__main__":
    main()
