"""The measured runs, from the trainer's events, and their differences to the uncompressed one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .intervals import Interval, paired

#: Name of the run that nothing is compressed in.
BASELINE = "dense"

#: Layers of the embedding exchange in the order in which they act.
LAYERS = ("lossless", "threshold", "bounded")

#: Classes of bytes that move embeddings and their gradients, or what stands in for them.
MOVED = ("embedding_forward", "embedding_backward", "des_forward", "des_backward")
_CROSSING = (*MOVED, "embedding_ids")
_GRADIENTS = ("gradient", "gradient_small", "gradient_answer", "gradient_warmup")
_PARAMETERS = ("parameter", "parameter_small", "parameter_full")

#: Kinds of payload, and their classes. ``crossing`` are vectors, their gradients and the ids that ask for
#: them, ``parameter`` updated weights from the owners of ZeRO's partitions to all ranks.
KINDS = {
    "embedding": MOVED,
    "id": ("embedding_ids",),
    "gradient": _GRADIENTS,
    "parameter": _PARAMETERS,
    "crossing": _CROSSING,
    "total": (*_CROSSING, *_GRADIENTS, *_PARAMETERS),
}


@dataclass(frozen=True)
class Difference:
    """A run against the uncompressed one: quality paired by seed, and how many times fewer bytes."""

    auc_difference: Interval | None = None
    log_loss_difference: Interval | None = None
    embedding_reduction: float | None = None
    crossing_reduction: float | None = None
    gradient_reduction: float | None = None
    total_reduction: float | None = None


@dataclass
class Run:
    """One configuration over all its seeds. Bytes are per optimizer step, all ranks together.

    ``sent`` and ``dense`` are payload bytes by class, as sent and had nothing been compressed. ``wire_bytes``
    are by the interface's counter, headers included; None where there is none. ``losses`` are those of rank
    0, ``auc`` and ``log_loss`` on the test part after the last epoch, ``seconds`` the training of one seed.
    ``weights`` counts the replicated ones; ``ranks_in_step`` says whether all ranks ended with the same ones.
    """

    name: str
    auc: dict[int, float] = field(default_factory=dict)  # by seed, like log_loss and losses
    log_loss: dict[int, float] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    exchange: list[str] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    dense: dict[str, float] = field(default_factory=dict)
    wire_bytes: float | None = None
    step_ms: float = 0.0
    seconds: float = 0.0
    ranks_in_step: bool = True
    batch_size: int = 0
    weights: int = 0
    difference: Difference = Difference()

    @property
    def steps(self) -> int:
        """Optimizer steps of one seed."""
        return len(next(iter(self.losses.values()), []))

    @property
    def mean_auc(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.auc.values())

    @property
    def mean_log_loss(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.log_loss.values())

    def sent_bytes(self, kind: str) -> float:
        """Return the bytes of a kind of :data:`KINDS`."""
        return sum(self.sent.get(name, 0.0) for name in KINDS[kind])

    def layers(self) -> dict[str, float]:
        """Return how many times fewer bytes each layer leaves, forward and backward together.

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

    def against(self, baseline: Run) -> Difference:
        """Difference to the uncompressed run, over the seeds that both have."""
        seeds = sorted(baseline.auc.keys() & self.auc.keys())

        def change(ours: dict[int, float], theirs: dict[int, float]) -> Interval | None:
            return paired([ours[seed] - theirs[seed] for seed in seeds]) if seeds else None

        def fewer(kind: str) -> float | None:
            ours = self.sent_bytes(kind)
            return baseline.sent_bytes(kind) / ours if ours else None

        return Difference(
            change(self.auc, baseline.auc),
            change(self.log_loss, baseline.log_loss),
            fewer("embedding"),
            fewer("crossing"),
            fewer("gradient"),
            fewer("total"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        same = ("auc", "log_loss", "step_ms", "ranks_in_step", "exchange", "epochs")
        return {
            **{name: getattr(self, name) for name in same},
            **asdict(self.difference),
            **{f"{kind}_bytes_per_step": self.sent_bytes(kind) for kind in KINDS},
            "layers": self.layers(),
            "bytes_per_step": {
                name: {"dense": self.dense[name], "sent": self.sent[name]} for name in sorted(self.sent)
            },
            "interface_bytes_per_step": self.wire_bytes,
        }


def read_runs(events: Iterable[dict[str, Any]]) -> list[Run]:
    """Collect the trainer's events by configuration; the uncompressed run, if there is one, comes first."""
    runs: dict[str, Run] = {}
    trained: dict[str, list[dict[str, Any]]] = {}
    losses: list[float] = []
    for event in events:
        kind = event["event"]
        if kind == "step":
            losses.append(event["loss"])
        if kind not in ("run", "epoch", "trained"):
            continue
        name, seed = event["config"], event["seed"]
        run = runs.setdefault(name, Run(name))
        if kind == "run":
            run.exchange, run.batch_size = event["exchange"], event["batch_size"]
            run.weights = event["parameters"][0]
            losses = run.losses.setdefault(seed, [])
        elif kind == "epoch":
            run.auc[seed], run.log_loss[seed] = event["auc"], event["log_loss"]
            run.epochs.append({key: event[key] for key in ("seed", "epoch", "auc", "log_loss")})
        else:
            trained.setdefault(name, []).append(event)
    for name, ends in trained.items():
        run = runs[name]
        run.step_ms = statistics.median(end["step_ms"] for end in ends)
        run.seconds = statistics.fmean(end["seconds"] for end in ends)
        run.ranks_in_step = all(end["ranks_in_step"] for end in ends)
        counted = [end["interface_bytes"] for end in ends if end["interface_bytes"] is not None]
        run.wire_bytes = statistics.fmean(counted) if counted else None
        for cls in {cls for end in ends for cls in end["bytes"]}:
            amounts = [end["bytes"][cls] for end in ends if cls in end["bytes"]]
            run.dense[cls] = sum(amount["dense"] for amount in amounts) / len(ends)
            run.sent[cls] = sum(amount["sent"] for amount in amounts) / len(ends)
    baseline = runs.get(BASELINE)
    if baseline is not None:
        for run in runs.values():
            if run is not baseline:
                run.difference = run.against(baseline)
    return sorted(runs.values(), key=lambda run: run.name != BASELINE)
