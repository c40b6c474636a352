"""Compute the communication of a step from what ``scale.py`` counts, and compare it with real processes.

    python -m benchmarks.scale_model --ranks 2 4 8 --out out/scale
    python -m benchmarks.scale_model --ranks 2 --parameters 1 --seconds 3 --steps 3
    python -m benchmarks.scale_model --fitted out/scale/model.json --costs scale.json --pictures docs/images

A step takes a rank's own processor time, a latency for each exchange, and a time for each message and byte
that it sends. Latency, time of a message and time of a byte are fitted to exchanges of messages alone, in
real processes in network namespaces. The same processes then reduce gradients at ``--check`` rates; the last
column says how far the model is off. The second table has links of 1, 10 and 100 Gbit/s with 0.05 and 30 ms.
``--fitted`` takes the link from an earlier run in place of real processes, and ``--costs`` those that
``scale.py`` wrote; every number of parameters has a table and a picture of its own.

Nothing overlaps in the model, and nothing in the steps that it is compared with: they are reductions without
a backward pass. It needs what ``python -m benchmarks.links`` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.output import Table
from dct_plugin.rates import bits_per_second
from dct_plugin.recommender.links.interleave import interleaved, warmed
from dct_plugin.recommender.links.method import Method
from dct_plugin.recommender.links.namespaces import Links
from dct_plugin.recommender.links.team import NETWORKS, Team
from dct_plugin.recommender.plots import png
from dct_plugin.transport import Exchange

from . import scale

#: Bytes of the messages alone, by which a message and a byte are told apart.
SMALL, LARGE = 8, 1_000_000
#: Exchanges of a step, one after the other; a dense ring has one for each message.
EXCHANGES = {"direct": 1, "two_phase": 2, "nodes": 2}
RATES, LATENCIES = ("1gbit", "10gbit", "100gbit"), (0.05, 30.0)


class Link(NamedTuple):
    """Milliseconds that messages take.

    Attributes:
        latency: Of an exchange.
        message: Of a message beside it, which a rank sends and one receives.
        megabyte: Of a million bytes in a rank's own system.
        rate: Bits per second; None: no limit.
    """

    latency: float
    message: float
    megabyte: float
    rate: float | None = None

    def step(self, exchanges: float, messages: float, sent: float, processor: float = 0.0) -> float:
        """Return the milliseconds of a step."""
        wire = 0.0 if self.rate is None else 8e3 * sent / self.rate
        own = processor + messages * self.message
        return own + exchanges * self.latency + max(wire, sent / 1e6 * self.megabyte)

    @classmethod
    def fitted(cls, times: Mapping[int, tuple[float, float]]) -> Link:
        """Return the link of ``{ranks: milliseconds of an exchange of SMALL and of LARGE messages}``."""
        ranks = sorted(times)
        first, last = ranks[0], ranks[-1]
        message = 0.0
        if last > first:
            message = max(0.0, (times[last][0] - times[first][0]) / (last - first))
        latency = max(0.0, times[first][0] - (first - 1) * message)
        bytes_sent = (LARGE - SMALL) * (first - 1)
        return cls(latency, message, 1e6 * max(0.0, times[first][1] - times[first][0]) / bytes_sent)


class Steps:
    """The workload: messages alone, and reductions; ``parameters`` and ``sparsity``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def open(self, variant: str) -> list[Method]:
        exchange, methods = Exchange(None, torch.device("cpu")), list[Method]()
        for size in (SMALL, LARGE):
            message = torch.zeros(size, dtype=torch.uint8)
            methods.append(Method(str(size), partial(exchange.all_gather, message)))
        for way in ("direct", "two_phase"):
            section = {"sparsity": self._options["sparsity"], "feedback": "local", "exchange": way}
            reducer = GradientReducer(DataParallelConfig.of(section))
            methods.append(Method(way, partial(self._step, reducer), warmup=scale.BEFORE))
        return methods

    def _step(self, reducer: GradientReducer) -> None:
        gradient = torch.randn(self._options["parameters"])
        entries = [(f"layer {n}", part) for n, part in enumerate(gradient.chunk(scale.TENSORS))]
        reducer.all_reduce(entries, scale=1.0 / dist.get_world_size())
        reducer.end_step()

    def close(self) -> None:
        pass


