"""What the demo says about two runs, dense and DCT: figures, table, plot and verdict."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dct_plugin.metrics import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LINKS", "Comparison", "Link", "Run", "draw", "table", "verdict"]

#: Rates for which step times are computed: name, bits per second.
LINKS = (("100 Mbit/s", 100e6), ("1 Gbit/s", 1e9), ("10 Gbit/s", 10e9))

#: A loss of AUC up to this is called none.
MARGIN_AUC = 0.002

#: Bytes on the wire per payload byte, and per step beside it, that the ranks themselves may account for.
HEADERS, PER_STEP = 1.1, 4096


@dataclass
class Run:
    """Figures of one run. Bytes are per optimizer step, times in milliseconds per optimizer step."""

    name: str
    steps: int
    auc: float
    log_loss: float
    payload_bytes: float
    """Gradient bytes that one rank hands to the network, without the transport's headers."""
    wire_bytes: float | None
    """Bytes by the interface's counter, all ranks together; None where there is no counter."""
    density: float
    density_target: float
    step_ms: float
    seconds: float
    ranks_in_step: bool
    codec_ms: float = 0.0
    """Selecting, encoding and decoding."""
    exchange_ms: float = 0.0
    losses: list[float] = field(default_factory=list, repr=False)
    densities: list[tuple[int, float]] = field(default_factory=list, repr=False)

    @classmethod
    def from_events(
        cls,
        name: str,
        events: Sequence[dict[str, Any]],
        *,
        ranks: int,
        metrics: Sequence[dict[str, Any]] = (),
        density_target: float = 1.0,
    ) -> Run:
        """From the training script's events and, for DCT, the lines of the plugin's metrics file
        (every=1)."""
        start = next(event for event in events if event["event"] == "start")
        steps = [event for event in events if event["event"] == "step"]
        result = events[-1]
        count = len(steps)
        wire = result["interface_bytes"]
        run = cls(
            name=name,
            steps=count,
            auc=result["auc"],
            log_loss=result["log_loss"],
            payload_bytes=2 * (ranks - 1) / ranks * 4 * start["parameters"],  # a ring all-reduce in fp32
            wire_bytes=wire / count if wire else None,
            density=1.0,
            density_target=density_target,
            step_ms=statistics.median(step["ms"] for step in steps),
            seconds=result["seconds"],
            ranks_in_step=result["ranks_in_step"],
            exchange_ms=start["all_reduce_ms"],
            losses=[step["loss"] for step in steps],
        )
        if metrics:
            run._add_metrics(metrics)
        return run

    def _add_metrics(self, metrics: Sequence[dict[str, Any]]) -> None:
        def per_step(*names: str) -> dict[int, float]:
            sums: dict[int, float] = {}
            for line in metrics:
                sums[line["step"]] = sums.get(line["step"], 0.0) + sum(line[name] for name in names)
            return sums

        # Bytes as they add up; times as medians, which a busy machine disturbs less.
        self.payload_bytes = statistics.fmean(per_step("sent_bytes").values())
        self.codec_ms = statistics.median(per_step("select_ms", "encode_ms", "decode_ms").values())
        self.exchange_ms = statistics.median(per_step("exchange_ms").values())
        gradients = [line for line in metrics if line["class"] == "gradient" and line["density"] is not None]
        self.densities = [(line["step"], line["density"]) for line in gradients]
        if gradients:
            self.density = statistics.fmean(line["density"] for line in gradients)


@dataclass(frozen=True)
class Link:
    """Computed step times on a link of a given rate, milliseconds."""

    name: str
    bits_per_s: float
    dense_ms: float
    dct_ms: float

    @property
    def speed_up(self) -> float:
        """Dense over DCT: above 1 DCT is faster."""
        return self.dense_ms / self.dct_ms


