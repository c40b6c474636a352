"""The page: parts with a verdict, advice and sections, written as one file that needs no other."""

from __future__ import annotations

import functools
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
#: Bytes of a page.
_LIMIT = 2_000_000


def write_page(path: Path, parts: Sequence[Part]) -> None:
    """Write the page of all parts; the last ones are left out of a page of more than 2 MB."""
    from jinja2 import Environment, PackageLoader, select_autoescape
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader(__package__, "."), autoescape=select_autoescape(), trim_blocks=True
    )

    @functools.cache
    def chart(of_part: int, of_section: int) -> Markup:
        section = parts[of_part].sections[of_section]
        if section.draw is None:
            return Markup()
        return Markup(charts.svg(section.draw, section.table.title, height=section.height))

    render = functools.partial(
        environment.get_template("page.html").render,
        chart=chart,
        colours=charts.COLOURS,
        version=__version__,
        most=(_ROWS, _COLUMNS),
        count=len(parts),
    )
    text = render(parts=parts[:1])
    for shown in range(2, len(parts) + 1):
        longer = render(parts=parts[:shown])
        if len(longer.encode()) > _LIMIT:
            break
        text = longer
    write(path, text)
