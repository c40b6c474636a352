"""The part of the report about a run's metrics: verdict, advice, tables and a picture."""

from __future__ import annotations

import html
import io
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from ..config import DataParallelConfig
from ..metrics import format_bytes
from ..metrics.summary import DISPLACED, fewer
from ..output import Table, faster, formatted
from .advice import advice
from .page import Part
from .reading import RankRun
from .run import Run, grouped, mean_step

PART_NAMES = {
    "select_ms": "select",
    "encode_ms": "encode",
    "exchange_ms": "exchange, network",
    "waited_ms": "exchange, wait for slow ranks",
    "decode_ms": "decode",
}
#: Rows of a table at most.
_ROWS = 40

_Losses = Sequence[tuple[int, float]]


def metrics_part(ranks: Sequence[RankRun], dense: Run | None = None) -> Part:
    """Return verdict, advice, tables and picture of a run.

    Args:
        ranks: The lines of each of its ranks; see :func:`.reading.read`.
        dense: A dense run to compare with.
    """
    run = Run(ranks, dense)
    tables = [_steps(run), _classes(run), _times(run)]
    if run.tensors:
        tables.append(_tensors(run))
    if run.decisions:
        tables.append(_decisions(run))
    sources = ", ".join(dict.fromkeys(Path(part.source).name for part in run.ranks))
    title = f"Metrics: {sources}"
    said = [*_settings(run), *verdict(run)]
    return Part(title, said, tables, advice(run), picture=_picture(run, title))


def _settings(run: Run) -> list[str]:
    """Return a sentence on the applied settings; none if the file does not say them."""
    try:
        section = run.settings
        return [f"Settings: {DataParallelConfig.model_validate(section).summary}."] if section else []
    except ValidationError:
        return ["Settings: of another version of dct-plugin."]


def verdict(run: Run) -> list[str]:
    """Say in a sentence each: bytes saved, time saved beside the dense steps at the start, the loss beside
    that of a dense run.
    """
    sent = run.per_step("sent_bytes", run.windows) * run.steps
    dense = run.per_step("dense_bytes", run.windows) * run.steps
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
        time = f"A step took {step:.1f} ms; there were no dense steps to compare with."
    elif not (run.thresholded or run.dense) and (steady is None or 0.99 < steady < 1.01):
        time = f"A step took {step:.1f} ms; nothing was thresholded."
    else:
        what = "those of the dense run" if run.dense else "the dense steps at the start"
        than = f"{faster(before / step)} than {what} ({before:.1f} ms)"
        time = f"A step took {step:.1f} ms, {than}."
    return [f"{saved}.", time, *([_quality(run.losses, dict(run.dense.losses))] if run.dense else [])]


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


# -- tables ---


def _steps(run: Run) -> Table:
    """Return a row for each window, or each group of them where there are many."""
    found = {"loss": run.losses, "dense run": run.dense.losses if run.dense else []}
    losses = {name: series for name, series in found.items() if series}
    rows, before = [], -1
    for group in grouped(run.windows, _ROWS):
        step = group[-1].step
        means = [_mean(series, before, step) for series in losses.values()]
        sent, whole = (run.per_step(key, group) for key in ("sent_bytes", "dense_bytes"))
        plugin = sum(run.part(key, group) for key in PART_NAMES)
        ms = mean_step(group)
        shown = [formatted(ms, ".1f"), f"{plugin:.1f}", *(formatted(mean, ".6g") for mean in means)]
        rows.append([str(step), format_bytes(sent), format_bytes(whole), *shown])
        before = step
    header = ["to step", "sent", "without the plugin", "step, ms", "plugin, ms", *losses]
    return Table("Per step and rank", header, rows)


def _mean(losses: _Losses, after: int, to: int) -> float | None:
    """Return the mean loss of some steps; None where there is none."""
    found = [loss for step, loss in losses if after < step <= to]
    return statistics.fmean(found) if found else None


def _classes(run: Run) -> Table:
    rows = []
    for cls in run.classes[:_ROWS]:
        sent, dense = (run.per_step(key, run.steady, [cls]) for key in ("sent_bytes", "dense_bytes"))
        ratio = fewer(dense / sent) if sent and dense else ""
        pair = run.density(cls) if cls in run.thresholded else None
        taus = [tau for window in run.steady if (tau := window.mean("tau", cls)) is not None] if pair else []
        figures = [*(pair or (None, None)), taus[-1] if taus else None]
        rows.append(
            [cls, format_bytes(sent), format_bytes(dense), ratio, *(formatted(x, ".4g") for x in figures)]
        )
    header = ["class", "sent", "without the plugin", "fewer", "density", "target", "threshold"]
    return Table("Classes, per step after the start", header, rows)


def _times(run: Run) -> Table:
    rows = [[name, f"{run.part(key):.3f}"] for key, name in PART_NAMES.items()]
    if len(run.ranks) > 1:
        rows += [[f"  rank {rank} waits", f"{waited:.3f}"] for rank, waited in run.waited().items()]
    return Table("Milliseconds per step after the start", ["part", "ms"], rows[:_ROWS])


def _tensors(run: Run) -> Table:
    worst = run.tensors[:10]
    rows = [
        [each.name, *(formatted(x, ".6g") for x in (each.density, each.target, each.tau))] for each in worst
    ]
    title = f"The {len(worst)} of {len(run.tensors)} tensors that miss their density most"
    return Table(title, ["tensor", "density", "target", "threshold"], rows)


def _decisions(run: Run) -> Table:
    rows = []
    for each in run.decisions[-_ROWS:]:
        times = (formatted(ms, ".1f") for ms in (each.predicted_ms, each.measured_ms))
        rows.append([str(each.step), each.setting, each.reason, *times])
    header = ["step", "setting", "reason", "predicted ms", "measured ms"]
    return Table("Decisions by measured times", header, rows)


def _picture(run: Run, label: str) -> str:
    """Draw bytes per step, and the losses if there are any, as SVG; empty without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots(1, 2 if run.losses else 1, squeeze=False)[0]
    steps = [window.step for window in run.windows]
    for key, name in (("dense_bytes", "without the plugin"), ("sent_bytes", "sent")):
        axes[0].plot(steps, [run.per_step(key, [window]) for window in run.windows], ".-", label=name)
    scale = "log" if run.ratio(run.windows) else "linear"  # one rank sends nothing
    axes[0].set(xlabel="step", ylabel="bytes per step and rank", yscale=scale)
    axes[0].legend()
    if run.losses:
        axes[1].plot(*zip(*run.losses, strict=True))
        axes[1].set(xlabel="step", ylabel="training loss")
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r' (?:height|width)="[\d.]+pt"', "", file.getvalue(), count=2)
    named = f'<svg role="img" aria-label="{html.escape(label)}" style="max-width: 60rem"'
    return text[text.index("<svg") :].replace("<svg", named, 1)
