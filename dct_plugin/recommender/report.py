"""The report of the commands about their runs: tables for the terminal and as Markdown, plots, a verdict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dct_plugin.metrics import format_bytes
from dct_plugin.metrics.summary import fewer
from dct_plugin.output import Table, faster
from dct_plugin.report.page import Part

from .comparison import Comparison
from .figures import LAYERS, Run
from .intervals import Interval
from .plots import Point, draw_bars, draw_differences, png

#: A loss of AUC up to this is called none.
MARGIN_AUC = 0.002


# -- runs over seeds ---


def run_tables(runs: Sequence[Run]) -> list[Table]:
    """Quality, bytes, and layers of all runs."""
    quality, amounts, layers, totals = [], [], [], []
    seeds = max((len(run.auc) for run in runs), default=0)
    for run in runs:
        against, auc, log_loss = run.difference, f"{run.mean_auc:.4f}", f"{run.mean_log_loss:.4f}"
        changes = [str(change or "") for change in (against.auc_difference, against.log_loss_difference)]
        quality.append([run.name, auc, changes[0], log_loss, changes[1], str(len(run.auc))])
        kinds = ("embedding", "id", "crossing", "gradient", "total")
        vectors, ids, both, gradients, whole = (format_bytes(run.sent_bytes(kind)) for kind in kinds)
        saved, saved_both = _times(against.embedding_reduction), _times(against.crossing_reduction)
        amounts.append([run.name, vectors, saved, ids, both, saved_both])
        left = [_times(run.layers().get(layer)) for layer in LAYERS]
        layers.append([run.name, *left, gradients, _times(against.gradient_reduction)])
        totals.append([run.name, whole, _times(against.total_reduction), f"{run.step_ms:.1f} ms"])
    tables = [
        Table(
            "Quality on the test part: mean over seeds, difference to dense with 95 % interval"
            if seeds > 1
            else "Quality on the test part: one seed, so the difference to dense has no interval",
            ["", "AUC", "difference", "log loss", "difference", "seeds"],
            quality,
        ),
        Table(
            "Bytes per step, all ranks: embeddings forward + backward, ids that ask for them",
            ["", "embeddings", "fewer", "ids", "with ids", "fewer"],
            amounts,
        ),
        Table(
            "Saving of each layer on embeddings (they multiply), and bytes of MLP gradients",
            ["", *LAYERS, "MLP gradients", "fewer"],
            layers,
        ),
        Table(
            "All payload per step: embeddings, ids, gradients, gathered weights; median time of a step here",
            ["", "all payload", "fewer", "step"],
            totals,
        ),
    ]
    return [_without_empty_columns(table) for table in tables]


def _without_empty_columns(table: Table) -> Table:
    kept = [at for at in range(len(table.header)) if not at or any(row[at] for row in table.rows)]
    rows = [[row[at] for at in kept] for row in table.rows]
    return table._replace(header=[table.header[at] for at in kept], rows=rows)


def judged(runs: Sequence[Run], *, rarer: int) -> list[str]:
    """Say of each compressed run whether its quality held, what it saves, and whether its step was slower.

    Args:
        runs: As :func:`~dct_plugin.recommender.figures.read_runs` gives them.
        rarer: Test rows of the rarer label, which limit how well AUC is known.
    """
    sentences = []
    for run in runs:
        against, dense = run.difference, runs[0]
        if against.auc_difference is None:
            continue
        said = f"{run.name}: {_quality(against.auc_difference, rarer)}"
        if against.total_reduction is not None:
            said += f" It sends {fewer(against.total_reduction)} bytes in all."
        if run.step_ms > dense.step_ms > 0:
            said += (
                f" Its step was {faster(dense.step_ms / run.step_ms)} here ({run.step_ms:.1f} ms, dense "
                f"{dense.step_ms:.1f} ms): the ranks of one machine need no network, and compression pays "
                "on links that are slow."
            )
        sentences.append(said)
    return sentences


def _quality(difference: Interval, rarer: int) -> str:
    by = f"the AUC differs from dense by {difference}"
    if difference.half_width is None:
        return (
            f"{by}, with one seed and so without an interval; this does not tell a loss from chance (the "
            f"rarer label has {rarer:,} test rows). --seeds 5 gives an interval."
        )
    margin, seeds = MARGIN_AUC, f"{difference.pairs} seeds"
    if difference.mean - difference.half_width >= -margin:
        return f"quality held: {by} ({seeds}), and the interval has no loss of more than {margin}."
    if difference.mean + difference.half_width < -margin:
        return f"quality did not hold: {by} ({seeds}), a loss of more than {margin}."
    return f"not decided: {by} ({seeds}); the interval reaches beyond a loss of {margin}. Use more seeds."


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.3g}x"


def markdown(tables: Iterable[Table], *, command: str, data: str, verdicts: Sequence[str] = ()) -> str:
    """Tables as Markdown, with the command that makes them, and what they show."""
    lines = [f"{data}:", "", "```", command, "```"]
    for table in tables:
        lines += ["", *table.markdown()]
    for said in verdicts:
        lines += ["", said]
    return "\n".join(lines) + "\n"


# -- dense against DCT ---


def speed_table(comparison: Comparison, *, title: str) -> Table:
    """The demo's table."""
    dense, dct = comparison.dense, comparison.dct
    rows: list[list[str]] = []

    def add(name: str, form: Callable[[float], str], first: float, second: float, difference: str) -> None:
        rows.append([name, form(first), form(second), difference])

    add("AUC (test)", "{:.4f}".format, dense.mean_auc, dct.mean_auc, f"{comparison.auc_difference:+.4f}")
    difference = f"{comparison.log_loss_difference:+.4f}"
    add("Log loss (test)", "{:.4f}".format, dense.mean_log_loss, dct.mean_log_loss, difference)
    payload = comparison.dense_sent.payload_bytes, comparison.dct_sent.payload_bytes
    add("Payload per step and rank", format_bytes, *payload, fewer(comparison.reduction))
    if comparison.wire_reduction is not None and dense.wire_bytes and dct.wire_bytes:
        wire = dense.wire_bytes, dct.wire_bytes
        add("On the wire per step, all ranks", format_bytes, *wire, fewer(comparison.wire_reduction))
    density, target = 100 * comparison.dct_sent.density, 100 * comparison.dct_sent.density_target
    rows.append(["Gradient entries sent (target)", "100 %", f"{density:#.3g} % ({target:#.3g} %)", ""])
    here = faster(dense.step_ms / dct.step_ms)
    add("Step here, median", "{:.1f} ms".format, dense.step_ms, dct.step_ms, here)
    measured = len(rows) - 1
    for each in comparison.measured:
        ours = each.dct.median
        add(f"Step at {each.name}", "{:.1f} ms".format, each.dense.median, ours, faster(each.speed_up))
        add("  dense in bf16", "{:.1f} ms".format, each.bf16.median, ours, faster(each.speed_up_bf16))
    return Table(title, ["", "dense", "DCT", "difference"], rows, section_after=measured)