def measured(ranks: int, rates: Sequence[str], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the milliseconds of all methods by rate, in real processes."""
    job = {"parameters": options.parameters, "sparsity": options.sparsity}
    place = {"options": job, "folder": options.out, "name": f"{ranks}"}
    with (
        Links(ranks, NETWORKS) as links,
        Team("benchmarks.scale_model:Steps", ranks, links, **place) as team,
    ):
        methods, found = team.open(""), {}
        warmed(team.block, methods)
        for rate in ("unlimited", *rates):
            links.limit(None if rate == "unlimited" else rate)
            figures = interleaved(team.block, list(methods), options.seconds)
            found[rate] = {each.name: each.median for each in figures}
    return found


def noise_ms(parameters: int) -> float:
    """Return the milliseconds of making the gradients, which are in the steps of real processes."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        torch.randn(parameters)
        times.append(1e3 * (time.thread_time() - began))
    return sorted(times)[2]


def checked(link: Link, costs: Sequence[scale.Cost], found: Mapping[int, Any], noise: float) -> Table:
    """Return real steps beside the model's. Ranks share the cores of this machine."""
    rows, cores = [], os.cpu_count() or 1
    for cost in costs:
        for rate, times in found.get(cost.ranks, {}).items():
            limited = link._replace(rate=None if rate == "unlimited" else bits_per_second(rate))
            shared = max(1.0, cost.ranks / cores)
            own = (cost.processor_ms + noise) * shared
            model = limited.step(EXCHANGES[cost.way], cost.messages * shared, cost.sent, own)
            real = times[cost.way]
            off = f"{100 * (model / real - 1):+.0f} %"
            rows.append([f"{cost.ranks}, {cost.way}", rate, f"{real:.1f}", f"{model:.1f}", off])
    return Table("Reductions in real processes", ["ranks", "link", "real, ms", "model, ms", "off"], rows)


def steps_on(link: Link, cost: scale.Cost) -> dict[tuple[str, float], float]:
    """Return the model's milliseconds of a step by rate and latency of the link."""
    counts = EXCHANGES.get(cost.way, cost.messages), cost.messages, cost.sent, cost.processor_ms
    places = [(rate, latency) for latency in LATENCIES for rate in RATES]
    return {
        (rate, latency): link._replace(rate=bits_per_second(rate), latency=latency, megabyte=0.0).step(
            *counts
        )
        for rate, latency in places
    }


def predicted(link: Link, costs: Sequence[scale.Cost]) -> Table:
    """Return the model's steps on other links."""
    found = [(cost, steps_on(link, cost)) for cost in costs]
    rows = [[f"{cost.ranks}, {cost.name}", *(f"{ms:.1f}" for ms in steps.values())] for cost, steps in found]
    header = ["ranks", *(f"{rate}, {latency:g} ms" for rate, latency in found[0][1])]
    size = scale.millions(costs[0].parameters)
    return Table(f"Milliseconds of communication in a step of {size} parameters, by the model", header, rows)


def draw(link: Link, costs: Sequence[scale.Cost], ranks: Sequence[int], path: Path) -> None:
    """Draw the model's steps over the rate as a PNG, a panel for each number of ranks and latency."""
    panels = [(count, latency) for latency in LATENCIES for count in ranks]
    with png(path, [2.3] * len(panels)) as (figure, axes):
        for (count, latency), axis in zip(panels, axes, strict=True):
            steps = {cost.way: steps_on(link, cost) for cost in costs if cost.ranks == count}
            lines = {
                way: [(bits_per_second(rate) / 1e9, found[rate, latency]) for rate in RATES]
                for way, found in steps.items()
            }
            scale.draw_lines(axis, lines)
            axis.set_title(f"ms of communication: {count} ranks, {latency:g} ms latency")
        axes[-1].set_xlabel(f"Gbit/s, {scale.millions(costs[0].parameters)} parameters")
        figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=3)


def main() -> None:
    """Measure, fit, compare, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=10.0, help="millions of entries")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="real processes")
    parser.add_argument("--simulated", type=int, nargs="*", default=[16, 64], help="more ranks of the model")
    parser.add_argument("--check", nargs="*", default=["100mbit", "1gbit"], help="rates of real links")
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of ranks and rate")
    parser.add_argument("--out", type=Path, default=Path("out/scale"))
    parser.add_argument("--fitted", type=Path, help="model.json of an earlier run")
    parser.add_argument("--costs", type=Path, nargs="+", help="what scale.py wrote with --json")
    parser.add_argument("--pictures", type=Path, help="a folder")
    parser.add_argument("--pictured", type=int, nargs="+", default=[8, 64], help="ranks of the pictures")
    options = parser.parse_args()
    options.parameters = scale.UNIT * round(1e6 * options.parameters / scale.UNIT)
    torch.set_num_threads(1)
    if options.fitted is not None:
        earlier = json.loads(options.fitted.read_text())
        link, found = Link(**earlier["link"]), {}
    else:
        found = {ranks: measured(ranks, options.check, options) for ranks in options.ranks}
        link = Link.fitted(
            {r: (t["unlimited"][str(SMALL)], t["unlimited"][str(LARGE)]) for r, t in found.items()}
        )
    print(f"{link}\n", flush=True)
    if options.costs is not None:
        costs = [scale.Cost(**each) for path in options.costs for each in json.loads(path.read_text())]
    else:
        costs = [
            scale.measure(ranks, way, options.parameters, options.steps, options.sparsity)
            for way in scale.WAYS
            for ranks in (*options.ranks, *options.simulated)
            if scale.is_measurable(ranks, way, options.parameters)
        ]
    if found:
        flat = [cost for cost in costs if cost.way in ("direct", "two_phase")]
        print("\n".join(checked(link, flat, found, noise_ms(options.parameters)).markdown()), end="\n\n")
    for parameters in sorted({cost.parameters for cost in costs}):
        shown = [cost for cost in costs if cost.parameters == parameters]
        print("\n".join(predicted(link, shown).markdown()), end="\n\n")
        if options.pictures is not None:
            name = f"scale-model-{scale.millions(parameters)}.png"
            draw(link, shown, options.pictured, options.pictures / name)
    if found:
        results = {"link": link._asdict(), "real": found, "costs": [cost._asdict() for cost in costs]}
        (options.out / "model.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
