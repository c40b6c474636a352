"""Measure what a rank pays by the number of ranks: processor time, bytes and messages of one step.

All ranks are threads of one process (``studies/one_process.py``) with the library's reducer. Only the
transport differs, and one thread runs at a time. So the processor time of a thread is that of a rank,
whatever the number of cores, and no time on a link is in it. Gradients are noise of one distribution, another
for every rank and step. Figures are of rank 0, medians over the steps after the first ones; with nodes, bytes
are those between nodes.

    python benchmarks/scale.py
    python benchmarks/scale.py --parameters 10 --ranks 2 8 64 --json scale.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent / "studies"))

import one_process
from many_streams import nodes_of

from dct_plugin.config import DataParallelConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.metrics import Metrics
from dct_plugin.output import Table

#: Ranks of a node in the rows with nodes.
PER_NODE = 8
#: Tensors of the model, and steps before the measured ones: thresholds are measured anew in the first.
TENSORS, BEFORE = 8, 9


class Cost(NamedTuple):
    """The cost of a step for one rank."""

    ranks: int
    way: str
    processor_ms: float
    sent: float
    """Bytes, headers included."""
    messages: float


def rank_costs(rank: int, *, count: int, way: str, parameters: int, steps: int, sparsity: float) -> list[Any]:
    """Return the processor seconds, bytes and messages of each step of one rank; a collective."""
    exchange = "two_phase" if way != "direct" else "direct"
    section = {"sparsity": sparsity, "feedback": "local", "exchange": exchange}
    nodes = nodes_of(rank, count, PER_NODE) if way == "nodes" else None
    metrics = Metrics(MetricsConfig(every=10**9), rank=rank, world_size=count)
    reducer = GradientReducer(DataParallelConfig.of(section), nodes, metrics=metrics)
    if reducer.node is not None:
        with one_process.apart():
            _ = reducer.exchange.peers.group, reducer.node.exchange.peers.group
    generator = torch.Generator().manual_seed(rank)
    gradient, found = torch.empty(parameters), []
    entries = [(f"layer {number}", part) for number, part in enumerate(gradient.chunk(TENSORS))]
    for _ in range(BEFORE + steps):
        gradient.normal_(generator=generator)
        before = sent_bytes(reducer), one_process.MemoryTransport.posted[rank]
        began = time.thread_time()
        reducer.all_reduce(entries, scale=1.0 / count)
        reducer.end_step()
        spent = time.thread_time() - began
        sent, messages = sent_bytes(reducer), one_process.MemoryTransport.posted[rank]
        found.append((spent, sent - before[0], messages - before[1]))
    return found[BEFORE:]


def sent_bytes(reducer: GradientReducer) -> int:
    """Return the bytes that a rank has sent so far; with nodes, between nodes."""
    return reducer.exchange.sent_bytes


def measure(count: int, way: str, parameters: int, steps: int, sparsity: float) -> Cost:
    """Return the cost of rank 0."""
    run = partial(rank_costs, count=count, way=way, parameters=parameters, steps=steps, sparsity=sparsity)
    found = one_process.run(count, run)[0]
    spent, sent, messages = (statistics.median(column) for column in zip(*found, strict=True))
    return Cost(count, way, 1e3 * spent, sent, messages)


def table(costs: list[Cost]) -> Table:
    """Return the costs, and their ratios to the first row of the same way; with nodes, of the first row."""
    first = {cost.way: cost for cost in reversed(costs)} | {"nodes": costs[0]}
    rows = [
        [
            f"{cost.ranks}, {cost.way.replace('_', ' ')}",
            f"{cost.processor_ms:.1f}",
            f"{cost.processor_ms / first[cost.way].processor_ms:.2f}x",
            f"{cost.sent / 1e3:.1f} kB",
            f"{cost.sent / first[cost.way].sent:.2f}x",
            f"{cost.messages:.0f}",
        ]
        for cost in costs
    ]
    header = ["ranks", "processor, ms", "ratio", "sent", "ratio", "messages"]
    return Table("What a rank pays in a step", header, rows)


def main() -> None:
    """Measure all rows, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=2.0, help="millions of entries")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", default=["direct", "two_phase", "nodes"])
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument("--steps", type=int, default=7, help="measured ones")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parameters, costs = round(1e6 * args.parameters), list[Cost]()
    for way in args.ways:
        for count in args.ranks:
            if way != "nodes" or count > PER_NODE:
                costs.append(measure(count, way, parameters, args.steps, args.sparsity))
                print(costs[-1], file=sys.stderr, flush=True)
    print("\n".join(table(costs).markdown()))
    if args.json is not None:
        args.json.write_text(json.dumps([cost._asdict() for cost in costs], indent=1))


if __name__ == "__main__":
    main()
