"""``dct bench``: measure the plugin beside its peers."""

from __future__ import annotations

import os
import platform
import time
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from dct_plugin.integrations.dlrm.commands.shared import chosen_format, command, versions, write
from dct_plugin.links.namespaces import rate_fault, rate_name

from .suite import UNLIMITED, WORKLOADS, Cell, Plan, measure

__all__ = ["app", "links", "plan_of"]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, no_args_is_help=True)

RATES = (UNLIMITED, "10gbit", "1gbit", "100mbit")
RANKS = (2, 4)
MINUTES = 10.0
BATCH_SIZES, STAGES = (256, 2048), (0, 1, 2)
QUICK_MINUTES, QUICK_RATES, QUICK_RANKS = 1.5, ("1gbit",), (2,)
QUICK_BATCH_SIZES, QUICK_STAGES = (2048,), (0,)


@app.callback()
def bench() -> None:
    """Measure the plugin beside its peers."""


@app.command()
def links(
    workload: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(WORKLOADS)}; may be repeated (all if not given).")
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Local processes; may be repeated (2 and 4).")
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of the links, as tc writes it, or unlimited; may be repeated ({', '.join(RATES)})."
        ),
    ] = None,
    parameters: Annotated[
        float, typer.Option(min=0.01, help="Millions of them, in the model of ddp and deepspeed.")
    ] = 10.65,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Of dlrm, all ranks together; may be repeated (256, 2048)."),
    ] = None,
    zero_stage: Annotated[
        list[int] | None,
        typer.Option(min=0, max=2, help="Of deepspeed; may be repeated (0, 1, 2)."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="For dlrm: a file instead of Diabetes 130-US, which ships with this.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="Of the data: criteo, diabetes or movielens.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help=f"To take in all, about ({MINUTES:g}; quick: {QUICK_MINUTES:g})."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON, tables, plot and logs.")] = Path("out/links"),
    quick: Annotated[
        bool, typer.Option("--quick", help="2 ranks, 1 Gbit/s, ZeRO-0, batch 2048; for a first look.")
    ] = False,
) -> None:
    """Step times on links of limited rate, all methods of a workload in turns within one run.

    Needs root, or a system where users may make namespaces, and iproute2; without, only unlimited links are
    measured, over the loopback interface.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from .report import as_dict, draw, tables, unmeasured

    plan = plan_of(
        workload,
        ranks,
        rate,
        batch_size,
        zero_stage,
        parameters=parameters,
        data=data,
        format=format,
        minutes=minutes,
        out=out,
        quick=quick,
    )
    console = Console()
    started = time.monotonic()

    def follow(cell: Cell) -> None:
        what = f"{cell.workload}, {cell.variant}, {cell.ranks} ranks, {rate_name(cell.rate)}"
        how = "skipped" if cell.skipped else ", ".join(f"{f.name} {f.median:.0f}" for f in cell.figures)
        console.print(
            Text(f"{time.monotonic() - started:5.0f} s  {what}: {how}", style="dim"), soft_wrap=True
        )

    cells = measure(plan, follow)
    for table in tables(cells, ratios=False):
        console.print(Padding(table.rich(), (1, 0, 0, 0)))
    notes = unmeasured(cells)
    for note in notes:
        console.print(Text(f"\n{note}"))
    heading = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores"
    lines = [f"    {command()}", "", heading]
    for table in tables(cells):
        lines += ["", *table.markdown()]
    for note in notes:
        lines += ["", note]
    write(out / "links.md", "\n".join(lines) + "\n")
    figures = {
        "command": command(),
        "date": str(date.today()),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 1),
        "cells": as_dict(cells),
    }
    write(out / "links.json", figures)
    draw(cells, out / "links.png")
    console.print(
        Text(f"\nWrote links.json, links.md and links.png to {out} in {time.monotonic() - started:.0f} s.")
    )
    if any(cell.failed for cell in cells):
        raise typer.Exit(1)


def plan_of(
    workloads: list[str] | None,
    ranks: list[int] | None,
    rates: list[str] | None,
    batch_sizes: list[int] | None,
    stages: list[int] | None,
    *,
    parameters: float,
    data: Path | None,
    format: str | None,
    minutes: float | None,
    out: Path,
    quick: bool,
) -> Plan:
    """The options, checked.

    Raises:
        typer.BadParameter: One is not allowed.
    """
    chosen = list(dict.fromkeys(workloads or WORKLOADS))
    for name in chosen:
        if name not in WORKLOADS:
            raise typer.BadParameter(
                f"{name!r}: must be one of {', '.join(WORKLOADS)}", param_hint="--workload"
            )
    rates = list(dict.fromkeys(rates or (QUICK_RATES if quick else RATES)))
    for rate in rates:
        if rate != UNLIMITED and (fault := rate_fault(rate)):
            raise typer.BadParameter(f"{fault}, or {UNLIMITED}", param_hint="--rate")
    counts = list(dict.fromkeys(ranks or (QUICK_RANKS if quick else RANKS)))
    for name in chosen:
        allowed = WORKLOADS[name].ranks
        if workloads and allowed and not set(allowed) & set(counts):
            raise typer.BadParameter(
                f"{', '.join(map(str, counts))}: {name} has {', '.join(map(str, allowed))} ranks",
                param_hint="--ranks",
            )
    sizes = list(dict.fromkeys(batch_sizes or (QUICK_BATCH_SIZES if quick else BATCH_SIZES)))
    for size in sizes:
        if wrong := [count for count in counts if size % count]:
            raise typer.BadParameter(
                f"{size}: must be a multiple of {wrong[0]} ranks", param_hint="--batch-size"
            )
    if "dlrm" in chosen:
        from dct_plugin.integrations.dlrm.data import FORMATS

        format = chosen_format(format, data, FORMATS)
    return Plan(
        chosen,
        counts,
        rates,
        60 * (minutes or (QUICK_MINUTES if quick else MINUTES)),
        out,
        parameters=parameters,
        format=format or "diabetes",
        data=None if data is None else str(data.resolve()),
        batch_sizes=sizes,
        stages=list(dict.fromkeys(stages or (QUICK_STAGES if quick else STAGES))),
    )
