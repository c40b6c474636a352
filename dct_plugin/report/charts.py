"""Charts as SVG inside HTML. Their colours follow the light or dark mode of the page; text stays text.

matplotlib draws them, which the demo needs anyway. With plotly every page would carry megabytes of script.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Colours for light and dark pages by the name of their CSS variable. matplotlib gets the light ones.
COLOURS = {
    "ink": ("#16191d", "#e6e9ec"),
    "faint": ("#8b9198", "#7d848c"),
    "c0": ("#0067a5", "#56b4e9"),
    "c1": ("#b34700", "#ff9d5c"),
    "c2": ("#00734d", "#3fd0a0"),
    "c3": ("#8f3f71", "#e691c8"),
    "c4": ("#6b5b00", "#e0c84c"),
    "c5": ("#4b4b9b", "#a9a5ff"),
    "c6": ("#8a2222", "#ff8b8b"),
    "c7": ("#4f565d", "#aab2ba"),
}
INK, FAINT, *SERIES = (light for light, _ in COLOURS.values())
#: Lines differ in their dashes, too, for readers who cannot tell the colours apart.
_DASHES = ["-", "--", "-.", ":"] * 2


def svg(draw: Callable[[Any], None], label: str, *, height: float = 2.8) -> str:
    """Draw a chart as an SVG element; ``label`` says to a screen reader what it shows."""
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot as plt

    settings: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        "axes.edgecolor": FAINT,
        "axes.prop_cycle": cycler(color=SERIES, linestyle=_DASHES),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "text.parse_math": False,  # names may have a $
        "svg.hashsalt": label,
    }
    with matplotlib.rc_context(settings):
        figure, axis = plt.subplots(figsize=(5, height), layout="constrained")
        draw(axis)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        plt.close(figure)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' id="[A-Za-z.]+_\d+"', "", text)  # of groups: the same in every chart
    for name, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{name})")
    for light, name in (("#ffffff", "card"), ("#000000", "ink")):  # of functions that draw pictures, too
        text = text.replace(light, f"var(--{name})")
    text = re.sub(r' (?:height|width)="[\d.]+pt"', "", text, count=2)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def legend(axis: Any) -> None:
    """Name the lines below the chart."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        labels = map(short, labels)
        axis.figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=8)


def short(name: str) -> str:
    """Return a name for a chart, a long one without its middle."""
    return name if len(name) <= 30 else f"{name[:14]}...{name[-14:]}"


def lines(
    axis: Any,
    steps: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    unit: str,
    *,
    reference: Mapping[str, Sequence[float | None]] | None = None,
    logarithmic: bool = False,
) -> None:
    """Draw one line for each series over the steps; those of the ``reference`` are dotted and thin."""
    one = "o" if len(steps) == 1 else None
    for name, values in series.items():
        axis.plot(steps, _gaps(values), label=name, linewidth=1.6, marker=one)
    for name, values in (reference or {}).items():
        axis.plot(steps, _gaps(values), label=name, color=INK, linestyle=":", linewidth=1.2, marker=one)
    axis.set(xlabel="step", ylabel=unit)
    if logarithmic:
        from matplotlib.ticker import EngFormatter, NullFormatter

        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(EngFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
    legend(axis)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None or value <= 0 else value for value in values]
