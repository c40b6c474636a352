"""Figures of summaries: each stands in the section of results that its row links to, or in a file of it."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest
from result_tables import FOLDER, commands, expand, read
from support import ROOT

#: A number with its sign, as tables write it.
_NUMBER = re.compile(r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?")


def _figures(page: Path) -> list[tuple[str, str]]:
    """Return the words and the target of each link with a number in the tables of a page."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [pair for row in rows for pair in re.findall(r"\[([^\]]*\d[^\]]*)\]\(([^)]+)\)", row)]


def _section(page: Path, anchor: str) -> str:
    """Return a section with its subsections and files of results; the whole page without an anchor."""
    lines, level = [], 0 if anchor else -1
    for line in expand(page).splitlines():
        if heading := re.match(r"(##+) (.*)", line):
            depth, words = len(heading[1]), re.sub(r"[^\w\- ]", "", heading[2].lower())
            if level > 0 and depth <= level:
                break
            if level == 0 and words.replace(" ", "-") == anchor:
                level = depth
        if level:
            lines.append(line)
    return "\n".join(lines)


def _stands_in(figure: str, numbers: set[str]) -> bool:
    """Return whether a figure is one of the numbers, rounded to its places."""
    places = Decimal(1).scaleb(-len(figure.partition(".")[2]))
    wanted = Decimal(figure.replace(",", ""))
    return any(Decimal(number.replace(",", "")).quantize(places) == wanted for number in numbers)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/quality.md"])
def test_figures_of_summaries_stand_in_the_results_that_they_link_to(page: str) -> None:
    path, missing = ROOT / page, []
    for words, target in _figures(path):
        file, _, anchor = target.partition("#")
        section = _section((path.parent / file) if file else path, anchor)
        assert section, f"{target}: no such section"
        numbers = set(_NUMBER.findall(section))
        missing += [
            f"{each} of {words!r}: {target}"
            for each in _NUMBER.findall(words)
            if not _stands_in(each, numbers)
        ]
    assert not missing, "\n".join(missing)


def _shown() -> list[str]:
    """Return the paths of the files of results that pages show, as the pages name them."""
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    return [file for page in pages for file in re.findall(r"^:file: (results/.*)$", page, re.M)]


def test_every_file_of_results_stands_on_one_page_and_names_its_command() -> None:
    files = sorted(FOLDER.glob("*.csv"))
    assert sorted(_shown()) == [f"results/{file.name}" for file in files]
    for file in files:
        assert read(file.stem), file
        assert commands(file.read_text(encoding="utf-8").splitlines()), file
