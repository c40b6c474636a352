"""The report: tables, plot and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from dct_plugin.metrics import format_bytes
from dct_plugin.output import Table
from dct_plugin.rates import rate_name
from dct_plugin.recommender.links.interleave import Figures
from dct_plugin.recommender.plots import draw_bars, png

from .suite import WORKLOADS, Cell

IDEAL = "ideal"
#: Parts of the step beside those that the metrics time.
COMPUTE, WAITED, REST = "compute", "waited", "rest"


class Group(NamedTuple):
    """Cells of one variant and number of ranks, by rate."""

    title: str
    cells: list[Cell]


def groups(cells: Iterable[Cell]) -> list[Group]:
    """Measured cells that share a table."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.figures:
            title = f"{WORKLOADS[cell.workload].title}, {cell.variant}, {cell.ranks} ranks"
            title += "" if cell.nodes is None else f" on {cell.nodes} nodes"
            found.setdefault(title, []).append(cell)
    return [Group(title, members) for title, members in found.items()]


def tables(cells: Iterable[Cell], *, ratios: bool = True) -> Iterator[Table]:
    """Make two tables for every variant: the step on every link, and where the plugin's part of it goes.

    Args:
        cells: What was measured.
        ratios: With the steps as multiples of the baseline's, and computation and rest beside the plugin's
            own times; without, 80 columns hold four links.
    """
    for group in groups(cells):
        yield _steps(group, ratios)
        if (parts := _split(group, ratios)) is not None:
            yield parts


def _steps(group: Group, ratios: bool) -> Table:
    baseline = group.cells[0].baseline
    rows = []
    for number, figures in enumerate(group.cells[0].figures):
        row = [figures.name, format_bytes(figures.sent)]
        if group.cells[0].nodes is not None:
            row.append(format_bytes(figures.inside))
        for cell in group.cells:
            one = cell.figures[number]
            low, high = one.quartiles
            row.append(f"{one.median:.0f} ±{(high - low) / 2:.0f}")
            if ratios:
                # The ratio depends on the model's computation; what an exchange adds to a step does not.
                least = _named(cell, baseline).median
                added = f", {one.median - least:+.0f} ms" if baseline == IDEAL and one.name != IDEAL else ""
                row.append(f"{one.median / least:.2f}x{added}")
        rows.append(row)
    header = ["", "sent"] if group.cells[0].nodes is None else ["", "between nodes", "inside"]
    for cell in group.cells:
        header += [rate_name(cell.rate), *([f"of {baseline}"] if ratios else [])]
    title = f"{group.title}: ms per step, median ± half the interquartile range; bytes per step, all ranks"
    return Table(title, header, rows)


def split(cell: Cell, figures: Figures) -> dict[str, float]:
    """Milliseconds of a step by what they go to.

    ``compute`` is the ideal step, where it was measured; ``rest`` is what the step takes beyond that and the
    plugin's own times. ``waited`` is the part of ``exchange`` in which other ranks were not ready.
    """
    parts = {name.removesuffix("_ms"): value for name, value in figures.split.items()}
    ideal = next((other.median for other in cell.figures if other.name == IDEAL), None)
    if ideal is None:
        return parts
    exposed = sum(parts.values()) - parts.get(WAITED, 0.0)
    return {COMPUTE: ideal, **parts, REST: figures.median - ideal - exposed}


def _split(group: Group, whole: bool) -> Table | None:
    rows: list[list[str]] = []
    names: list[str] = []
    for cell in group.cells:
        for figures in cell.figures:
            if not any(figures.split.values()):
                continue
            parts = split(cell, figures)
            names = names or [name for name in parts if whole or name not in (COMPUTE, REST)]
            values = [f"{parts.get(name, 0.0):.1f}" for name in names]
            rows.append([figures.name, rate_name(cell.rate), f"{figures.median:.1f}", *values])
    if not rows:
        return None
    header = ["", "link", "step", *(name.replace("_", " ") for name in names)]
    return Table(f"{group.title}: where the step goes, ms (mean of the ranks)", header, rows)


def _named(cell: Cell, name: str) -> Figures:
    return next(figures for figures in cell.figures if figures.name == name)


def unmeasured(cells: Iterable[Cell]) -> list[str]:
    """One line for each reason why something was not measured."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.skipped:
            what = f"{cell.workload} {cell.variant}, {cell.ranks} ranks, {rate_name(cell.rate)}"
            reasons.setdefault(cell.skipped, []).append(what)
    return [f"Not measured: {'; '.join(what)}: {reason}" for reason, what in reasons.items()]


def as_dict(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Cells for JSON, with medians and quartiles."""
    made = []
    for cell in cells:
        content = asdict(cell)
        for entry, figures in zip(content["figures"], cell.figures, strict=True):
            low, high = figures.quartiles
            entry |= {"median_ms": figures.median, "quartiles_ms": [low, high]}
        made.append(content)
    return made


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw the median steps of all methods as a PNG, a panel for each link."""
    rows = [(group.title, cell) for group in groups(cells) for cell in group.cells]
    if not rows:
        return
    with png(path, [_height(cell) for _, cell in rows]) as (_, axes):
        for axis, (title, cell) in zip(axes, rows, strict=True):
            _draw_steps(axis, cell, title)


def _height(cell: Cell) -> float:
    return 0.27 * len(cell.figures) + 0.9


def _draw_steps(axis: Any, cell: Cell, title: str) -> None:
    floor = next((f.median for f in cell.figures if f.name == IDEAL), None)
    labels = [
        f"{f.median:.0f}" + (f" ({f.median / floor:.2f}x ideal)" if floor and f.name != IDEAL else "")
        for f in cell.figures
    ]
    draw_bars(axis, [f.name for f in cell.figures], [f.median for f in cell.figures], labels)
    axis.set_title(f"{rate_name(cell.rate)}: {title}")
    axis.set_xlabel("ms per step, median")
