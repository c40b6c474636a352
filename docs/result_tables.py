"""Tables of results: the files of ``docs/results``, which pages show with the directive ``csv-table``.

Lines at the top of a file that begin with ``# `` are the commands that produced it. The next line has the
titles of the columns, with units.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"
_COMMAND = "# "
_DIRECTIVE = re.compile(r"^```\{csv-table\}.*\n(?::.*\n)*?:file: (.*)\n(?::.*\n)*```$", re.M)


def commands(lines: Iterable[str]) -> list[str]:
    """Return the commands at the top of a file."""
    return [line.removeprefix(_COMMAND).rstrip() for line in lines if line.startswith(_COMMAND)]


def table(lines: Iterable[str]) -> list[str]:
    """Return the lines of a file without those of its commands."""
    return [line for line in lines if not line.startswith(_COMMAND)]


def read(name: str) -> list[dict[str, str]]:
    """Read the rows of a file by its name: the cells of a row by the titles of their columns.

    Raises:
        ValueError: a row has more or fewer cells than there are titles, or two columns have one title.
    """
    text = (FOLDER / f"{name}.csv").read_text(encoding="utf-8")
    titles, *rows = csv.reader(table(text.splitlines(keepends=True)))
    if len(set(titles)) < len(titles):
        raise ValueError(f"docs/results/{name}.csv: two columns have one title")
    if wrong := [row for row in rows if len(row) != len(titles)]:
        raise ValueError(f"docs/results/{name}.csv: {len(titles)} columns, but a row is {wrong[0]}")
    return [dict(zip(titles, row, strict=True)) for row in rows]


def expand(page: Path) -> str:
    """Return the text of a page with a Markdown table in the place of each file that it shows."""

    def rows(shown: re.Match[str]) -> str:
        text = (page.parent / shown[1]).read_text(encoding="utf-8")
        return "\n".join(
            f"| {' | '.join(row)} |" for row in csv.reader(table(text.splitlines(keepends=True)))
        )

    return _DIRECTIVE.sub(rows, page.read_text(encoding="utf-8"))
