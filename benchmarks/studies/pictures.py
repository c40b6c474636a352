"""Pictures of the tables in docs/quality.md: differences to dense training with their intervals, and bytes.

Drawn from the page itself, so that a picture says what its table says. A row of panels for each table: left
the difference of each setting, right how many times fewer bytes than dense it sent (columns that begin with
"fewer": one, or forward and backward), if the table has that.

    python benchmarks/studies/pictures.py                # all of them, to docs/images
    python benchmarks/studies/pictures.py --only values
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dct_plugin.output import png

DOCS = Path(__file__).resolve().parents[2] / "docs"


@dataclass(frozen=True)
class Panel:
    """The ``number``-th table of a section of the page."""

    section: str
    number: int
    title: str
    unit: str
    limit: float | None = None  #: differences further out are drawn as arrows


AUC, NATS = "AUC - dense (higher is better)", "held-out loss - dense, nats (lower is better)"
CLASSES = "Compressor classes for activations"
VALUES = "int8, int4 and int2 values"
PICTURES = {
    "accordion": [
        Panel("Accordion", 0, "DLRM, Criteo", AUC),
        Panel("Accordion", 1, "DLRM, Diabetes", AUC),
        Panel("Accordion", 2, "GPT", NATS),
    ],
    "activations": [
        Panel(CLASSES, 0, "Two pipeline stages, learning rate 8e-3", NATS, limit=0.45),
        Panel(CLASSES, 1, "Two pipeline stages, learning rate 1.2e-2", NATS, limit=0.45),
    ],
    "directions": [Panel(CLASSES, 2, "Two pipeline stages, one direction alone", NATS, limit=0.45)],
    "tensor": [Panel(CLASSES, 3, "TP 2, sequence parallelism", NATS, limit=0.45)],
    "averaging": [
        Panel("Error averaging", 0, "DLRM, Diabetes, data shared out by label, 0.99", AUC),
        Panel("Error averaging", 2, "GPT, 0.99, data shared out at random", NATS),
    ],
    "values": [
        Panel(VALUES, 0, "GPT, 0.99 (bytes of the second half)", NATS),
        Panel(VALUES, 1, "DLRM, Criteo, 0.99 (bytes of the whole run)", AUC),
    ],
}


@dataclass(frozen=True)
class Point:
    """A setting, its difference to dense, half its interval (None: one seed), times fewer bytes."""

    name: str
    mean: float
    half: float | None
    fewer: tuple[float, ...]


def tables(page: str, section: str) -> list[list[dict[str, str]]]:
    """Tables of a section of a Markdown page: for each row its cells by the titles of their columns.

    Raises:
        ValueError: the page has no such section.
    """
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    if text is None:
        raise ValueError(f"docs/quality.md has no section {section!r}")
    found = []
    for table in re.findall(r"(?:^ *\|.*\n)+", text[1], re.M):
        lines = [line.strip().removeprefix("|").removesuffix("|").split("|") for line in table.splitlines()]
        titles, _, *rows = [[cell.strip(" *") for cell in line] for line in lines]
        found.append([dict(zip(titles, row, strict=True)) for row in rows])
    return found


def points(page: str, panel: Panel) -> list[Point]:
    """What a panel shows, in the order of its table; rows without a difference (dense) are left out."""
    found = []
    for row in tables(page, panel.section)[panel.number]:
        name, *_ = row.values()
        difference = next(value for title, value in row.items() if "- dense" in title)
        value = re.match(r"([+-][\d.]+)(?: ± ?([\d.]+))?", difference)
        if value is not None:
            times = (re.match(r"[\d.]+", cell) for title, cell in row.items() if title.startswith("fewer"))
            half = None if value[2] is None else float(value[2])
            found.append(Point(name, float(value[1]), half, tuple(float(t[0]) for t in times if t)))
    return found


def draw_differences(axis: Any, panel: Panel, shown: list[Point]) -> None:
    """Means and intervals, the first at the top; settings of one seed are hollow."""
    axis.axvline(0.0, color="black", linewidth=0.8)
    for at, point in enumerate(shown):
        if panel.limit is not None and point.mean > panel.limit:
            axis.annotate(f"{point.mean:+.2f}", (panel.limit, at), xytext=(-45, 0), va="center",
                          textcoords="offset points", arrowprops={"arrowstyle": "->"})  # fmt: skip
        else:
            filled = "none" if point.half is None else "C0"
            axis.errorbar(point.mean, at, xerr=point.half, fmt="oC0", markerfacecolor=filled, capsize=3)
    axis.set_yticks(range(len(shown)), [point.name for point in shown])
    axis.set(xlabel=panel.unit, title=panel.title, ylim=(len(shown) - 0.4, -0.6))
    axis.set_xlim(right=panel.limit)
    axis.locator_params(axis="x", nbins=4)


def draw_bytes(axis: Any, shown: list[Point]) -> None:
    """A bar for each setting, or two: forward above backward."""
    ways = max(len(point.fewer) for point in shown)
    for at, point in enumerate(shown):
        for way, times in enumerate(point.fewer):
            height = 0.7 / ways
            bar = axis.barh(
                at - 0.35 + height * (way + 0.5), times, color=("0.7", "0.85")[way], height=height
            )
            axis.bar_label(bar, [f"{times:g}x"], padding=3, fontsize=7 if ways > 1 else 9)
    directions = " (forward, backward)" if ways > 1 else ""
    axis.set(xlabel=f"times fewer bytes than dense{directions}", yticks=[], ylim=(len(shown) - 0.4, -0.6))
    axis.margins(x=0.2)
    axis.set_visible(ways > 0)


def draw(page: str, panels: list[Panel], path: Path) -> None:
    """A PNG with a row for each panel."""
    shown = [points(page, panel) for panel in panels]
    heights = [len(those) + 1.5 for those in shown]
    size = {"figsize": (10, 0.33 * sum(heights)), "height_ratios": heights}
    with png(path, len(panels), 2, squeeze=False, **size) as (_, grid):
        for panel, those, (left, right) in zip(panels, shown, grid, strict=True):
            draw_differences(left, panel, those)
            draw_bytes(right, those)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--out", type=Path, default=DOCS / "images")
    arguments = parser.parse_args()
    page = (DOCS / "quality.md").read_text(encoding="utf-8")
    for name in arguments.only:
        draw(page, PICTURES[name], arguments.out / f"{name}.png")


if __name__ == "__main__":
    main()
