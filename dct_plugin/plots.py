"""Plots of the commands and studies: horizontal, with a name beside every mark instead of a legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A setting of a study: its difference to dense training and the bytes that it saves."""

    name: str
    mean: float
    half_width: float | None = None
    """Half of the 95 % interval; None with one seed."""
    fewer: tuple[float, ...] = ()
    """How many times fewer bytes than dense; forward and backward where they differ."""


@contextmanager
def png(path: Path, *grid: int, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Give a figure and its axes to draw on; write them to a PNG file afterwards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(*grid, layout="constrained", **settings)
    yield figure, axes
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_differences(axis: Any, points: Sequence[Point], *, limit: float | None = None) -> None:
    """Draw means and intervals, the first at the top; settings of one seed are hollow.

    Args:
        axis: Axes of matplotlib.
        points: The settings.
        limit: Larger differences are drawn as arrows with their values.
    """
    axis.axvline(0.0, color="black", linewidth=0.8)
    for at, point in enumerate(points):
        if limit is not None and point.mean > limit:
            axis.annotate(
                f"{point.mean:+.2f}",
                (limit, at),
                xytext=(-45, 0),
                va="center",
                textcoords="offset points",
                arrowprops={"arrowstyle": "->"},
            )
        else:
            filled = "none" if point.half_width is None else "C0"
            axis.errorbar(point.mean, at, xerr=point.half_width, fmt="oC0", markerfacecolor=filled, capsize=3)
    axis.set_yticks(range(len(points)), [point.name for point in points])
    axis.set(ylim=(len(points) - 0.4, -0.6))
    axis.set_xlim(right=limit)
    axis.locator_params(axis="x", nbins=4)


def draw_bars(
    axis: Any,
    rows: Sequence[Sequence[float]],
    labels: Sequence[Sequence[str]],
    *,
    names: Sequence[str] | None = None,
    colors: Sequence[Any] | None = None,
) -> None:
    """Draw one or more horizontal bars for each row, the first row at the top, with a label at each end.

    Args:
        axis: Axes of matplotlib.
        rows: Lengths of the bars of each row.
        labels: Text at the end of each bar.
        names: Names of the rows; None leaves the axis without them.
        colors: Of the rows; None takes shades of grey, one for each bar of a row.
    """
    most = max((len(row) for row in rows), default=0)
    for at, (row, texts) in enumerate(zip(rows, labels, strict=True)):
        for number, (length, text) in enumerate(zip(row, texts, strict=True)):
            height = 0.7 / most
            color = ("0.7", "0.85")[number % 2] if colors is None else colors[at]
            bar = axis.barh(at - 0.35 + height * (number + 0.5), length, color=color, height=height)
            axis.bar_label(bar, [text], padding=3, fontsize=7 if most > 1 else 8)
    axis.set_yticks(range(len(rows)) if names else [], names or [])
    axis.set(ylim=(len(rows) - 0.4, -0.6))
    axis.margins(x=0.25)
    axis.set_visible(most > 0)
