"""The part of the page about a run's metrics."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..metrics import format_bytes
from ..metrics.summary import DISPLACED, fewer
from ..output import Table, faster, formatted
from . import charts
from .advice import advice
from .page import Part, Section
from .reading import RankRun
from .run import Run, Window, grouped, weighted

PART_NAMES = {
    "select_ms": "select",
    "encode_ms": "encode",
    "exchange_ms": "exchange, network",
    "waited_ms": "exchange, wait for slow ranks",
    "decode_ms": "decode",
}
#: Number of classes that the chart shows, and of decisions.
_DRAWN, _MARKED = 7, 100

_Column = tuple[str, Callable[[Window], float | None], str]


_Losses = Sequence[tuple[int, float]]


def metrics_part(ranks: Sequence[RankRun], dense: _Losses = (), dense_step_ms: float | None = None) -> Part:
    """Return verdict, advice and charts of a run.

    Args:
        ranks: The lines of each of its ranks; see :func:`.reading.read`.
        dense: Steps and losses of a dense run to compare with.
        dense_step_ms: Milliseconds of a step of the dense run; None: the dense steps at the start count.
    """
    run = Run(ranks, dense_step_ms)
    sections = [_bytes(run), *_densities(run), _times(run)]
    if run.losses or dense:
        sections.append(_losses(run.losses, dense))
    if run.decisions:
        sections.append(_decisions(run))
    if len(run.ranks) > 1:
        rows = [[str(rank), f"{waited:.3f}"] for rank, waited in run.waited().items()]
        header = ["rank", "waited, ms"]
        sections.append(Section(Table("Wait for slower ranks, ms per step after the start", header, rows)))
    sources = ", ".join(dict.fromkeys(Path(part.source).name for part in run.ranks))
    return Part(f"Metrics: {sources}", verdict(run, dense), sections, advice(run))


def verdict(run: Run, dense_losses: _Losses = ()) -> list[str]:
    """Say in a sentence each: bytes saved, time saved beside the dense steps at the start, the loss beside
    that of a dense run.
    """
    sent = run.per_step("sent_bytes", run.windows, *run.classes) * run.steps
    dense = run.per_step("dense_bytes", run.windows, *run.classes) * run.steps
    whole, steady = run.ratio(run.windows), run.ratio(run.steady)
    saved = f"In {run.steps} steps {run.who} sent {format_bytes(sent)} in place of {format_bytes(dense)}" + (
        "" if whole is None else f": {fewer(whole)} bytes"
    )
    if len(run.steady) < len(run.windows) and steady is not None:
        saved += f"; after the start {fewer(steady)} bytes"
    if changed := run.density("parameter_exact"):
        saved += f"; {100 * changed[0]:.2g} % of the weights change in a step"
    if displaced := run.density(DISPLACED):
        saved += f"; step-ahead displaced {100 * displaced[0]:.3g} % of the tensors"
    step, before = run.step_ms, run.dense_step_ms
    if step is None:
        time = "How long steps took is not in these metrics: one step, or an older version."
    elif before is None:
        time = f"A step took {step:.1f} ms; there were no dense steps at the start to compare with."
    elif not (run.thresholded or run.has_dense_run):
        time = f"A step took {step:.1f} ms; nothing was thresholded."
    else:
        what = "those of the dense run" if run.has_dense_run else "the dense steps at the start"
        than = f"{faster(before / step)} than {what} ({before:.1f} ms)"
        time = f"A step took {step:.1f} ms, {than}."
    return [f"{saved}.", time, *([_quality(run.losses, dict(dense_losses))] if dense_losses else [])]


def _quality(losses: _Losses, dense: Mapping[int, float]) -> str:
    """Compare the losses of the last tenth of the steps that both runs have."""
    both = [(step, loss, dense[step]) for step, loss in losses if step in dense]
    if not both:
        return "The dense run cannot be compared with: no step has losses of both runs."
    last = both[-max(1, len(both) // 10) :]
    ours, theirs = (statistics.fmean(each) for each in list(zip(*last, strict=True))[1:])
    where = f"From step {last[0][0]} to {last[-1][0]}" if len(last) > 1 else f"In step {last[0][0]}"
    return (
        f"{where} the loss is {ours:.4f} and that of the dense run "
        f"{theirs:.4f}: {ours - theirs:+.4f}, with one run each."
    )


# -- sections ---


def _over_steps(
    run: Run, title: str, columns: Sequence[_Column], draw: Callable[..., None], height: float = 2.8
) -> Section:
    """Return a section with a row for each window, or each group of them where there are many.

    Args:
        run: The run.
        title: Title of chart and table.
        columns: For each column its name, its figure of a window, and the format of that in the table.
        draw: Draws the chart, from the axes, the last step of each row, and the figures by name of column.
        height: Height of the chart.
    """
    groups = grouped(run.windows)
    steps = [group[-1].step for group in groups]
    found = {name: [weighted(group, figure) for group in groups] for name, figure, _ in columns}
    form = {name: form for name, _, form in columns}
    rows = [
        [str(step), *(formatted(figures[at], form[name]) for name, figures in found.items())]
        for at, step in enumerate(steps)
    ]
    if len(groups) < len(run.windows):
        title += f"; each row is the mean of {len(groups[0])} reports"
    return Section(Table(title, ["to step", *found], rows), lambda axis: draw(axis, steps, found), height)


def _bytes(run: Run) -> Section:
    sending = [cls for cls in run.classes if any(window.mean("sent_bytes", cls) for window in run.windows)]
    columns: list[_Column] = [
        ("without the plugin", lambda window: window.total("dense_bytes"), ",.1f"),
        ("sent", lambda window: window.total("sent_bytes"), ",.1f"),
        *((cls, lambda window, cls=cls: window.mean("sent_bytes", cls) or 0.0, ",.1f") for cls in sending),
    ]

    def draw(axis: Any, steps: Sequence[int], found: dict[str, list[float | None]]) -> None:
        chosen = {cls: found[cls] for cls in sending[:_DRAWN]}
        reference = {"without the plugin": found["without the plugin"]}
        charts.lines(axis, steps, chosen, "bytes", reference=reference, logarithmic=True)

    return _over_steps(run, "Bytes per step by class", columns, draw, 3.4)


def _densities(run: Run) -> list[Section]:
    """Return density and threshold of each class, and the tensors that miss their density most."""
    if not run.thresholded:
        return []
    drawn = run.thresholded[:_DRAWN]

    def columns(key: str, suffix: str = "") -> list[_Column]:
        return [(cls + suffix, partial(Window.mean, key=key, cls=cls), ".6g") for cls in run.thresholded]

    def draw(axis: Any, steps: Sequence[int], found: dict[str, list[float | None]], unit: str) -> None:
        targets = {name: values for cls in drawn if (values := found.get(name := f"{cls}, target"))}
        charts.lines(axis, steps, {cls: found[cls] for cls in drawn}, unit, reference=targets)
        axis.set_ylim(bottom=0)

    pairs = zip(columns("density"), columns("density_target", ", target"), strict=True)
    density = list(itertools.chain.from_iterable(pairs))
    sections = [
        _over_steps(run, "Density by class", density, partial(draw, unit="share of entries sent")),
        _over_steps(run, "Mean threshold by class", columns("tau"), partial(draw, unit="gradient units")),
    ]
    return [*sections, _tensors(run)] if run.tensors else sections


def _tensors(run: Run) -> Section:
    worst = run.tensors[:10]
    rows = [
        [each.name, *(formatted(x, ".6g") for x in (each.density, each.target, each.tau))] for each in worst
    ]

    def draw(axis: Any) -> None:
        for at, each in enumerate(worst):
            axis.barh(at, each.density / each.target, color=charts.SERIES[0], height=0.6)
        axis.axvline(1, color=charts.INK, linestyle=":")
        axis.set_yticks(range(len(worst)), [charts.short(each.name) for each in worst], fontsize=7)
        axis.set(ylim=(len(worst) - 0.4, -0.6), xlabel="density, times its target")

    title = f"The {len(worst)} of {len(run.tensors)} tensors that miss their density most"
    table = Table(title, ["tensor", "density", "target", "threshold"], rows)
    return Section(table, draw, 0.9 + 0.24 * len(worst))


def _times(run: Run) -> Section:
    columns: list[_Column] = [("step", lambda window: window.of_step(), ".4f")]
    columns += [(name, partial(Window.part, key=key), ".4f") for key, name in PART_NAMES.items()]
    columns.append(("dense steps at the start", lambda window: window.of_step("dense_step_ms"), ".4f"))

    def draw(axis: Any, steps: Sequence[int], found: dict[str, list[float | None]]) -> None:
        parts = {name: found[name] for name in PART_NAMES.values()}
        bottom = [0.0] * len(steps)
        width = [after - before for before, after in zip([0, *steps], steps, strict=False)]
        for (name, values), color in zip(parts.items(), charts.SERIES, strict=False):
            heights = [value or 0.0 for value in values]
            left = [step - wide for step, wide in zip(steps, width, strict=True)]
            axis.bar(left, heights, width, bottom=bottom, align="edge", color=color, label=name, linewidth=0)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        for name, dash in (("step", "-"), ("dense steps at the start", ":")):
            if any(value is not None for value in found[name]):
                values = [float("nan") if value is None else value for value in found[name]]
                axis.plot(steps, values, color=charts.INK, linestyle=dash, label=name, linewidth=1.4)
        for decision in run.decisions[-_MARKED:]:
            axis.axvline(decision.step, color=charts.FAINT, linestyle="--", linewidth=1)
        axis.set(xlabel="step" + (" (dashed: decisions)" if run.decisions else ""), ylabel="ms per step")
        charts.legend(axis)

    return _over_steps(run, "Milliseconds per step by part", columns, draw, 3.6)


def _losses(losses: _Losses, dense: _Losses) -> Section:
    steps = sorted({step for step, _ in (*losses, *dense)})
    size = -(-len(steps) // 200)
    ends = [steps[min(at + size, len(steps)) - 1] for at in range(0, len(steps), size)]
    series = {"training loss": _means(losses, ends)} | ({"dense run": _means(dense, ends)} if dense else {})
    rows = [
        [str(end), *(formatted(x, ".6g") for x in means)]
        for end, *means in zip(ends, *series.values(), strict=True)
    ]
    header = ["to step", "loss", "dense run"][: 1 + len(series)]
    return Section(
        Table("Training loss", header, rows), lambda axis: charts.lines(axis, ends, series, "loss")
    )


def _means(losses: _Losses, ends: Sequence[int]) -> list[float | None]:
    """Return the mean loss of the steps up to each end; None where there are none."""
    found: list[list[float]] = [[] for _ in ends]
    for step, loss in losses:
        found[bisect_left(ends, step)].append(loss)
    return [statistics.fmean(values) if values else None for values in found]


def _decisions(run: Run) -> Section:
    rows = []
    for each in run.decisions:
        times = (formatted(ms, ".1f") for ms in (each.predicted_ms, each.measured_ms))
        rows.append([str(each.step), each.setting, each.reason, *times])
    header = ["step", "setting", "reason", "predicted ms", "measured ms"]
    return Section(Table("Decisions by measured times", header, rows))
