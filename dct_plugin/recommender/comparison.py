"""The comparison of the demo's two runs: bytes of both, and step times on slower links."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dct_plugin.metrics import is_estimate
from dct_plugin.rates import rate_name
from dct_plugin.recommender.links.interleave import Figures, interleaved, warmed
from dct_plugin.recommender.links.namespaces import Links
from dct_plugin.recommender.links.team import NETWORKS, Team
from dct_plugin.report.reading import Row

from .figures import Run

#: Figures of a run that its JSON has as they are.
_SIDE = ("name", "steps", "epochs", "wire_bytes", "step_ms", "seconds", "ranks_in_step")

_ON_LINKS = "dct_plugin.recommender.on_links:Trainings"

#: Bytes on the wire per payload byte, and per step beside it, that the ranks themselves may account for.
HEADERS, PER_STEP = 1.1, 4096


def _per_step(metrics: Sequence[Row], name: str) -> dict[int, float]:
    """Sum a figure over the classes of the plugin's messages, for every step."""
    sums: dict[int, float] = {}
    for line in metrics:
        if not is_estimate(line.cls):
            sums[line.step] = sums.get(line.step, 0.0) + getattr(line, name)
    return sums


@dataclass
class Sent:
    """Bytes and entries that one rank of a run sends in an optimizer step."""

    payload_bytes: float
    """Bytes of gradients that the rank hands to the network, without the transport's headers."""
    density: float = 1.0
    density_target: float = 1.0
    densities: list[tuple[int, float]] = field(default_factory=list)
    """Step, and the share of the entries that were sent in it."""

    @classmethod
    def by_dense_run(cls, metrics: Sequence[Row]) -> Sent:
        """Return the bytes of the uncompressed run, which the metrics of the DCT run tell."""
        return cls(statistics.fmean(_per_step(metrics, "dense_bytes").values()))

    @classmethod
    def by_dct_run(cls, metrics: Sequence[Row], *, density_target: float) -> Sent:
        """Read the lines of the plugin's metrics file (``every: 1``)."""
        gradients = [line for line in metrics if line.cls == "gradient"]
        densities = [(line.step, line.density) for line in gradients if line.density is not None]
        return cls(
            payload_bytes=statistics.fmean(_per_step(metrics, "sent_bytes").values()),
            density=statistics.fmean(density for _, density in densities) if densities else 1.0,
            density_target=density_target,
            densities=densities,
        )


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
    """Dense against DCT, one seed each; ``measured`` is empty where no links can be made."""

    dense: Run
    dct: Run
    dense_sent: Sent
    dct_sent: Sent
    ranks: int
    zero_stage: int = 0
    measured: list[Measured] = field(default_factory=list)

    def __post_init__(self) -> None:
        # GPUs of one machine may talk past its network interfaces: then these bytes are not the ranks'.
        wire = self.dense.wire_bytes
        if wire is not None and wire < self.ranks * self.dense_sent.payload_bytes / 2:
            self.dense.wire_bytes = self.dct.wire_bytes = None

    @property
    def auc_difference(self) -> float:
        return self.dct.mean_auc - self.dense.mean_auc

    @property
    def log_loss_difference(self) -> float:
        return self.dct.mean_log_loss - self.dense.mean_log_loss

    @property
    def reduction(self) -> float:
        """The ratio of dense to DCT payload bytes."""
        return self.dense_sent.payload_bytes / self.dct_sent.payload_bytes

    @property
    def wire_reduction(self) -> float | None:
        """The ratio of dense to DCT bytes by the interface's counter; None without a counter."""
        if not self.dense.wire_bytes or not self.dct.wire_bytes:
            return None
        return self.dense.wire_bytes / self.dct.wire_bytes

    @property
    def unexplained(self) -> float:
        """The largest share of the bytes on the wire that is neither payload nor header (ZeRO-0)."""
        share = 0.0
        for run, sent in ((self.dense, self.dense_sent), (self.dct, self.dct_sent)):
            if run.wire_bytes and self.zero_stage == 0:
                explained = HEADERS * self.ranks * sent.payload_bytes + PER_STEP
                share = max(share, 1 - explained / run.wire_bytes)
        return share

    def as_dict(self) -> dict[str, Any]:
        """Return everything in the table and the charts, for JSON."""

        def side(run: Run, sent: Sent) -> dict[str, Any]:
            (losses,) = run.losses.values()
            measured = {name: getattr(run, name) for name in _SIDE}
            measured |= {"auc": run.mean_auc, "log_loss": run.mean_log_loss, "losses": losses}
            return {**measured, **asdict(sent)}

        return {
            "dense": side(self.dense, self.dense_sent),
            "dct": side(self.dct, self.dct_sent),
            "ranks": self.ranks,
            "zero_stage": self.zero_stage,
            "auc_difference": self.auc_difference,
            "log_loss_difference": self.log_loss_difference,
            "reduction_payload": self.reduction,
            "reduction_wire": self.wire_reduction,
            "measured_step_ms": [asdict(each) | {"speed_up": each.speed_up} for each in self.measured],
        }
