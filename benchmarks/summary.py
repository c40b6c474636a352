"""The summary of a job against the counters of its network interfaces.

Every rank gets a network namespace of its own (Linux, root or user namespaces). Each workload runs some steps
without and with the plugin. The interfaces say what crossed; the metrics say what they hold for sent, and for
sent without the plugin.

    python benchmarks/summary.py       # in the root of the repository
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from dct_plugin.recommender.links.namespaces import Links
from dct_plugin.recommender.links.team import NETWORKS, Block, Team

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.links.recommender import configurations


class Case(NamedTuple):
    """The ranks of one or more workloads, their variants, and the methods to compare in each.

    Attributes:
        target: ``module:class`` of the workload.
        options: Of the teams that it takes.
        methods: Of each variant: the one without the plugin, and those with it.
    """

    target: str
    options: list[dict[str, Any]]
    methods: dict[str, list[str]]


def cases(ranks: int) -> dict[str, Case]:
    """Return what is measured, by name."""
    bench = "benchmarks.links"
    dct, updates, hybrid = "DCT 0.99", "DCT 0.99, updates 0.97", {"max_rows": None, "data": None}
    return {
        "ddp": Case(f"{bench}.ddp:DDP", [{"parameters": 1}], {"1M parameters": ["fp32", f"{dct} bf16"]}),
        "deepspeed": Case(
            f"{bench}.zero:Zero",
            [{"parameters": 1}],
            {
                f"ZeRO-{stage}": ["dense fp32", dct, *([updates] if stage in (1, 2) else [])]
                for stage in range(4)
            },
        ),
        "dlrm": Case(
            "dct_plugin.recommender.on_links:Trainings",
            [{**hybrid, "format": "diabetes", "configs": configurations(ranks, [1024])}],
            {"batch 1024": ["dense", "lossless", "hybrid"]},
        ),
        "megatron": Case(
            "benchmarks.megatron_gpt:Megatron",
            [{"dct": False}, {"dct": True}],
            {
                variant: ["dense", "DCT"]
                for variant in (
                    "PP 2",
                    "DP 2",
                    "DP 2, distributed optimizer",
                    "DP 2, distributed optimizer, updates",
                )
            },
        ),
    }


def measure(name: str, ranks: int, steps: int, folder: Path, **more: Any) -> list[dict[str, Any]]:
    """Return a row for each method with the plugin: bytes per step of all ranks together. ``more`` are
    options of the workload.

    Raises:
        LinksError: The namespaces cannot be made here.
    """
    case = cases(ranks)[name]
    found: dict[tuple[str, str], tuple[Block, Block]] = {}
    with Links(ranks, NETWORKS) as links:
        for number, options in enumerate(case.options):
            options = {**options, **more}
            with Team(
                case.target, ranks, links, options=options, folder=folder, name=f"{name}-{number}"
            ) as team:
                for variant, methods in case.methods.items():
                    warmups = team.open(variant)
                    for method in [method for method in methods if method in warmups]:
                        before = team.block(method, warmups[method] + 1)
                        found[variant, method] = before, team.block(method, steps)
                    team.close()
    rows = []
    for variant, (baseline, *methods) in case.methods.items():
        for method in methods:
            before, after = found[variant, method]
            counted = {
                key: ranks * (after.totals[key] - before.totals[key]) / steps
                for key in ("dense_bytes", "sent_bytes")
            }
            row = {"host": name, "variant": variant, "ranks": ranks, "method": method}
            # What TCP sends again, on a busy machine, no job knows of.
            dense, ours = (each.sent - each.resent for each in (found[variant, baseline][1], after))
            wire = {"dense_wire": dense, "sent_wire": ours}
            rows.append({**row, **counted, **wire})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(cases(2))
    parser.add_argument("--hosts", nargs="*", choices=names, default=names)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| | ranks | without dct: wire | summary | | with dct: wire | summary | | fewer: wire | summary |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for ranks in args.ranks:
        for host in args.hosts:
            with tempfile.TemporaryDirectory() as folder:
                made = measure(host, ranks, args.steps, Path(folder))
            for row in made:
                print(_line(row), flush=True)
            rows += made
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def _line(row: dict[str, Any]) -> str:
    dense, dense_wire, sent, sent_wire = (
        row[key] / 1e3 for key in ("dense_bytes", "dense_wire", "sent_bytes", "sent_wire")
    )
    return (
        f"| {row['host']} {row['variant']}, {row['method']} | {row['ranks']} "
        f"| {dense_wire:.1f} kB | {dense:.1f} kB | {dense / dense_wire - 1:+.1%} "
        f"| {sent_wire:.1f} kB | {sent:.1f} kB | {sent / sent_wire - 1:+.1%} "
        f"| {dense_wire / sent_wire:.1f}x | {dense / sent:.1f}x |"
    )


if __name__ == "__main__":
    main()
