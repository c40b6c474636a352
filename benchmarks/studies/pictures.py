"""Pictures of the tables in docs/quality.md, docs/local-steps.md and docs/performance.md.

They are drawn from the pages themselves, so that a picture says what its table says. For a table of quality:
the difference of each setting to dense training with its interval, and how many times fewer bytes than dense
it sent (columns that begin with "fewer": one, or forward and backward). For the table by size: a line for
each size over the number of compressors. For that of local steps: loss over bytes. For that of torch DDP on
links: the steps of every method on every link.

    python benchmarks/studies/pictures.py                # all of them, to docs/images
    python benchmarks/studies/pictures.py --only values
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dct_plugin.recommender.links.interleave import Figures
from dct_plugin.recommender.plots import Point, draw_differences, png

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.links.report import draw as draw_links
from benchmarks.links.suite import Cell

DOCS = Path(__file__).resolve().parents[2] / "docs"


#: A difference, and half of its interval.
_DIFFERENCE = r"([+-][\d.]+)(?: ± ?([\d.]+))?"


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
RECOMMENDERS = "Recommenders: what the embedding exchange may lose"
DDP_ON_LINKS = "torch DDP"
SIZES = "By size and number of ranks"
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
    "criteo": [Panel(RECOMMENDERS, 0, "DLRM, Criteo", AUC)],
    "diabetes": [Panel(RECOMMENDERS, 1, "DLRM, Diabetes", AUC)],
    "compressors": [Panel("Many compressors", 0, "GPT, 2 to 64 compressors", NATS)],
    "values": [
        Panel(VALUES, 0, "GPT, 0.99 (bytes of the second half)", NATS),
        Panel(VALUES, 1, "DLRM, Criteo, 0.99 (bytes of the whole run)", AUC),
    ],
}


def tables(page: str, section: str) -> list[list[dict[str, str]]]:
    """Read the tables of a section of a Markdown page: for each row its cells by the titles of their columns.

    Raises:
        ValueError: the page has no such section.
    """
    heading = re.search(rf"^(##+) {re.escape(section)}\n", page, re.M)
    if heading is None:
        raise ValueError(f"the page has no section {section!r}")
    text = re.split(rf"^#{{2,{len(heading[1])}}} ", page[heading.end() :], maxsplit=1, flags=re.M)[0]
    found = []
    for table in re.findall(r"(?:^ *\|.*\n)+", text, re.M):
        lines = [line.strip().removeprefix("|").removesuffix("|").split("|") for line in table.splitlines()]
        titles, _, *rows = [[cell.strip(" *") for cell in line] for line in lines]
        found.append([dict(zip(titles, row, strict=True)) for row in rows])
    return found


def points(page: str, panel: Panel) -> list[Point]:
    """Read the points of a panel, in the order of its table, without rows that have no difference (dense)."""
    found = []
    for row in tables(page, panel.section)[panel.number]:
        name, *_ = row.values()
        difference = next(value for title, value in row.items() if "- dense" in title)
        value = re.match(_DIFFERENCE, difference)
        if value is not None:
            times = (re.match(r"[\d.]+", cell) for title, cell in row.items() if title.startswith("fewer"))
            half = None if value[2] is None else float(value[2])
            found.append(Point(name, float(value[1]), half, tuple(float(t[0]) for t in times if t)))
    return found


def draw(page: str, panels: list[Panel], path: Path) -> None:
    """Draw a PNG with a row for each panel."""
    shown = [points(page, panel) for panel in panels]
    with png(path, [0.45 * len(those) + 0.95 for those in shown]) as (_, axes):
        for panel, those, axis in zip(panels, shown, axes, strict=True):
            draw_differences(axis, those, limit=panel.limit)
            axis.set(xlabel=panel.unit)
            axis.set_title(panel.title)


def draw_sizes(page: str, path: Path) -> None:
    """Draw the differences over the number of compressors, a line for each size of the model."""
    rows = tables(page, SIZES)[0]
    with png(path, [3.6]) as (_, (axis,)):
        for at, size in enumerate(list(rows[0])[1:]):
            found = [(int(row["compressors"]), re.match(_DIFFERENCE, row[size])) for row in rows]
            shown = [(count, float(m[1]), float(m[2] or 0)) for count, m in found if m is not None]
            counts, means, halves = zip(*shown, strict=True)
            moved = [count * 1.04 ** (at - 1) for count in counts]  # bars do not hide each other
            axis.errorbar(moved, means, halves, marker="o", capsize=3, label=f"{size} parameters")
        axis.axhline(0, color="black", linewidth=0.8)
        counts = [int(row["compressors"]) for row in rows]
        axis.set(xscale="log", xlabel="compressors", ylabel=NATS.replace(", nats", ",\nnats"))
        axis.set_xticks(counts, map(str, counts))
        axis.minorticks_off()
        axis.legend()


def draw_local_steps(page: str, path: Path) -> None:
    """Draw the loss of every row over how many times fewer bytes it sent."""
    with png(path, [4.2]) as (_, (axis,)):
        for number, row in enumerate(tables(page, "Quality")[0]):
            name, fewer = row[""].replace("`", ""), float(row["fewer"].removesuffix("x").replace(",", ""))
            marker = "o" if name.startswith("one") else "x" if "not offered" in name else "s"
            axis.plot(fewer, float(row["loss"]), marker, color="tab:blue")
            text = re.sub(r"\[(.*)\]\(.*\)|\*\*| \(not offered\)", r"\1", name.split(":")[0])
            place = {"textcoords": "offset points", "xytext": (0, 7 if number % 2 else -13)}
            axis.annotate(text, (fewer, float(row["loss"])), fontsize=7, ha="center", **place)
        axis.set(xlabel="times fewer bytes than fp32 in every step")
        axis.set(xscale="log", xlim=(0.15, 30000), ylim=(1.64, 1.8))
        axis.set(ylabel="held-out loss, nats (x: not offered)")


def links(page: str) -> list[Cell]:
    """Read the first table of torch DDP on links: medians of every method, a cell for each link."""
    rows = tables(page, DDP_ON_LINKS)[0]
    rates = [title for title in rows[0] if re.match(r"[\d.]+ ±", rows[0][title])]
    return [
        Cell(
            "ddp",
            "10.65M parameters",
            2,
            rate,
            "fp32",
            [Figures(row[""], [float(row[rate].split()[0])]) for row in rows],
        )
        for rate in rates
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PICTURES, "links", "sizes", "local-steps"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=DOCS / "images")
    arguments = parser.parse_args()
    page = (DOCS / "quality.md").read_text(encoding="utf-8")
    for name in arguments.only:
        if name == "links":
            cells = links((DOCS / "performance.md").read_text(encoding="utf-8"))
            draw_links(cells, arguments.out / "links.png")
        elif name == "local-steps":
            text = (DOCS / "local-steps.md").read_text(encoding="utf-8")
            draw_local_steps(text, arguments.out / "local-steps.png")
        elif name == "sizes":
            draw_sizes(page, arguments.out / "sizes.png")
        else:
            draw(page, PICTURES[name], arguments.out / f"{name}.png")


if __name__ == "__main__":
    main()
