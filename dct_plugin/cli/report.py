"""``dct report``: one HTML page from metrics files and from the JSON of other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DCTError
from ..output import check_target
from ..report.metrics_part import metrics_part
from ..report.page import Part, write_page
from ..report.reading import json_object, losses_of, read


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Metrics files (those of several ranks make one run), or JSON of dct demo --json, dct dlrm "
            "--report."
        ),
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
    parts, metrics = [], []
    for path in paths:
        figures = json_object(path)
        if figures is None:
            metrics.append(path)
        else:
            parts.append(_part(path, figures))
    runs, notes = read(metrics, number=run)
    losses = [] if dense is None else losses_of(dense)
    if losses and not runs:
        raise DCTError(f"--dense {dense}: there is no metrics file to compare it with")
    parts += [metrics_part(ranks, losses) for ranks in runs]
    parts[0].notes[:0] = notes
    write_page(out, parts)
    for line in [*notes, *parts[0].verdict]:
        typer.echo(line)
    typer.echo(f"Wrote {out}")


def _part(path: Path, figures: dict[str, Any]) -> Part:
    from ..recommender.report import PARTS

    make = next((make for key, make in PARTS.items() if key in figures), None)
    if make is None:
        raise DCTError(
            f"{path}: is neither a metrics file nor the JSON of dct demo --json or dct dlrm --report"
        )
    try:
        return make(figures)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DCTError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); another version of dct wrote it, or "
            "it is not complete"
        ) from error
