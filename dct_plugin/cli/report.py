"""``dct report``: one HTML page from metrics files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..output import check_target
from ..report.metrics_part import metrics_part
from ..report.page import write_page
from ..report.reading import losses_of, read


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
        Path | None, typer.Option(help="Metrics file of a dense run, whose loss is compared.")
    ] = None,
) -> None:
    """Make one HTML page of a run: what it saved, charts with tables, and what to try next."""
    check_target(out, "--out")
    runs, notes = read(paths, number=run)
    losses = [] if dense is None else losses_of(dense)
    parts = [metrics_part(ranks, losses) for ranks in runs]
    parts[0].notes[:0] = notes
    write_page(out, parts)
    for line in [*notes, *parts[0].verdict]:
        typer.echo(line)
    typer.echo(f"Wrote {out}")
