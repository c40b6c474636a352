"""A job that writes no settings, beside the same job without the plugin: time of a step after the start.

Two ranks train a perceptron with AdamW, once under plain DDP, once with ``attach(model, optimizer)``. Each
rank has a network namespace of its own, whose link is limited (Linux, root or user namespaces). The plugin's
line says what the ranks chose on each link.

    python -m benchmarks.nothing_written       # in the root of the repository; ten minutes
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dct_plugin
from dct_plugin.rates import rate_name
from dct_plugin.recommender.links.interleave import interleaved, warmed
from dct_plugin.recommender.links.method import Method
from dct_plugin.recommender.links.namespaces import Links
from dct_plugin.recommender.links.team import NETWORKS, Team

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.links.perceptron import batch, perceptron, width_of

DENSE, PLUGIN = "DDP", "attach(model, optimizer)"


class Jobs:
    """The workload: two models of their own, since each optimizer has states.

    Options: ``parameters`` (millions), ``section`` (of ``dct``) and ``start``, steps before those that count.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._width, self._start = width_of(options["parameters"]), int(options["start"])
        self._section = options["section"]

    def open(self, variant: str) -> list[Method]:
        return [self._method(DENSE, False), self._method(PLUGIN, True)]

    def close(self) -> None:
        pass

    def _method(self, name: str, is_attached: bool) -> Method:
        model = nn.parallel.DistributedDataParallel(perceptron(self._width), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y = batch(self._width)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        if not is_attached:
            return Method(name, step)
        state = dct_plugin.attach(model, optimizer, self._section)
        assert state is not None
        return Method(name, step, warmup=self._start)


def measured(arguments: argparse.Namespace, folder: Path, rate: str) -> str:
    """Return a row of the table for one link."""
    # The ramp of thresholds ends at step 862, and two comparisons follow it, which turns would disturb.
    start = arguments.start or (150 if rate == "unlimited" else 930)
    options = {"parameters": arguments.parameters, "start": start, "section": arguments.section}
    with (
        Links(2, NETWORKS) as links,
        Team(
            "benchmarks.nothing_written:Jobs",
            2,
            links,
            options=options,
            folder=folder,
            name=rate,
            patience=3600,
        ) as team,
    ):
        links.limit(None if rate == "unlimited" else rate)
        warmed(team.block, team.open(""))
        dense, plugin = interleaved(team.block, [DENSE, PLUGIN], arguments.seconds)
    for log in sorted(folder.glob(f"{rate}.rank0.log")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if "dct:" in line:
                print(line[line.index("dct:") :], file=sys.stderr, flush=True)
    ratio = dense.median / plugin.median
    return f"| {rate_name(rate)} | {dense.median:.1f} | {plugin.median:.1f} | {ratio:.2f} | {1 / ratio:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit"])
    parser.add_argument("--parameters", type=float, default=10.65, help="millions")
    parser.add_argument("--start", type=int, help="steps before those that count")
    parser.add_argument("--seconds", type=float, default=60.0, help="of turns, for each link")
    parser.add_argument("--section", type=json.loads, default={}, help="of dct, JSON, in place of none")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measured(arguments, Path(folder), rate) for rate in arguments.rates]
    print("| link | DDP, ms | nothing written, ms | times as fast | of DDP's time |\n|---|--:|--:|--:|--:|")
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
