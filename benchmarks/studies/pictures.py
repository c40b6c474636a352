"""Pictures of the tables of results in docs/results.

They are drawn from the files themselves, so that a picture says what its table says. For a table of quality:
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from result_tables import read

from benchmarks.links.report import draw as draw_links
from benchmarks.links.suite import Cell

DOCS = Path(__file__).resolve().parents[2] / "docs"

#: A difference, and half of its interval.
_DIFFERENCE = r"([+-][\d.]+)(?: ± ?([\d.]+))?"


@dataclass(frozen=True)
class Panel:
    """The points of one file of results."""

    file: str  #: without its folder and ``.csv``
    title: str
    unit: str
    limit: float | None = None  #: differences further out are drawn as arrows


AUC, NATS = "AUC - dense (higher is better)", "held-out loss - dense, nats (lower is better)"
PICTURES = {
    "accordion": [
        Panel("accordion_criteo", "DLRM, Criteo", AUC),
        Panel("accordion_diabetes", "DLRM, Diabetes", AUC),
        Panel("accordion_gpt", "GPT", NATS),
    ],
    "activations": [
        Panel("activations", "Two pipeline stages, learning rate 8e-3", NATS, limit=0.45),
        Panel("activations_best_rate", "Two pipeline stages, learning rate 1.2e-2", NATS, limit=0.45),
    ],
    "directions": [
        Panel("activations_one_direction", "Two pipeline stages, one direction alone", NATS, limit=0.45)
    ],
    "tensor": [Panel("activations_tensor", "TP 2, sequence parallelism", NATS, limit=0.45)],
    "criteo": [Panel("embeddings_criteo", "DLRM, Criteo", AUC)],
    "diabetes": [Panel("embeddings_diabetes", "DLRM, Diabetes", AUC)],
    "compressors": [Panel("many_compressors", "GPT, 2 to 64 compressors", NATS)],
    "values": [
        Panel("values_gpt", "GPT, 0.99 (bytes of the second half)", NATS),
        Panel("values_criteo", "DLRM, Criteo, 0.99 (bytes of the whole run)", AUC),
    ],
}


def points(rows: list[dict[str, str]]) -> list[Point]:
    """Return the points of a table in its order, without rows that have no difference (dense)."""
    found = []
    for row in rows:
        name, *_ = row.values()
        difference = next(value for title, value in row.items() if "minus dense" in title)
        value = re.match(_DIFFERENCE, difference)
        if value is not None:
            times = (re.match(r"[\d.]+", cell) for title, cell in row.items() if title.startswith("fewer"))
            half = None if value[2] is None else float(value[2])
            found.append(Point(name, float(value[1]), half, tuple(float(t[0]) for t in times if t)))
    return found


def draw(panels: list[Panel], path: Path) -> None:
    """Draw a PNG with a row for each panel."""
    shown = [points(read(panel.file)) for panel in panels]
    with png(path, [0.45 * len(those) + 0.95 for those in shown]) as (_, axes):
        for panel, those, axis in zip(panels, shown, axes, strict=True):
            draw_differences(axis, those, limit=panel.limit)
            axis.set(xlabel=panel.unit)
            axis.set_title(panel.title)


def draw_sizes(path: Path) -> None:
    """Draw the differences over the number of compressors, a line for each size of the model."""
    rows = read("sizes")
    with png(path, [3.6]) as (_, (axis,)):
        for at, size in enumerate(list(rows[0])[1:]):
            found = [(int(row["compressors"]), re.match(_DIFFERENCE, row[size])) for row in rows]
            shown = [(count, float(m[1]), float(m[2] or 0)) for count, m in found if m is not None]
            counts, means, halves = zip(*shown, strict=True)
            moved = [count * 1.04 ** (at - 1) for count in counts]  # bars do not hide each other
            axis.errorbar(moved, means, halves, marker="o", capsize=3, label=f"{size.split()[0]} parameters")
        axis.axhline(0, color="black", linewidth=0.8)
        counts = [int(row["compressors"]) for row in rows]
        axis.set(xscale="log", xlabel="compressors", ylabel=NATS.replace(", nats", ",\nnats"))
        axis.set_xticks(counts, map(str, counts))
        axis.minorticks_off()
        axis.legend()


def draw_local_steps(path: Path) -> None:
    """Draw the loss of every row over how many times fewer bytes it sent."""
    with png(path, [4.2]) as (_, (axis,)):
        for number, row in enumerate(read("local_steps")):
            name, fewer = row["setting"], float(row["fewer bytes"].removesuffix("x").replace(",", ""))
            loss = float(row["held-out loss (nats)"])
            marker = "o" if name.startswith("one") else "x" if "not offered" in name else "s"
            axis.plot(fewer, loss, marker, color="tab:blue")
            text = name.split(":")[0].replace(" (not offered)", "")
            place = {"textcoords": "offset points", "xytext": (0, 7 if number % 2 else -13)}
            axis.annotate(text, (fewer, loss), fontsize=7, ha="center", **place)
        axis.set(xlabel="times fewer bytes than fp32 in every step")
        axis.set(xscale="log", xlim=(0.15, 30000), ylim=(1.64, 1.8))
        axis.set(ylabel="held-out loss, nats (x: not offered)")


def links(rows: list[dict[str, str]]) -> list[Cell]:
    """Return the medians of torch DDP on links: every method, a cell for each link."""
    rates = [title for title in rows[0] if title.endswith(" (ms)")]
    return [
        Cell(
            "ddp",
            "10.65M parameters",
            2,
            rate.removesuffix(" (ms)"),
            "fp32",
            [Figures(row["method"], [float(row[rate].split()[0])]) for row in rows],
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
    for name in arguments.only:
        path = arguments.out / f"{name}.png"
        if name == "links":
            draw_links(links(read("links_ddp")), path)
        elif name == "local-steps":
            draw_local_steps(path)
        elif name == "sizes":
            draw_sizes(path)
        else:
            draw(PICTURES[name], path)


if __name__ == "__main__":
    main()
