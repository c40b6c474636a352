"""``dct report``: the figures of a run from its metrics files, as text and as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import DCTError
from ..output import check_target
from ..report.metrics_part import metrics_part
from ..report.page import WIDTH, show, write_page
from ..report.reading import read
from ..report.run import Run


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Metrics files; those of several ranks make one run."),
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    dense: Annotated[
        Path | None, typer.Option(help="Metrics file of a dense run, whose loss and step time are compared.")
    ] = None,
) -> None:
    """Show what a run saved, its settings, times and losses, and what to try next; also as an HTML page."""
    check_target(out, "--out")
    ranks, notes = read(paths)
    dense_run = None
    if dense is not None:
        dense_ranks, said = read([dense])
        dense_run = Run(dense_ranks)
        if not dense_run.losses:
            raise DCTError(
                f"{dense}: holds no loss: the callbacks for Trainer and Lightning write it, or "
                f'metrics.event("loss", step=n, loss=x). {" ".join(said)}'
            )
    part = metrics_part(ranks, dense_run)
    part.notes += notes
    console = Console()
    show([part], console if console.is_terminal else Console(width=WIDTH))
    write_page(out, [part])
    typer.echo(f"Wrote {out}" + ("" if part.picture else ", without a picture: pip install matplotlib"))