def verdict(comparison: Comparison, *, quick: bool = False) -> list[str]:
    """Say what the figures show, and what they do not, one paragraph each."""
    difference = comparison.auc_difference
    if quick:
        quality = (
            "A --quick run shows that everything works. It is far too short to compare quality: leave out "
            "--quick for that."
        )
    elif difference >= -MARGIN_AUC:
        quality = (
            f"Quality held: the AUC differs by {difference:+.4f}, within the margin of {MARGIN_AUC} (one "
            "seed; --seed gives others)."
        )
    else:
        quality = (
            f"Quality did not hold: the AUC is {-difference:.4f} lower with DCT, more than the margin of "
            f"{MARGIN_AUC} (one seed; --seed gives others). A lower --sparsity narrows the gap."
        )

    sent = comparison.dct_sent.payload_bytes, comparison.dense_sent.payload_bytes
    saved = (
        f"A rank sent {format_bytes(sent[0])} a step in place of {format_bytes(sent[1])}: "
        f"{fewer(comparison.reduction)}."
    )
    paragraphs = [saved, quality, _speed(comparison)]
    if comparison.wire_reduction is None:
        paragraphs.append("There are no interface counters here to check the payload bytes against.")
    elif comparison.unexplained > 0:
        paragraphs.append(
            f"{100 * comparison.unexplained:.0f} % of the bytes counted on the wire in one of the runs are "
            "neither payload nor headers: other programs use the loopback interface, too. For a clean count, "
            "run in a network namespace: "
            "unshare --user --map-root-user --net sh -c 'ip link set lo up; dct demo'"
        )
    return paragraphs


