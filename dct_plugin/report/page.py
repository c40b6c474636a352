"""The report of a run: sentences and tables, for the terminal and as one file that needs no other."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..output import Table, write
from .advice import Advice

#: Columns of the page, and of a terminal of unknown width.
WIDTH = 120


@dataclass
class Part:
    """The figures of one source."""

    title: str
    verdict: Sequence[str]
    """Sentences or paragraphs."""
    tables: Sequence[Table]
    advice: Sequence[Advice] = ()
    notes: list[str] = field(default_factory=list)
    """Sentences on lines that could not be read, or were left out."""
    picture: str = ""
    """SVG, for the page alone."""


def _lines(part: Part) -> Iterator[RenderableType]:
    yield Text(part.title, "bold")
    yield from map(Text, [*part.notes, *part.verdict])
    for said in part.advice:
        yield Text.assemble((f"To try: {said.try_this}", "bold"), f" {said.because}")
    for table in part.tables:
        yield Padding(table.rich(), (1, 0, 0, 0))


def show(parts: Sequence[Part], console: Console) -> None:
    """Print all parts."""
    for part in parts:
        for line in _lines(part):
            console.print(line, soft_wrap=isinstance(line, Text), markup=False, highlight=False)


def write_page(path: Path, parts: Sequence[Part]) -> None:
    """Write all parts as HTML, with the picture of each above its text."""
    body = ""
    for part in parts:
        console = Console(record=True, width=WIDTH, file=io.StringIO())
        show([part], console)
        text = console.export_html(inline_styles=True, code_format="{code}")
        body += f'{part.picture}<pre style="white-space: pre-wrap">{text}</pre>\n'
    head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>dct report</title>\n'
    write(path, f"{head}<body>\n{body}</body></html>\n")