@dataclass
class Comparison:
    """Dense against DCT. See :meth:`links` for what is computed rather than measured."""

    dense: Run
    dct: Run
    ranks: int
    zero_stage: int = 0

    def __post_init__(self) -> None:
        # GPUs of one machine may talk past its network interfaces: then these bytes are not the ranks'.
        dense = self.dense
        if dense.wire_bytes is not None and dense.wire_bytes < self.ranks * dense.payload_bytes / 2:
            self.dense.wire_bytes = self.dct.wire_bytes = None

    @property
    def reduction(self) -> float:
        """Dense over DCT payload bytes."""
        return self.dense.payload_bytes / self.dct.payload_bytes

    @property
    def wire_reduction(self) -> float | None:
        """Dense over DCT bytes by the interface's counter."""
        if self.dense.wire_bytes is None or self.dct.wire_bytes is None:
            return None
        return self.dense.wire_bytes / self.dct.wire_bytes

    @property
    def unexplained(self) -> float:
        """Largest share of the bytes on the wire that is neither payload nor headers (stage 0; else 0)."""
        share = 0.0
        for run in (self.dense, self.dct):
            if run.wire_bytes is not None and self.zero_stage == 0:
                explained = HEADERS * self.ranks * run.payload_bytes + PER_STEP
                share = max(share, 1 - explained / run.wire_bytes)
        return share

    @property
    def compute_ms(self) -> float:
        """Forward, backward and optimizer: the dense step without the all-reduce timed on the same link."""
        return max(0.0, self.dense.step_ms - self.dense.exchange_ms)

    @property
    def overhead_ms(self) -> float:
        """What DCT adds to the computation: the larger of its own account and of the difference in step
        times."""
        return max(self.dct.codec_ms, self.dct.step_ms - self.compute_ms - self.dct.exchange_ms)

    def links(self) -> list[Link]:
        """Step times computed for slower links: compute + compression + bytes that a rank sends / rate.

        Computation and compression are as measured here; latency and overlap of communication with
        computation are left out, for both.
        """

        def sent(run: Run) -> float:
            return run.payload_bytes if run.wire_bytes is None else run.wire_bytes / self.ranks

        links = []
        for name, rate in LINKS:
            dense = self.compute_ms + 8e3 * sent(self.dense) / rate
            dct = self.compute_ms + self.overhead_ms + 8e3 * sent(self.dct) / rate
            links.append(Link(name, rate, dense, dct))
        return links

    def as_dict(self) -> dict[str, Any]:
        """Everything in the table and the plot, for JSON."""
        return {
            "dense": asdict(self.dense),
            "dct": asdict(self.dct),
            "auc_difference": self.dct.auc - self.dense.auc,
            "log_loss_difference": self.dct.log_loss - self.dense.log_loss,
            "reduction_payload": self.reduction,
            "reduction_wire": self.wire_reduction,
            "compute_ms": self.compute_ms,
            "overhead_ms": self.overhead_ms,
            "computed_step_ms": [{**asdict(link), "speed_up": link.speed_up} for link in self.links()],
        }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of the plugin's metrics file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(comparison: Comparison, *, title: str) -> Table:
    """The demo's table (rich)."""
    from rich.table import Table

    dense, dct = comparison.dense, comparison.dct
    shown = Table(title=title, title_justify="left", caption_justify="left")
    shown.add_column("")
    for header in ("dense", "DCT", "difference"):
        shown.add_column(header, justify="right")
    shown.add_row("AUC (test)", f"{dense.auc:.4f}", f"{dct.auc:.4f}", f"{dct.auc - dense.auc:+.4f}")
    difference = f"{dct.log_loss - dense.log_loss:+.4f}"
    shown.add_row("Log loss (test)", f"{dense.log_loss:.4f}", f"{dct.log_loss:.4f}", difference)
    shown.add_row(
        "Payload per step and rank",
        format_bytes(dense.payload_bytes),
        format_bytes(dct.payload_bytes),
        _fewer(comparison.reduction),
    )
    if comparison.wire_reduction is not None and dense.wire_bytes and dct.wire_bytes:
        shown.add_row(
            "On the wire per step, all ranks",
            format_bytes(dense.wire_bytes),
            format_bytes(dct.wire_bytes),
            _fewer(comparison.wire_reduction),
        )
    shown.add_row(
        "Gradient entries sent (target)",
        "100 %",
        f"{100 * dct.density:#.3g} % ({100 * dct.density_target:#.3g} %)",
        "",
    )
    shown.add_row(
        "Step here, median",
        f"{dense.step_ms:.1f} ms",
        f"{dct.step_ms:.1f} ms",
        _faster(dense.step_ms / dct.step_ms),
        end_section=True,
    )
    for link in comparison.links():
        shown.add_row(
            f"Step at {link.name}, computed",
            f"{link.dense_ms:.1f} ms",
            f"{link.dct_ms:.1f} ms",
            _faster(link.speed_up),
        )
    return shown


