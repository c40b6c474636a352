"""Measure what a rank pays by the number of ranks: processor time, bytes, memory and messages of one step.

    python -m benchmarks.scale
    python -m benchmarks.scale --parameters 10 100 --json scale.json --pictures docs/images
    python -m benchmarks.scale --optimizer adamw

One rank runs at a time: the library's reducer of rank 0, whose messages come back to it as those of all other
ranks. Parts have the same size on all ranks, so their processor time is that of a rank, and nothing waits for
a link. ``tests/links/test_scale.py`` compares bytes and messages with ranks that exchange theirs. Gradients
are noise, which is shifted in every step, and are reduced as one bucket. Figures are medians over the steps
after the first ones; with nodes, bytes and messages are those between nodes. Memory is what the rank keeps
from step to step beside gradients and weights; inside a node, the shared memory of one rank is in it. Rows
are left out where tensors have fewer parts than there are ranks: ranks differ there. With ``--optimizer
adamw`` the rank also has step-ahead: it displaces and restores the weights of a model, which has no passes.

Dense rows are one ring over all gradients: its additions and copies are measured, its bytes and messages are
computed. In bf16 the rank keeps a copy of the gradients.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "studies"))

from many_streams import nodes_of

from dct_plugin.config import DataParallelConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.plan import MIN_SHARD
from dct_plugin.data_parallel.step_units import StepUnit
from dct_plugin.metrics import Metrics, format_bytes
from dct_plugin.output import Table
from dct_plugin.recommender.plots import png
from dct_plugin.transport import transports
from dct_plugin.transport.base import HEADER, Announced, Transport

from .host_work import LoopedTransport
from .links.suite import OPTIMIZERS

#: Ranks of a node in the rows with nodes.
PER_NODE = 8
#: Tensors of the model, and steps before the measured ones: thresholds are measured anew in the first.
TENSORS, BEFORE = 8, 9
#: Parameters come in multiples of this number, so that parts of 64 ranks have the same size.
UNIT = TENSORS * 64 * 64
#: Entries by which the noise of a step is shifted to that of the next.
SHIFT = 1009
DENSE = {"dense fp32": torch.float32, "dense bf16": torch.bfloat16}
WAYS = ("direct", "two_phase", "nodes", *DENSE)


class Cost(NamedTuple):
    """The cost of a step for one rank."""

    ranks: int
    way: str
    processor_ms: float
    sent: float
    """Bytes, headers included."""
    messages: float
    memory: float = 0.0
    """Bytes that are kept from step to step."""
    parameters: int = 0

    @property
    def name(self) -> str:
        return name_of(self.way)


def name_of(way: str) -> str:
    """Return a way in words."""
    return f"nodes of {PER_NODE}" if way == "nodes" else way.replace("_", " ")


class CountedTransport(LoopedTransport):
    """Counts the bytes and messages that do not stay on this rank."""

    posted = 0

    def post(self, announced: Announced) -> None:
        self._count(announced.messages or [], HEADER.size)

    def transfer(self, messages: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().transfer(messages, buffers)
        self._count(messages, 0)

    def _count(self, messages: Sequence[Tensor], header: int) -> None:
        others = [message.numel() for to, message in enumerate(messages) if to != self.rank]
        self.sent_bytes += header * (self.world_size - 1) + sum(others)
        CountedTransport.posted += sum(nbytes > 0 for nbytes in others)


@contextmanager
def looped(count: int) -> Iterator[None]:
    """Make this process rank 0 of so many ranks, without any other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def open_transport(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return CountedTransport(dist.get_rank(group), ranks)

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        with patch.object(transports, "open_transport", open_transport):
            yield
    finally:
        dist.destroy_process_group()


def held_bytes(*, shared: bool = True) -> int:
    """Return the bytes of all tensors that live; with ``shared``, also those that processes share."""
    gc.collect()
    places: list[tuple[int, int]] = []
    files: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            places.append((start, stop))
            files[line.split()[4]] = stop - start
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    own = [size for at, size in storages.items() if not any(start <= at < stop for start, stop in places)]
    return sum(own) + sum(files.values()) * shared


def rank_costs(
    rank: int,
    *,
    count: int,
    way: str,
    parameters: int,
    steps: int,
    sparsity: float,
    is_adamw: bool = False,
    posted: Callable[[], int] = lambda: CountedTransport.posted,
    opened: Callable[[GradientReducer], None] = lambda reducer: None,
) -> list[Any]:
    """Return the processor seconds, bytes, messages and kept bytes of each step of one rank; a collective.

    Args:
        rank, count: Position of the rank, and ranks.
        way: One of the first three of :data:`WAYS`.
        parameters, steps, sparsity: Entries; measured steps; share of the entries that is not sent.
        is_adamw: Whether the rank has step-ahead.
        posted: Return the messages that the rank has sent so far.
        opened: Called with the reducer before its first step.
    """
    exchange = "two_phase" if way != "direct" else "direct"
    feedback = "step_ahead" if is_adamw else "local"
    section = {"sparsity": sparsity, "feedback": feedback, "exchange": exchange}
    noise = torch.randn(parameters + SHIFT * (BEFORE + steps), generator=torch.Generator().manual_seed(rank))
    gradient, found = torch.empty(parameters), []
    entries = [(f"layer {number}", part) for number, part in enumerate(gradient.chunk(TENSORS))]
    weights = [(name, nn.Parameter(torch.zeros(64, part.numel() // 64))) for name, part in entries]
    held = held_bytes()
    nodes = nodes_of(rank, count, PER_NODE) if way == "nodes" else None
    metrics = Metrics(MetricsConfig(every=10**9), rank=rank, world_size=count)
    reducer = GradientReducer(DataParallelConfig.of(section), nodes, metrics=metrics)
    opened(reducer)
    ahead = None
    if is_adamw:
        unit = StepUnit(1e-3, preconditioned=True, decay=0.999)
        ahead = reducer.add_ons.step_ahead.prepare(weights, lambda _: unit)
    for step in range(BEFORE + steps):
        gradient.copy_(noise[SHIFT * step :][:parameters])
        before = reducer.group.exchange.counters()[0], posted()
        began = time.thread_time()
        if ahead is not None:
            ahead.displace()
        reducer.all_reduce(entries, scale=1.0 / count)
        if ahead is not None:
            ahead.restore()
        reducer.end_step()
        spent = time.thread_time() - began
        found.append((spent, reducer.group.exchange.counters()[0] - before[0], posted() - before[1]))
    kept = held_bytes() - held
    return [(*each, kept) for each in found[BEFORE:]]


def ring_costs(count: int, dtype: torch.dtype, parameters: int, steps: int) -> list[Any]:
    """Return what :func:`rank_costs` returns, for a dense ring."""
    gradient, found, turns = torch.randn(parameters), list[Any](), 2 * (count - 1)
    held = held_bytes()
    summed = gradient if dtype == gradient.dtype else torch.empty(parameters, dtype=dtype)
    parts = summed.chunk(count)
    received = torch.zeros_like(parts[0])
    for _ in range(1 + steps):
        began = time.thread_time()
        if summed is not gradient:
            summed.copy_(gradient)
        for part in parts[1:]:
            part.add_(received)
        for part in parts[1:]:
            part.copy_(received)
        if summed is not gradient:
            gradient.copy_(summed)
        gradient.mul_(1.0 / count)
        found.append((time.thread_time() - began, turns * received.nbytes, turns))
    kept = held_bytes() - held
    return [(*each, kept) for each in found[1:]]


def is_measurable(count: int, way: str, parameters: int) -> bool:
    """Return whether one rank stands for all: there are several nodes, and each owner has a part of each
    tensor.
    """
    if way == "nodes" and count <= PER_NODE:
        return False
    owners = {"two_phase": count, "nodes": count // PER_NODE}.get(way, 0)
    return parameters // TENSORS // MIN_SHARD >= owners


def measure(
    count: int, way: str, parameters: int, steps: int, sparsity: float, *, is_adamw: bool = False
) -> Cost:
    """Return the cost of rank 0."""
    if way in DENSE:
        found = ring_costs(count, DENSE[way], parameters, steps)
    else:
        figures = {"parameters": parameters, "steps": steps, "sparsity": sparsity}
        with looped(count):
            found = rank_costs(0, count=count, way=way, is_adamw=is_adamw, **figures)
    spent, sent, messages, kept = (statistics.median(column) for column in zip(*found, strict=True))
    return Cost(count, way, 1e3 * spent, sent, messages, kept, parameters)


def table(costs: Sequence[Cost]) -> Table:
    """Return the costs, and their ratios to the first row of the same way; with nodes, of the first row."""
    first = {cost.way: cost for cost in reversed(costs)} | {"nodes": costs[0]}
    rows = [
        [
            f"{cost.ranks}, {cost.name}",
            f"{cost.processor_ms:.1f}",
            f"{cost.processor_ms / first[cost.way].processor_ms:.2f}x",
            format_bytes(cost.sent),
            f"{cost.sent / first[cost.way].sent:.2f}x",
            format_bytes(cost.memory),
            f"{cost.messages:.0f}",
        ]
        for cost in costs
    ]
    header = ["ranks", "processor, ms", "ratio", "sent", "ratio", "memory", "messages"]
    return Table(f"What a rank pays in a step, {millions(costs[0].parameters)} parameters", header, rows)


def millions(parameters: float) -> str:
    """Return a number of parameters in words."""
    return f"{round(parameters / 1e6)}M"


#: Marker, color and line of each way: those of DCT are blue, dense ones are grey.
STYLES = {
    "direct": ("o", "C0", "-"),
    "two_phase": ("s", "C0", "--"),
    "nodes": ("^", "C0", ":"),
    "dense fp32": ("o", "0.5", "-"),
    "dense bf16": ("s", "0.5", "--"),
}


def draw_lines(axis: Any, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw points (x, y) of each way on logarithmic axes."""
    for way, points in lines.items():
        marker, color, line = STYLES[way]
        axis.plot(*zip(*points, strict=True), marker=marker, color=color, linestyle=line, label=name_of(way))
    places = sorted({x for points in lines.values() for x, _ in points})
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axis.grid(axis="y", color="0.9")


def draw(costs: Sequence[Cost], path: Path) -> None:
    """Draw the costs over the number of ranks as a PNG, a panel for each figure."""
    panels: dict[str, Callable[[Cost], float]] = {
        "processor time, ms": lambda cost: cost.processor_ms,
        "sent, MB": lambda cost: cost.sent / 1e6,
        "memory that is kept, MB": lambda cost: cost.memory / 1e6,
        "messages": lambda cost: cost.messages,
    }
    with png(path, [2.3] * len(panels)) as (figure, axes):
        for (title, value), axis in zip(panels.items(), axes, strict=True):
            ways = dict.fromkeys(cost.way for cost in costs)
            shown = {way: [(c.ranks, value(c)) for c in costs if c.way == way and value(c)] for way in ways}
            draw_lines(axis, {way: points for way, points in shown.items() if points})
            axis.set_title(title)
        axes[-1].set_xlabel(f"ranks, {millions(costs[0].parameters)} parameters")
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=3)


def main() -> None:
    """Measure all rows; print and draw them, a table and a picture for each number of parameters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, nargs="+", default=[10.0], help="millions of entries")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--steps", type=int, default=7, help="measured ones")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = list[Cost]()
    for size in args.parameters:
        parameters, found = UNIT * round(1e6 * size / UNIT), list[Cost]()
        for way in args.ways:
            for count in args.ranks:
                if is_measurable(count, way, parameters):
                    figures = parameters, args.steps, args.sparsity
                    found.append(measure(count, way, *figures, is_adamw=args.optimizer == "adamw"))
                    print(found[-1], file=sys.stderr, flush=True)
        print("\n".join(table(found).markdown()), end="\n\n")
        if args.pictures is not None:
            draw(found, args.pictures / f"scale-{millions(parameters)}.png")
        costs += found
    if args.json is not None:
        args.json.write_text(json.dumps([cost._asdict() for cost in costs], indent=1))


if __name__ == "__main__":
    main()
