"""What communication costs in the demo's two runs, and step times on slower links: measured, or computed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dct_plugin.links.interleave import Figures, interleaved, warmed
from dct_plugin.links.namespaces import Links, rate_name
from dct_plugin.links.team import NETWORKS, Team

from .figures import Run

__all__ = ["LINKS", "Comparison", "Cost", "Link", "Measured", "measured_on", "read_metrics", "ring_bytes"]

Metrics = Sequence[dict[str, Any]]

#: Rates for which step times are computed: name, bits per second.
LINKS = (("100 Mbit/s", 100e6), ("1 Gbit/s", 1e9), ("10 Gbit/s", 10e9))

_ON_LINKS = "dct_plugin.integrations.dlrm.on_links:Trainings"

#: Bytes on the wire per payload byte, and per step beside it, that the ranks themselves may account for.
HEADERS, PER_STEP = 1.1, 4096

#: Ratio of the computation times of the two runs above which the machine is called busy.
BUSY = 1.25


def ring_bytes(numel: int, ranks: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of ``numel`` fp32 numbers."""
    return 2 * (ranks - 1) / ranks * 4 * numel


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of the plugin's metrics file; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _per_step(metrics: Metrics, *names: str) -> dict[int, float]:
    """Sum of the named figures over the tensor classes, for every step."""
    sums: dict[int, float] = {}
    for line in metrics:
        sums[line["step"]] = sums.get(line["step"], 0.0) + sum(line[name] for name in names)
    return sums


@dataclass
class Cost:
    """What one rank sends and waits for in an optimizer step."""

    payload_bytes: float
    """Gradient bytes that it hands to the network, without the transport's headers."""
    exchange_ms: float
    codec_ms: float = 0.0
    """Selecting, encoding and decoding."""
    density: float = 1.0
    density_target: float = 1.0
    densities: list[tuple[int, float]] = field(default_factory=list)
    """Step, and share of the entries that were sent in it."""

    @classmethod
    def of_dense(cls, run: Run, metrics: Metrics, *, ranks: int) -> Cost:
        """Of the uncompressed run; ``metrics`` of the DCT run say what it sends."""
        payload = statistics.fmean(_per_step(metrics, "dense_bytes").values())
        # Timed was a ring all-reduce of all gradients once per step in fp32; the run may send more or less.
        return cls(payload, run.all_reduce_ms * payload / ring_bytes(run.weights, ranks))

    @classmethod
    def of_dct(cls, metrics: Metrics, *, density_target: float) -> Cost:
        """Of the DCT run, from the lines of the plugin's metrics file (every=1)."""
        gradients = [line for line in metrics if line["class"] == "gradient" and line["density"] is not None]
        densities = [(line["step"], line["density"]) for line in gradients]
        # Bytes as they add up; times as medians, which a busy machine disturbs less.
        return cls(
            payload_bytes=statistics.fmean(_per_step(metrics, "sent_bytes").values()),
            exchange_ms=statistics.median(_per_step(metrics, "exchange_ms").values()),
            codec_ms=statistics.median(_per_step(metrics, "select_ms", "encode_ms", "decode_ms").values()),
            density=statistics.fmean(density for _, density in densities) if densities else 1.0,
            density_target=density_target,
            densities=densities,
        )


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


@dataclass(frozen=True)
class Measured:
    """Steps that were measured on links of one rate: dense in fp32, dense in bf16, and with DCT."""

    name: str
    dense: Figures
    bf16: Figures
    dct: Figures

    @property
    def speed_up(self) -> float:
        """Dense in fp32 over DCT: above 1 DCT is faster."""
        return self.dense.median / self.dct.median

    @property
    def speed_up_bf16(self) -> float:
        """Dense with bf16 communication over DCT."""
        return self.bf16.median / self.dct.median


def measured_on(
    rates: Sequence[str],
    dense: Mapping[str, Any],
    dct: Mapping[str, Any],
    *,
    ranks: int,
    data: Mapping[str, Any],
    seconds: float,
    folder: Path,
) -> list[Measured]:
    """Step times of both configurations between ranks in namespaces of their own.

    Args:
        rates: Of the links, in the notation of ``tc``.
        dense, dct: DeepSpeed JSON; the first also runs with bf16 communication.
        ranks: How many.
        data: Options ``format``, ``data`` and ``max_rows`` of :class:`~.on_links.Trainings`.
        seconds: To measure at each rate, about.
        folder: For the ranks' output.

    Raises:
        LinksError: There can be no namespaces here.
        TeamError: A rank failed.
    """
    configs = {"dense": dense, "bf16": {**dense, "communication_data_type": "bf16"}, "dct": dct}
    options = {**data, "configs": {"": configs}}
    found = []
    with (
        Links(ranks, NETWORKS) as links,
        Team(_ON_LINKS, ranks, links, options=options, folder=folder, name="links") as team,
    ):
        methods = team.open("")
        warmed(team.block, methods)
        for rate in rates:
            links.limit(rate)
            found.append(Measured(rate_name(rate), *interleaved(team.block, list(methods), seconds)))
        team.close()
    return found


