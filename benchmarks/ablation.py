"""Measure what each speed-up on a CPU is worth: steps of torch DDP with all of them, and with one off.

    python -m benchmarks.ablation --out out/ablation

Two and four ranks, and two nodes of two, with 10.65 and 25 million parameters, on links of 1 Gbit/s and
without a limit. All methods of a cell take turns within one run, in an order that is drawn anew for every
round. It needs what ``python -m benchmarks.links`` needs.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel.nodes import ranks as node_ranks
from dct_plugin.data_parallel.reducer import Overlap
from dct_plugin.integrations.ddp import DCTState, dct_hook
from dct_plugin.integrations.ddp import state as ddp_state
from dct_plugin.metrics import Metrics
from dct_plugin.recommender.links.interleave import Figures, interleaved, warmed
from dct_plugin.recommender.links.method import Method
from dct_plugin.recommender.links.namespaces import Links
from dct_plugin.recommender.links.team import NETWORKS, Team

from .links.ddp import Trained, ideal
from .links.perceptron import batch, perceptron, width_of

#: What is switched off, by name: a context in which a state is made and trains.
Switch = Callable[[], Any]
FLAT: dict[str, Switch] = {
    "own TCP connections": lambda: mock.patch.dict(os.environ, {"DCT_TRANSPORT": "gloo"}),
    "overlap": lambda: mock.patch.object(ddp_state, "Overlap", partial(Overlap, wanted=False)),
}
IN_NODES: dict[str, Switch] = {
    "shared memory": lambda: mock.patch.object(node_ranks, "open_shared_memory", return_value=None),
}


class Ablation:
    """The workload: ``parameters`` (millions), and ``per_node`` ranks that are summed first."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._width, self._per_node = width_of(options["parameters"]), int(options["per_node"])

    def open(self, variant: str) -> list[Method]:
        trained = Trained(perceptron(self._width), batch(self._width), 25)
        fp32 = partial(default_hooks.allreduce_hook, dist.group.WORLD)
        switches = FLAT if self._per_node == 1 else IN_NODES
        return [
            Method("nothing sent", trained.step, around=partial(trained.apart, ideal)),
            Method("fp32", trained.step, around=partial(trained.using, fp32)),
            _method("all", trained, self._per_node),
            *(_method(name, trained, self._per_node, off) for name, off in switches.items()),
        ]

    def close(self) -> None:
        pass


def _method(name: str, trained: Trained, per_node: int, off: Switch = ExitStack) -> Method:
    config = DCTConfig.parse({"data_parallel": {"sparsity": 0.99, "nodes": per_node}})
    state = DCTState(config)
    state.metrics = Metrics(config.metrics, rank=dist.get_rank(), world_size=dist.get_world_size())

    @contextmanager
    def around() -> Iterator[None]:
        with off(), trained.using(partial(dct_hook, state)):
            yield

    return Method(name, trained.step, around=around, metrics=[state.metrics], warmup=10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/ablation"))
    parser.add_argument("--seconds", type=float, default=30.0, help="Seconds per cell.")
    parser.add_argument("--parameters", type=float, nargs="+", default=[10.65, 25.0])
    parser.add_argument("--ranks", nargs="+", default=["2", "4", "2x2"])
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit"])
    options = parser.parse_args()
    for ranks in options.ranks:
        nodes, _, inside = ranks.partition("x")
        per_node = int(inside or 1)
        world_size = int(nodes) * per_node
        for parameters in options.parameters:
            with (
                Links(int(nodes), NETWORKS) as links,
                Team(
                    "benchmarks.ablation:Ablation",
                    world_size,
                    links,
                    options={"parameters": parameters, "per_node": per_node},
                    folder=options.out,
                    name=f"{ranks}-{parameters:g}",
                ) as team,
            ):
                methods = team.open("")
                warmed(team.block, methods)
                for rate in options.rates:
                    links.limit(None if rate == "unlimited" else rate)
                    cell = {"ranks": ranks, "parameters": parameters, "rate": rate}
                    _print(cell, interleaved(team.block, list(methods), options.seconds), options.out)


def _print(cell: dict[str, Any], found: list[Figures], folder: Path) -> None:
    whole = next(each for each in found if each.name == "all")
    print(f"\n{cell['ranks']} ranks, {cell['parameters']:g}M parameters, {cell['rate']}")
    for each in found:
        ratio = each.median / whole.median
        low, high = each.quartiles
        row = {**cell, "off": each.name, "ms": each.median, "quartiles": [low, high], "sent": each.sent}
        spread = f"{each.median:8.1f} ms ({low:.1f} to {high:.1f})"
        print(f"  {each.name:24} {spread}  {ratio:5.2f}x  {each.sent / 1e6:8.2f} MB", flush=True)
        with (folder / "ablation.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