def _speed(comparison: Comparison) -> str:
    here = faster(comparison.dense.step_ms / comparison.dct.step_ms)
    speed = f"Over this machine's loopback interface a DCT step was {here}."
    if not comparison.measured:
        speed += " That is not the slow link that DCT is for, and steps on slower links were not measured."
    for each in comparison.measured:
        low, high = each.dct.quartiles
        speed += (
            f" On links of {each.name} between the ranks (network namespaces, methods in turns) it took "
            f"{each.dct.median:.0f} ms (half of the turns {low:.0f} to {high:.0f}), "
            f"{faster(each.speed_up)} than dense in fp32 ({each.dense.median:.0f} ms) and "
            f"{faster(each.speed_up_bf16)} than with bf16 communication ({each.bf16.median:.0f} ms)."
        )
    return speed


def diverged(runs: Iterable[Run]) -> list[str]:
    """Return one sentence for each run whose ranks ended with different weights: that must not happen."""
    return [
        f"FAULT: the ranks of the {run.name} run ended with different weights."
        for run in runs
        if not run.ranks_in_step
    ]


# -- plots ---


def draw_quality(runs: Sequence[Run], path: Path, *, title: str) -> None:
    """Draw the difference in AUC of each run and the bytes of embeddings that it saves, as a PNG."""
    points = []
    for run in runs:
        auc, ratio = run.difference.auc_difference, run.difference.crossing_reduction
        if auc is not None:
            points.append(Point(run.name, auc.mean, auc.half_width, () if ratio is None else (ratio,)))
    with png(path, [0.45 * len(points) + 1.2]) as (figure, (axis,)):
        figure.suptitle(title, fontsize=11)
        _draw_differences(axis, points)


def _draw_differences(axis: Any, points: Sequence[Point]) -> None:
    axis.axvspan(-MARGIN_AUC, MARGIN_AUC, color="tab:green", alpha=0.15)
    draw_differences(axis, points)
    axis.set_xlabel(f"AUC - dense, 95 % interval (green: within {MARGIN_AUC:g})")


def draw_training(comparison: Comparison, path: Path, *, title: str) -> None:
    """Draw loss curves, step times, bytes, and the share of entries sent in each step, as a PNG."""
    steps = 2 + 3 * len(comparison.measured)
    with png(path, [2.9, 0.27 * steps + 0.9, 2.0, 1.4]) as (figure, axes):
        figure.suptitle(title, fontsize=11)
        _draw_losses(axes[0], comparison)
        _draw_steps(axes[1], comparison)
        _draw_bytes(axes[2], comparison)
        _draw_densities(axes[3], comparison)


