"""Measure what exact updates of weights cost a step without a limit on the link, from the first step on.

Two ranks train a perceptron of 5M parameters under DeepSpeed's ZeRO-1 in bf16, from the same weights and in
turns: with DeepSpeed's gathers, and with exact updates, gradients dense in both. *Processor*: time of the
thread that trains; *wall-clock*: needs two idle cores. *Bytes*: those of the updates, as a share of gathers.
Figures are those of the steps behind the first trial of gathers and exact updates; what a trial costs is said
beside them, spread over the steps to the next one. ``--always`` keeps exact updates, whatever they cost.

    torchrun --nproc-per-node 2 benchmarks/studies/exact_cost.py --lr 1e-3
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from dct_plugin.data_parallel import exact_updates

SIZE = 512
#: Steps of a trial.
TRIAL = exact_updates.WHOLE + exact_updates.EXACT


def engine_of(lr: float, parameters: str | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(SIZE, 2048), nn.ReLU(), nn.Linear(2048, 1536), nn.ReLU(), nn.Linear(1536, SIZE))
    )
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "dct": {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "parameters": parameters}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def timed_step(engine: Any, x: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Return the milliseconds of a step: processor, and wall-clock."""
    dist.barrier()
    processor, wall = time.thread_time(), time.perf_counter()
    engine.backward((engine(x).float() - wanted).square().mean())
    engine.step()
    return 1e3 * (time.thread_time() - processor), 1e3 * (time.perf_counter() - wall)


def updates_of(engine: Any) -> tuple[float, float]:
    """Return the bytes of exact updates so far, and those of their gathers."""
    found = engine.dct.metrics.summary().classes.get("parameter_exact")
    return (0.0, 0.0) if found is None else (found.sent_bytes, found.dense_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--always", action="store_true", help="keep exact updates, whatever they cost")
    args = parser.parse_args()
    if args.always:
        exact_updates.clock = lambda: 0.0
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engines = {"gathers": engine_of(args.lr, None), "exact": engine_of(args.lr, "exact")}
    generator = torch.Generator().manual_seed(dist.get_rank())
    task = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(9)) / 20
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    shares = list[float]()
    for _ in range(args.steps):
        x = torch.randn(64, SIZE, generator=generator)
        before = updates_of(engines["exact"])
        for name, engine in engines.items():
            steps[name].append(timed_step(engine, x.bfloat16(), torch.tanh(x @ task)))
        sent, dense = (b - a for a, b in zip(before, updates_of(engines["exact"]), strict=True))
        shares.append(sent / dense if dense else 1.0)
    if dist.get_rank():
        return
    print("| | processor, ms | wall-clock, ms |\n|---|--:|--:|")
    for name, times in steps.items():
        processor, wall = (statistics.fmean(column) for column in zip(*times[TRIAL:], strict=True))
        print(f"| {name} | {processor:.1f} | {wall:.1f} |")
    pairs = [(dense[0], exact[0]) for dense, exact in zip(*steps.values(), strict=True)]
    dense, exact = (sum(column) for column in zip(*pairs[TRIAL:], strict=True))
    trial = sum(exact - dense for dense, exact in pairs[exact_updates.WHOLE + 1 : TRIAL])
    trial *= exact_updates.EXACT / (exact_updates.EXACT - 1)  # the first one allocates memory
    spread = trial / (exact_updates.PERIOD + TRIAL) / statistics.fmean(dense for dense, _ in pairs[TRIAL:])
    print(f"processor time, of gathers: {exact / dense:.3f}, with trials {exact / dense + spread:.4f}")
    print("bytes, of a gather, by step:", " ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