@dataclass
class Comparison:
    """Dense against DCT, one seed each. See :meth:`links` for what is computed rather than measured."""

    dense: Run
    dct: Run
    dense_cost: Cost
    dct_cost: Cost
    ranks: int
    zero_stage: int = 0
    measured: list[Measured] = field(default_factory=list)

    def __post_init__(self) -> None:
        # GPUs of one machine may talk past its network interfaces: then these bytes are not the ranks'.
        wire = self.dense.wire_bytes
        if wire is not None and wire < self.ranks * self.dense_cost.payload_bytes / 2:
            self.dense.wire_bytes = self.dct.wire_bytes = None

    @property
    def sides(self) -> tuple[tuple[Run, Cost], tuple[Run, Cost]]:
        return (self.dense, self.dense_cost), (self.dct, self.dct_cost)

    @property
    def auc_difference(self) -> float:
        return self.dct.mean_auc - self.dense.mean_auc

    @property
    def log_loss_difference(self) -> float:
        return self.dct.mean_log_loss - self.dense.mean_log_loss

    @property
    def reduction(self) -> float:
        """Dense over DCT payload bytes."""
        return self.dense_cost.payload_bytes / self.dct_cost.payload_bytes

    @property
    def wire_reduction(self) -> float | None:
        """Dense over DCT bytes by the interface's counter."""
        if not self.dense.wire_bytes or not self.dct.wire_bytes:
            return None
        return self.dense.wire_bytes / self.dct.wire_bytes

    @property
    def unexplained(self) -> float:
        """Largest share of the bytes on the wire that is neither payload nor headers (stage 0; else 0)."""
        share = 0.0
        for run, cost in self.sides:
            if run.wire_bytes and self.zero_stage == 0:
                explained = HEADERS * self.ranks * cost.payload_bytes + PER_STEP
                share = max(share, 1 - explained / run.wire_bytes)
        return share

    @property
    def compute_ms(self) -> float:
        """Forward, backward and optimizer: the same in both runs, so that the less disturbed one tells."""
        return min(self._compute_ms)

    @property
    def disturbed(self) -> bool:
        """Whether the same computation took much longer in one run than in the other."""
        return max(self._compute_ms) > BUSY * min(self._compute_ms)

    @property
    def _compute_ms(self) -> list[float]:
        return [max(0.0, run.step_ms - cost.exchange_ms - cost.codec_ms) for run, cost in self.sides]

    @property
    def overhead_ms(self) -> float:
        """What DCT adds to the computation: the larger of its own account and of the difference in step
        times.
        """
        beside = self.dct.step_ms - self.compute_ms - self.dct_cost.exchange_ms
        return max(self.dct_cost.codec_ms, beside)

    def links(self) -> list[Link]:
        """Step times computed for slower links: compute + compression + bytes that a rank sends / rate.

        Computation and compression are as measured here; latency and overlap of communication with
        computation are left out, for both.
        """

        def milliseconds(run: Run, cost: Cost, rate: float) -> float:
            sent = cost.payload_bytes if run.wire_bytes is None else run.wire_bytes / self.ranks
            return 8e3 * sent / rate

        dense, dct = self.sides
        return [
            Link(
                name,
                rate,
                dense_ms=self.compute_ms + milliseconds(*dense, rate),
                dct_ms=self.compute_ms + self.overhead_ms + milliseconds(*dct, rate),
            )
            for name, rate in LINKS
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything in the table and the plot, for JSON."""

        def side(run: Run, cost: Cost) -> dict[str, Any]:
            (losses,) = run.losses.values()
            names = ("name", "steps", "epochs", "wire_bytes", "step_ms", "seconds", "ranks_in_step")
            measured = {name: getattr(run, name) for name in names}
            measured |= {"auc": run.mean_auc, "log_loss": run.mean_log_loss, "losses": losses}
            return {**measured, **asdict(cost)}

        return {
            "dense": side(*self.sides[0]),
            "dct": side(*self.sides[1]),
            "auc_difference": self.auc_difference,
            "log_loss_difference": self.log_loss_difference,
            "reduction_payload": self.reduction,
            "reduction_wire": self.wire_reduction,
            "compute_ms": self.compute_ms,
            "overhead_ms": self.overhead_ms,
            "measured_step_ms": [asdict(each) | {"speed_up": each.speed_up} for each in self.measured],
            "computed_step_ms": [{**asdict(link), "speed_up": link.speed_up} for link in self.links()],
        }
