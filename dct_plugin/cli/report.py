"""``dct report``: one HTML page from metrics files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..output import check_target
from ..report.metrics_part import metrics_part
from ..report.page import write_page
from ..report.reading import losses_of, read
from ..report.run import Run


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Metrics files; those of several ranks make one run."),
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    run: Annotated[
        int | None,
        typer.Option(min=1, help="Number of the run in files of several runs (the last)."),
    ] = None,
    dense: Annotated[
        Path | None, typer.Option(help="Metrics file of a dense run, whose loss and step time are compared.")
    ] = None,
) -> None:
    """Make one HTML page of a run: what it saved, charts with tables, and what to try next."""
    check_target(out, "--out")
    runs, notes = read(paths, number=run)
    losses, dense_step_ms = [], None
    if dense is not None:
        losses, dense_step_ms = losses_of(dense), Run(read([dense])[0][0]).step_ms
    parts = [metrics_part(ranks, losses, dense_step_ms) for ranks in runs]
    parts[0].notes[:0] = notes
    write_page(out, parts)
    for line in [*notes, *parts[0].verdict, *(each.try_this for each in parts[0].advice[:1])]:
        typer.echo(line)
    typer.echo(f"Wrote {out}")
