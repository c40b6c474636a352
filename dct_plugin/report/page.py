"""The page: parts with a verdict, advice and sections, written as one file that needs no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .._version import __version__
from ..output import Table, write
from . import charts
from .advice import Advice


class Section(NamedTuple):
    """A chart with its figures as a table, or a table alone. The title of the table is the chart's."""

    table: Table
    draw: Callable[[Any], None] | None = None
    """Draws on the axes of matplotlib."""
    height: float = 2.8
    """Height of the chart; its width is 5."""


@dataclass
class Part:
    """A part of the page: the figures of one source."""

    title: str
    verdict: Sequence[str]
    """Sentences or paragraphs."""
    sections: Sequence[Section]
    advice: Sequence[Advice] = ()
    notes: list[str] = field(default_factory=list)
    """Sentences on lines that could not be read, or were left out."""


#: Rows and columns that a table shows; more do not fit into a page that a browser opens at once.
_ROWS, _COLUMNS = 500, 40


def write_page(path: Path, parts: Sequence[Part]) -> None:
    """Write the page of all parts."""
    from jinja2 import Environment, PackageLoader, select_autoescape
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader(__package__, "."), autoescape=select_autoescape(), trim_blocks=True
    )

    def chart(section: Section) -> Markup:
        if section.draw is None:
            return Markup()
        return Markup(charts.svg(section.draw, section.table.title, height=section.height))

    text = environment.get_template("page.html").render(
        parts=parts, chart=chart, colours=charts.COLOURS, version=__version__, most=(_ROWS, _COLUMNS)
    )
    write(path, text)