def _fewer(times: float) -> str:
    return f"{times:.3g}x fewer" if times >= 1 else f"{1 / times:.3g}x more"


def _faster(times: float) -> str:
    return f"{times:.2f}x faster" if times >= 1 else f"{1 / times:.2f}x slower"


def verdict(comparison: Comparison, *, quick: bool = False) -> list[str]:
    """What the figures say, and what they do not, one paragraph each."""
    dense, dct = comparison.dense, comparison.dct
    difference = dct.auc - dense.auc
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

    links = comparison.links()
    speed = (
        "All ranks are on this machine and talk over its loopback interface, which is not the slow link that "
        f"DCT is for: here a DCT step was {_faster(dense.step_ms / dct.step_ms)}. The last rows are "
        f"computed, not measured: {comparison.compute_ms:.1f} ms of computation, "
        f"{comparison.overhead_ms:.1f} ms more for DCT (both as measured here), and bytes of a rank / rate "
        "of its link, without latency or overlap."
    )
    if faster := [link.name for link in links if link.speed_up >= 1]:
        speed += f" By that DCT is faster at {' and '.join(faster)}."
    if slower := [link.name for link in links if link.speed_up < 1]:
        speed += f" It is slower at {' and '.join(slower)}: leave it off there."

    paragraphs = [quality, speed]
    if comparison.wire_reduction is None:
        paragraphs.append("There are no interface counters here to check the payload bytes against.")
    elif comparison.unexplained > 0:
        paragraphs.append(
            f"{100 * comparison.unexplained:.0f} % of the bytes counted on the wire in one of the runs are "
            "neither payload nor headers: other programs use the loopback interface, too. For a clean count, "
            "run in a network namespace: "
            "unshare --user --map-root-user --net sh -c 'ip link set lo up; dct demo'"
        )
    if not (dense.ranks_in_step and dct.ranks_in_step):
        run = dct if dense.ranks_in_step else dense
        paragraphs.append(f"FAULT: the ranks of the {run.name} run ended with different weights.")
    return paragraphs


def draw(comparison: Comparison, path: Path, *, title: str) -> None:
    """Loss curves and the share of entries sent, over the steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    dense, dct = comparison.dense, comparison.dct
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    window = max(1, min(50, dense.steps // 20))
    for run, colour in ((dense, "tab:blue"), (dct, "tab:orange")):
        steps = range(window, len(run.losses) + 1)
        label = f"{run.name} (test AUC {run.auc:.4f})"
        above.plot(steps, moving_average(run.losses, window), color=colour, label=label, linewidth=1.2)
    above.set_ylabel(f"training loss, mean of {window} steps" if window > 1 else "training loss")
    above.legend()
    above.set_title(title, fontsize=10)
    # The first steps may be far above the rest, which is what one wants to see.
    shown = sorted(loss for run in (dense, dct) for loss in moving_average(run.losses, window))
    low, high = shown[0], shown[int(0.98 * (len(shown) - 1))]
    if high > low:
        above.set_ylim(low - 0.1 * (high - low), high + 0.2 * (high - low))
    if dct.densities:
        steps_sent, densities = zip(*dct.densities, strict=True)
        percent = [100 * d for d in densities]
        below.plot(steps_sent, percent, color="tab:orange", linewidth=0.8, label="sent")
        below.set_ylim(0, max(1.1 * max(percent), 200 * dct.density_target))
    below.axhline(100 * dct.density_target, color="black", linestyle="--", linewidth=0.8, label="target")
    below.set_ylabel("gradient entries sent, %")
    below.set_xlabel("optimizer step")
    below.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of every ``window`` consecutive values: ``len(values) - window + 1`` of them."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(b - a) / window for a, b in zip(sums, sums[window:], strict=False)]
