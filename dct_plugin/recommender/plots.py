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
    """Ratio of the dense bytes to those sent; forward and backward where they differ."""


#: Width of a picture in inches: with its letters of 11 points, a phone shows them at the size of small text.
WIDTH = 6.2


@contextmanager
def png(path: Path, heights: Sequence[float]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Give a figure and its panels, one below the other; write them to a PNG file afterwards.

    Args:
        path: The file.
        heights: Inches of each panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left"}):
        size: dict[str, Any] = {"figsize": (WIDTH, sum(heights)), "height_ratios": list(heights)}
        figure, axes = plt.subplots(len(heights), 1, squeeze=False, layout="constrained", **size)
        yield figure, axes[:, 0]
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_differences(axis: Any, points: Sequence[Point], *, limit: float | None = None) -> None:
    """Draw means and intervals, the first at the top; settings of one seed are hollow.

    The name of a setting stands above its mark, how many times fewer bytes it sends at the right.

    Args:
        axis: Axes of matplotlib.
        points: The settings.
        limit: Larger differences are drawn as arrows with their values.
    """
    axis.axvline(0.0, color="black", linewidth=0.8)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the line at zero
    beside = {"transform": axis.get_yaxis_transform(), "va": "center", "bbox": white}
    for at, point in enumerate(points):
        axis.axhline(at - 0.75, color="0.85", linewidth=0.8)
        axis.text(0.01, at - 0.4, point.name, **beside)
        axis.text(0.99, at - 0.4, " / ".join(f"{times:g}x" for times in point.fewer), ha="right", **beside)
        if limit is not None and point.mean > limit:
            axis.annotate(
                f"{point.mean:+.2f}",
                (limit, at),
                xytext=(-60, 0),
                va="center",
                textcoords="offset points",
                arrowprops={"arrowstyle": "->"},
            )
        else:
            filled = "none" if point.half_width is None else "C0"
            axis.errorbar(point.mean, at, xerr=point.half_width, fmt="oC0", markerfacecolor=filled, capsize=3)
    both = ", forward / backward" if any(len(point.fewer) > 1 for point in points) else ""
    axis.set_title(f"times fewer bytes{both}", loc="right")
    axis.set(ylim=(len(points) - 0.6, -0.75), yticks=[])
    axis.set_xlim(right=limit)
    axis.locator_params(axis="x", nbins=4)


def draw_bars(axis: Any, names: Sequence[str], lengths: Sequence[float], labels: Sequence[str]) -> None:
    """Draw horizontal bars, the first at the top, with a name at the left and a label at the end.

    Bars of DCT are blue, the ideal is black, all others are grey.
    """
    colors = ["black" if name == "ideal" else "C0" if "DCT" in name else "0.65" for name in names]
    bars = axis.barh(range(len(names)), lengths, color=colors, height=0.7)
    axis.bar_label(bars, labels, padding=3)
    axis.set_yticks(range(len(names)), names)
    axis.set(ylim=(len(names) - 0.4, -0.6))
    # Room for the labels.
    axis.set_xlim(0, 1.75 * max(lengths, default=1.0))
