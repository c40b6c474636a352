"""Processor time of a step under torch DDP, by thread: what a method costs where cores are busy anyway.

Ranks on this machine train the model of ``python -m benchmarks.links --workload ddp`` in turns of five steps.
Unlike the time of a step, processor time hardly depends on what else the machine does. Linux only.

    python benchmarks/ddp_cpu.py
    python benchmarks/ddp_cpu.py --optimizer adamw --layers 128      # 258 tensors in place of 10
    python benchmarks/ddp_cpu.py --ranks 4 --nodes 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from dct_plugin.recommender.links.interleave import orders

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.links.ddp import ADAMW_SECTIONS, Trained, methods_of, with_adamw
from benchmarks.links.perceptron import LAYERS, batch, perceptron, width_of
from benchmarks.links.suite import OPTIMIZERS

STEPS = 5
#: Turns before the measured ones: thresholds and residuals settle.
SETTLING = 3
METHODS = ("ideal", "fp32", "bf16", "DCT 0.99 bf16", "DCT 0.99 int8")
TRAINING, TRANSPORT, REDUCING = "training", "transport", "reducing"


def milliseconds() -> Counter[str]:
    """Processor time of this process's threads so far, by what they do."""
    total: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        name, spent = (task / "comm").read_text(), int((task / "schedstat").read_text().split()[0])
        kind = TRANSPORT if "gloo" in name else TRAINING if task.name == str(os.getpid()) else REDUCING
        total[kind] += spent / 1e6
    return total


def run(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{arguments.port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=arguments.ranks)
    layers, is_adamw = arguments.layers, arguments.optimizer == "adamw"
    width = width_of(arguments.parameters, layers)
    shared, unused = (Trained(perceptron(w, layers), batch(w), 25, is_adamw=is_adamw) for w in (width, 8))
    settings = () if is_adamw else ((0.99, "bf16"), (0.99, "int8"))
    per_node = arguments.ranks // (arguments.nodes or arguments.ranks)
    made = methods_of(shared, unused, settings, per_node)
    methods = {m.name: m for m in made if m.name.removesuffix(", nodes") in METHODS}
    if is_adamw:
        methods |= {name: with_adamw(width, name, each, layers) for name, each in ADAMW_SECTIONS.items()}
    found: dict[str, list[Counter[str]]] = {name: [] for name in methods}
    for turn, order in zip(range(SETTLING + arguments.turns), orders(list(methods)), strict=False):
        for name in order:
            with methods[name].around():
                dist.barrier()
                before = milliseconds()
                for _ in range(STEPS):
                    methods[name].step()
                dist.barrier()
                after = milliseconds()
            if turn >= SETTLING:
                found[name].append(Counter({kind: (after[kind] - before[kind]) / STEPS for kind in after}))
    if rank == 0:
        table = Table("", TRAINING, REDUCING, TRANSPORT, "all", "x ideal")
        alone = statistics.median(turn.total() for turn in found["ideal"])
        for name, turns in found.items():
            parts = [statistics.median(t[kind] for t in turns) for kind in (TRAINING, REDUCING, TRANSPORT)]
            whole = statistics.median(turn.total() for turn in turns)
            table.add_row(name, *(f"{part:.1f}" for part in parts), f"{whole:.1f}", f"{whole / alone:.2f}x")
        console = Console()
        console.print("Processor milliseconds per step and rank, by thread, medians")
        console.print(table)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=10.65, help="millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, help="also with nodes, so many")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--layers", type=int, default=LAYERS, help="square layers that the weights make")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--port", type=int, default=29671)
    arguments = parser.parse_args()
    mp.spawn(run, args=(arguments,), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