def _loss_curves(comparison: Comparison) -> tuple[int, list[float], list[float]]:
    """Return the steps that each mean is of, and the curves of the dense and the DCT run."""
    window = max(1, min(50, comparison.dense.steps // 20))
    (dense,), (dct,) = comparison.dense.losses.values(), comparison.dct.losses.values()
    return window, moving_average(dense, window), moving_average(dct, window)


def _draw_losses(axis: Any, comparison: Comparison) -> None:
    """Draw the loss curves, and say how much they differ on training and on test rows."""
    window, dense, dct = _loss_curves(comparison)
    for run, name, curve, color in (
        (comparison.dense, "dense", dense, "0.5"),
        (comparison.dct, "DCT", dct, "C0"),
    ):
        label = f"{name}, test AUC {run.mean_auc:.4f}"
        steps = range(window, run.steps + 1)
        axis.plot(steps, curve, color=color, label=label, linewidth=1.4, linestyle="-")
    axis.set_title(f"Training loss, mean of {window} steps")
    training, test = dct[-1] - dense[-1], comparison.log_loss_difference
    axis.set_xlabel(f"optimizer step\nDCT - dense: training loss {training:+.4f}, test loss {test:+.4f}")
    axis.legend(frameon=False)
    # The first steps may be far above the rest, which is what one wants to see.
    shown = sorted([*dense, *dct])
    low, high = shown[0], shown[int(0.98 * (len(shown) - 1))]
    if high > low:
        axis.set_ylim(low - 0.1 * (high - low), high + 0.2 * (high - low))


def _draw_densities(axis: Any, comparison: Comparison) -> None:
    sent = comparison.dct_sent
    if sent.densities:
        steps, densities = zip(*sent.densities, strict=True)
        percent = [100 * density for density in densities]
        axis.plot(steps, percent, color="C0", linewidth=0.8)
        axis.set_ylim(0, max(1.1 * max(percent), 200 * sent.density_target))
    axis.axhline(100 * sent.density_target, color="black", linestyle="--", linewidth=0.8)
    axis.set_title("Gradient entries sent, % (dashed: target)")
    axis.set_xlabel("optimizer step")


def _draw_bytes(axis: Any, comparison: Comparison) -> None:
    dense, dct = comparison.dense_sent.payload_bytes, comparison.dct_sent.payload_bytes
    names, lengths = ["payload, dense", "payload, DCT"], [dense, dct]
    labels = [format_bytes(dense), f"{format_bytes(dct)} ({fewer(comparison.reduction)})"]
    if comparison.wire_reduction is not None:
        # The interface sees the bytes of all ranks.
        wire = [(run.wire_bytes or 0.0) / comparison.ranks for run in (comparison.dense, comparison.dct)]
        names += ["interface, dense", "interface, DCT"]
        lengths += wire
        labels += [format_bytes(wire[0]), f"{format_bytes(wire[1])} ({fewer(comparison.wire_reduction)})"]
    draw_bars(axis, names, lengths, labels)
    axis.set_title("Bytes per step and rank")
    axis.set_xticks([])


def _draw_steps(axis: Any, comparison: Comparison) -> None:
    here = comparison.dense.step_ms, comparison.dct.step_ms
    names = ["loopback, dense", "loopback, DCT"]
    lengths = list(here)
    labels = [f"{here[0]:.0f} ms", f"{here[1]:.0f} ms ({faster(here[0] / here[1])})"]
    for each in comparison.measured:
        names += [f"{each.name}, dense", f"{each.name}, bf16", f"{each.name}, DCT"]
        medians = [figures.median for figures in (each.dense, each.bf16, each.dct)]
        lengths += medians
        labels += [*(f"{ms:.0f} ms" for ms in medians[:2]), f"{medians[2]:.0f} ms ({faster(each.speed_up)})"]
    draw_bars(axis, names, lengths, labels)
    axis.set_title("Step time, median")
    axis.set_xticks([])


# -- the part of the page ---


def comparison_part(comparison: Comparison, *, title: str, quick: bool = False) -> Part:
    """Return the demo's part of the page: verdict and table."""
    broken = diverged([comparison.dense, comparison.dct])
    return Part(
        title,
        verdict(comparison, quick=quick),
        [speed_table(comparison, title="Dense and DCT")],
        notes=broken,
    )


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of every ``window`` consecutive values: ``len(values) - window + 1`` of them."""
    sums = [0.0, *itertools.accumulate(values)]
    return [(b - a) / window for a, b in zip(sums, sums[window:], strict=False)]
