"""What the runs of ``dct dlrm`` say: quality paired by seed, bytes by layer, as tables, JSON and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dct_plugin.metrics import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BASELINE", "Interval", "Outcome", "as_dict", "draw", "markdown", "outcomes", "paired", "tables"]

#: Name of the run that nothing is compressed in.
BASELINE = "dense"

#: Layers of the channel in the order in which they act.
LAYERS = ("lossless", "threshold", "bounded")

#: Classes of bytes that move embeddings and their gradients, or what stands in for them.
MOVED = ("embedding_forward", "embedding_backward", "des_forward", "des_backward")
GRADIENTS = ("gradient", "gradient_small", "gradient_answer", "gradient_warmup")


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences with its confidence interval; ``half`` is None for a single pair."""

    mean: float
    half: float | None
    pairs: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if self.half is None else f" ±{self.half:.4f}")

    def inside(self, margin: float) -> bool | None:
        """Whether the whole interval is in [-margin, margin]; None without an interval."""
        return None if self.half is None else abs(self.mean) + self.half <= margin


def paired(differences: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Mean of differences between runs of the same seed, and its interval by Student's t distribution.

    Raises:
        ValueError: There are none.
    """
    if not differences:
        raise ValueError("there are no differences to average")
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1:
        return Interval(mean, None, 1)
    from scipy.special import stdtrit

    quantile = float(stdtrit(count - 1, (1 + confidence) / 2))
    return Interval(mean, quantile * statistics.stdev(differences) / math.sqrt(count), count)


@dataclass
class Outcome:
    """One configuration over all its seeds. Bytes are per optimizer step, all ranks together."""

    name: str
    auc: dict[int, float] = field(default_factory=dict)
    log_loss: dict[int, float] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    exchange: list[str] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    dense: dict[str, float] = field(default_factory=dict)
    step_ms: float = 0.0
    interface_bytes: float | None = None
    auc_difference: Interval | None = None
    log_loss_difference: Interval | None = None
    embedding_reduction: float | None = None
    crossing_reduction: float | None = None
    gradient_reduction: float | None = None

    @property
    def embedding_bytes(self) -> float:
        """Forward and backward, without the requested ids."""
        return sum(self.sent.get(name, 0.0) for name in MOVED)

    @property
    def id_bytes(self) -> float:
        return self.sent.get("embedding_ids", 0.0)

    @property
    def crossing_bytes(self) -> float:
        """All that crosses for embeddings: vectors, their gradients, and the ids that ask for them."""
        return self.embedding_bytes + self.id_bytes

    @property
    def gradient_bytes(self) -> float:
        return sum(self.sent.get(name, 0.0) for name in GRADIENTS)

    def layers(self) -> dict[str, float]:
        """How many times fewer bytes each layer leaves, forward and backward together.

        A layer that acts in one direction alone leaves the other's bytes as they are, so the factors multiply
        to the whole.
        """
        left = {name: self.dense.get(name, 0.0) for name in MOVED}
        found = {}
        for layer in LAYERS:
            before = sum(left.values())
            acts = {name: self.sent[f"{name}/{layer}"] for name in MOVED if f"{name}/{layer}" in self.sent}
            left.update(acts)
            after = sum(left.values())
            if acts and before and after:
                found[layer] = before / after
        return found


def outcomes(events: Iterable[dict[str, Any]]) -> list[Outcome]:
    """Collect the job's events by configuration; the baseline, if it was run, comes first."""
    found: dict[str, Outcome] = {}
    step_ms: dict[str, list[float]] = {}
    on_wire: dict[str, list[float]] = {}
    by_class: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for event in events:
        if event["event"] not in ("run", "epoch", "trained"):
            continue
        name = event["config"]
        outcome = found.setdefault(name, Outcome(name))
        if event["event"] == "run":
            outcome.exchange = event["exchange"]
        elif event["event"] == "epoch":
            outcome.auc[event["seed"]] = event["auc"]
            outcome.log_loss[event["seed"]] = event["log_loss"]
            outcome.epochs.append({key: event[key] for key in ("seed", "epoch", "auc", "log_loss")})
        else:
            step_ms.setdefault(name, []).append(event["step_ms"])
            if event["interface_bytes"] is not None:
                on_wire.setdefault(name, []).append(event["interface_bytes"])
            for cls, amount in event["bytes"].items():
                pairs = by_class.setdefault(name, {}).setdefault(cls, [])
                pairs.append((amount["dense"], amount["sent"]))
    for name, outcome in found.items():
        runs = len(step_ms.get(name, []))
        outcome.step_ms = statistics.median(step_ms[name]) if runs else 0.0
        outcome.interface_bytes = statistics.fmean(on_wire[name]) if name in on_wire else None
        for cls, pairs in by_class.get(name, {}).items():
            outcome.dense[cls] = sum(dense for dense, _ in pairs) / runs
            outcome.sent[cls] = sum(sent for _, sent in pairs) / runs
    baseline = found.get(BASELINE)
    if baseline is not None:
        for outcome in found.values():
            _against(baseline, outcome)
    return sorted(found.values(), key=lambda outcome: outcome.name != BASELINE)


def _against(baseline: Outcome, outcome: Outcome) -> None:
    if outcome is baseline:
        return
    seeds = sorted(baseline.auc.keys() & outcome.auc.keys())
    if seeds:
        outcome.auc_difference = paired([outcome.auc[s] - baseline.auc[s] for s in seeds])
        outcome.log_loss_difference = paired([outcome.log_loss[s] - baseline.log_loss[s] for s in seeds])
    if outcome.embedding_bytes:
        outcome.embedding_reduction = baseline.embedding_bytes / outcome.embedding_bytes
    if outcome.crossing_bytes:
        outcome.crossing_reduction = baseline.crossing_bytes / outcome.crossing_bytes
    if outcome.gradient_bytes:
        outcome.gradient_reduction = baseline.gradient_bytes / outcome.gradient_bytes


def _mean(values: Iterable[float]) -> str:
    listed = list(values)
    return f"{statistics.fmean(listed):.4f}" if listed else ""


def _quality_rows(found: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    header = ["", "AUC", "difference", "log loss", "difference", "seeds"]
    return header, [
        [
            o.name,
            _mean(o.auc.values()),
            "" if o.auc_difference is None else str(o.auc_difference),
            _mean(o.log_loss.values()),
            "" if o.log_loss_difference is None else str(o.log_loss_difference),
            str(len(o.auc)),
        ]
        for o in found
    ]


def _byte_rows(found: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    header = ["", "embeddings", "fewer", "ids", "with ids", "fewer"]
    return header, [
        [
            outcome.name,
            format_bytes(outcome.embedding_bytes),
            _times(outcome.embedding_reduction),
            format_bytes(outcome.id_bytes),
            format_bytes(outcome.crossing_bytes),
            _times(outcome.crossing_reduction),
        ]
        for outcome in found
    ]


def _layer_rows(found: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for outcome in found:
        layers = outcome.layers()
        rows.append(
            [
                outcome.name,
                *(_times(layers.get(layer)) for layer in LAYERS),
                format_bytes(outcome.gradient_bytes),
                _times(outcome.gradient_reduction),
            ]
        )
    return ["", *LAYERS, "MLP gradients", "fewer"], rows


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.3g}x"


_TITLES = (
    "Quality on the test part: mean over seeds, difference to dense with 95 % interval",
    "Bytes per step, all ranks: embeddings forward + backward, ids that ask for them",
    "Saving of each layer on embeddings (they multiply), and bytes of MLP gradients",
)


def _all_rows(found: Sequence[Outcome]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of every table."""
    made = zip(_TITLES, (_quality_rows(found), _byte_rows(found), _layer_rows(found)), strict=True)
    return [(title, header, rows) for title, (header, rows) in made]


def tables(found: Sequence[Outcome]) -> list[Table]:
    """For the terminal (rich): quality, bytes, and layers; 80 columns hold names of 16."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = []
    for title, header, rows in _all_rows(found):
        table = Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        for number, column in enumerate(header):
            first = number == 0
            table.add_column(column, justify="left" if first else "right", overflow="fold", no_wrap=not first)
        for row in rows:
            table.add_row(*row)
        made.append(table)
    return made


def markdown(found: Sequence[Outcome], *, command: str, data: str) -> str:
    """The same tables as Markdown, with the command that makes them."""
    lines = [f"{data}:", "", "```", command, "```"]
    for title, header, rows in _all_rows(found):
        lines += ["", f"{title}.", "", _row(header), "|---|" + "--:|" * (len(header) - 1)]
        lines += [_row(row) for row in rows]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Everything, for JSON."""

    def interval(value: Interval | None) -> dict[str, Any] | None:
        return None if value is None else {"mean": value.mean, "half_width": value.half, "pairs": value.pairs}

    return {
        "auc": outcome.auc,
        "log_loss": outcome.log_loss,
        "auc_difference": interval(outcome.auc_difference),
        "log_loss_difference": interval(outcome.log_loss_difference),
        "embedding_bytes_per_step": outcome.embedding_bytes,
        "id_bytes_per_step": outcome.id_bytes,
        "gradient_bytes_per_step": outcome.gradient_bytes,
        "crossing_bytes_per_step": outcome.crossing_bytes,
        "crossing_reduction": outcome.crossing_reduction,
        "embedding_reduction": outcome.embedding_reduction,
        "gradient_reduction": outcome.gradient_reduction,
        "layers": outcome.layers(),
        "bytes_per_step": {
            cls: {"dense": outcome.dense[cls], "sent": outcome.sent[cls]} for cls in sorted(outcome.sent)
        },
        "interface_bytes_per_step": outcome.interface_bytes,
        "step_ms": outcome.step_ms,
        "exchange": outcome.exchange,
        "epochs": outcome.epochs,
    }


def draw(found: Sequence[Outcome], path: Path, *, title: str, margin: float = 0.002) -> None:
    """Difference in AUC against bytes of embeddings and their gradients, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    axes.axhspan(-margin, margin, color="tab:green", alpha=0.12, label=f"within {margin:g}")
    axes.axhline(0.0, color="black", linewidth=0.8)
    colors = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for number, outcome in enumerate(o for o in found if o.crossing_bytes):
        difference = outcome.auc_difference
        axes.errorbar(
            outcome.crossing_bytes,
            0.0 if difference is None else difference.mean,
            yerr=None if difference is None else difference.half,
            fmt="os^Dvp"[number // len(colors) % 6],
            color=colors[number % len(colors)],
            label=outcome.name,
            capsize=3,
            markersize=6,
        )
    axes.set_xscale("log")
    axes.set_xlabel("bytes per step for embeddings: vectors, gradients, ids; all ranks")
    axes.set_ylabel("AUC difference to dense (paired, 95 % interval)")
    axes.set_title(title, fontsize=10)
    # Beside the axes: names at the points would cover each other.
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
