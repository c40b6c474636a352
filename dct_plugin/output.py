"""Output of the commands that measure: tables and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

if TYPE_CHECKING:
    import rich.table


class Table(NamedTuple):
    """A table before it is laid out; the first column names the rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    section_after: int | None = None
    """Index of the row that a line is drawn under."""

    def rich(self) -> rich.table.Table:
        """Lay the table out for the terminal; 80 columns hold names of 16."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable

        table = RichTable(
            title=self.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        for number, column in enumerate(self.header):
            first = number == 0
            table.add_column(column, justify="left" if first else "right", overflow="fold", no_wrap=not first)
        for number, row in enumerate(self.rows):
            table.add_row(*row, end_section=number == self.section_after)
        return table

    def markdown(self) -> list[str]:
        """Return the lines of the table in Markdown."""
        lines = [self.header, ["---", *["--:"] * (len(self.header) - 1)], *self.rows]
        return [f"{self.title}.", "", *("| " + " | ".join(cells) + " |" for cells in lines)]


def formatted(figure: float | None, form: str) -> str:
    """Return a figure in a format of Python's; nothing for None."""
    return "" if figure is None else format(figure, form)


def faster(times: float) -> str:
    """Return a ratio of times in words."""
    return f"{times:.2f}x faster" if times >= 1 else f"{1 / times:.2f}x slower"


def check_target(path: Path | None, option: str) -> None:
    """Check that a file can be written there: that is better known before the training than after it.

    Raises:
        typer.BadParameter: It cannot.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        open(path, "ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(
            f"{path}: cannot be written: {error.strerror or error}", param_hint=option
        ) from error


def write(path: Path, content: dict[str, Any] | str) -> None:
    """Write text or JSON to a file, and make its folder if it is not there."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
