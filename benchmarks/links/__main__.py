"""Step times on links of limited rate, all methods of a workload in turns within one run.

    python -m benchmarks.links --workload ddp --ranks 2

Run it in the root of the repository. It needs ``dct-plugin[demo]``, iproute2, and root or a system
where users may make namespaces; without, only unlimited links are measured, over the loopback interface.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from dct_plugin.console import print_error
from dct_plugin.errors import DCTError
from dct_plugin.output import write
from dct_plugin.rates import check_rates, rate_name
from dct_plugin.recommender.commands.options import takes_options
from dct_plugin.recommender.provenance import provenance

from .suite import OPTIMIZERS, UNLIMITED, WORKLOADS, Cell, Plan, measure

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
COMMAND = shlex.join(["python", "-m", "benchmarks.links", *sys.argv[1:]])

RATES = (UNLIMITED, "10gbit", "1gbit", "100mbit")
RANKS = (2, 4)
MINUTES = 10.0
BATCH_SIZES, STAGES = (256, 2048), (0, 1, 2)
#: Workloads that have methods for nodes of several ranks.
SPREAD = ("ddp", "deepspeed", "fsdp", "fsdp-mesh")
QUICK_MINUTES, QUICK_RATES, QUICK_RANKS = 1.5, ("1gbit",), (2,)
QUICK_BATCH_SIZES, QUICK_STAGES = (2048,), (0,)


@dataclass(frozen=True)
class _Options:
    """The options of the command."""

    workload: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(WORKLOADS)}; may be repeated (all if not given).")
    ] = None
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Local processes; may be repeated (2 and 4).")
    ] = None
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Rate of the links, as tc writes it, or unlimited; may be repeated ({', '.join(RATES)})."
        ),
    ] = None
    parameters: Annotated[
        float, typer.Option(min=0.01, help="Millions of parameters in the model of all but dlrm.")
    ] = 10.65
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Batch of dlrm, all ranks together; may be repeated (256, 2048)."),
    ] = None
    zero_stage: Annotated[
        list[int] | None, typer.Option(min=0, max=3, help="Stage of deepspeed; may be repeated (0, 1, 2).")
    ] = None
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="sgd or adamw, of ddp, deepspeed and fsdp; may be repeated (both if not given)."),
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="For dlrm: a file instead of Diabetes 130-US, which ships with this.")
    ] = None
    format: Annotated[str | None, typer.Option(help="Format of the data: criteo or diabetes.")] = None
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help=f"Minutes for everything, about ({MINUTES:g}; quick: {QUICK_MINUTES:g})."),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for JSON, tables, plot and logs.")] = Path("out/links")
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Nodes that the ranks are spread over: only links between nodes are limited. Each rank is a "
            "node if not given. For ddp, deepspeed and fsdp.",
        ),
    ] = None
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method beside the baseline, as the tables name it; may be repeated (all if not given)."
        ),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="2 ranks, 1 Gbit/s, ZeRO-0, batch 2048; for a first look.")
    ] = False


@app.command()
@takes_options(_Options)
def links(options: _Options) -> None:
    """Step times on links of limited rate, all methods of a workload in turns within one run."""
    quick = options.quick
    names = _chosen(options.workload or (None if options.nodes is None else SPREAD), WORKLOADS, "--workload")
    counts = list(dict.fromkeys(options.ranks or (QUICK_RANKS if quick else RANKS)))
    format = options.format
    if "dlrm" in names:
        from dct_plugin.recommender.commands.shared import chosen_format
        from dct_plugin.recommender.data import FORMATS

        format = chosen_format(format, options.data, FORMATS)
    if options.nodes is not None:
        _check_nodes(options.nodes, counts, names)
    plan = Plan(
        names,
        counts,
        check_rates(options.rate or (QUICK_RATES if quick else RATES), also=UNLIMITED, option="--rate"),
        60 * (options.minutes or (QUICK_MINUTES if quick else MINUTES)),
        options.out,
        parameters=options.parameters,
        format=format or "diabetes",
        data=None if options.data is None else str(options.data.resolve()),
        batch_sizes=_batch_sizes(options.batch_size or (QUICK_BATCH_SIZES if quick else BATCH_SIZES), counts),
        stages=list(dict.fromkeys(options.zero_stage or (QUICK_STAGES if quick else STAGES))),
        nodes=options.nodes,
        methods=options.method or (),
        optimizers=_chosen(options.optimizer, OPTIMIZERS, "--optimizer"),
    )
    _measure(plan)


def _check_nodes(nodes: int, counts: Sequence[int], workloads: Sequence[str]) -> None:
    if wrong := [count for count in counts if count % nodes]:
        raise typer.BadParameter(f"{nodes}: {wrong[0]} ranks are not a multiple of it", param_hint="--nodes")
    if others := [name for name in workloads if name not in SPREAD]:
        allowed = ", ".join(SPREAD)
        raise typer.BadParameter(f"{others[0]}: only {allowed} run on nodes", param_hint="--workload")


def _chosen(given: Sequence[str] | None, allowed: Collection[str], option: str) -> list[str]:
    """Return the given names, each once; all that are allowed if none is given."""
    names = list(dict.fromkeys(given or allowed))
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{name!r}: must be one of {', '.join(allowed)}", param_hint=option)
    return names


def _batch_sizes(given: Sequence[int], counts: Sequence[int]) -> list[int]:
    sizes = list(dict.fromkeys(given))
    for size in sizes:
        if wrong := [count for count in counts if size % count]:
            raise typer.BadParameter(
                f"{size}: must be a multiple of {wrong[0]} ranks", param_hint="--batch-size"
            )
    return sizes


def _measure(plan: Plan) -> None:
    """Measure the plan, print its tables, and write tables, figures and plot.

    Raises:
        typer.Exit: A workload failed.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from .report import as_dict, draw, tables, unmeasured

    console, started, out = Console(), time.monotonic(), plan.out

    def follow(cell: Cell) -> None:
        what = f"{cell.workload}, {cell.variant}, {cell.ranks} ranks, {rate_name(cell.rate)}"
        how = "skipped" if cell.skipped else ", ".join(f"{f.name} {f.median:.0f}" for f in cell.figures)
        line = Text(f"{time.monotonic() - started:5.0f} s  {what}: {how}", style="dim")
        console.print(line, soft_wrap=True)

    cells = measure(plan, follow)
    for table in tables(cells, ratios=False):
        console.print(Padding(table.rich(), (1, 0, 0, 0)))
    notes = unmeasured(cells)
    for note in notes:
        console.print(Text(f"\n{note}"))
    lines = [f"    {COMMAND}", "", f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores"]
    for table in tables(cells):
        lines += ["", *table.markdown()]
    for note in notes:
        lines += ["", note]
    write(out / "links.md", "\n".join(lines) + "\n")
    figures = {**provenance(started), "command": COMMAND, "cells": as_dict(cells)}
    write(out / "links.json", figures)
    draw(cells, out / "links.png")
    seconds = time.monotonic() - started
    console.print(Text(f"\nWrote links.json, links.md and links.png to {out} in {seconds:.0f} s."))
    if any(cell.failed for cell in cells):
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        app()
    except DCTError as error:
        print_error(error)
        sys.exit(1)
