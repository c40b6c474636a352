"""Residuals, thresholds and steps of the tensors that a replica all-reduces. They outlive a quorum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dct_plugin import checkpoint
from dct_plugin.compression.feedback import unpacked
from dct_plugin.config import DCTConfig
from dct_plugin.console import logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.errors import ConfigError
from dct_plugin.metrics import Metrics

from .quorum import QuorumPeers, Statement


@dataclass
class Round:
    """The all-reduces between two decisions on a commit.

    Attributes:
        step: Steps committed before.
        fragment: The fragment of DiLoCo that they are of, as the beginning of names; empty without fragments.
        large, small: All-reduces so far of tensors that are thresholded, and of those that are not.
    """

    step: int
    fragment: str = ""
    large: int = 0
    small: int = 0


@dataclass
class Counts:
    """Counts of the events of a replica.

    Attributes:
        quorums: Quorums that it took part in.
        replicas_left: Replicas that were in a quorum and not in the next one.
        steps_rolled_back: Steps that it did not commit.
        times_healed: Times that it took over the state of another replica.
        entries_lost: Entries of residuals that were lost with another replica, or dropped to heal.
    """

    quorums: int = 0
    replicas_left: int = 0
    steps_rolled_back: int = 0
    times_healed: int = 0
    entries_lost: int = 0


class ReplicaResiduals:
    """The streams of one replica, over any number of quorums.

    Tensors have no names: the order of the all-reduces in a round tells which is which.

    Args:
        config: The configuration.
        metrics: The metrics to record in; None makes them with the first quorum.
        report: Makes them, of this replica's position and the number of replicas.

    Attributes:
        counts: The events of this replica so far.
    """

    def __init__(
        self, config: DCTConfig, metrics: Metrics | None, report: Callable[[int, int], Metrics]
    ) -> None:
        self.config, self.metrics, self.counts, self._report = config, metrics, Counts(), report
        self._peers: QuorumPeers | None = None
        self._reducer: GradientReducer | None = None
        self._state = checkpoint.FRESH
        self._tensors: dict[str, tuple[int, torch.dtype]] = {}
        self._round: Round | None = None

    # -- quorums ---

    def enter(self, peers: QuorumPeers) -> None:
        """Go on with the replicas of a new quorum; the last round must be settled."""
        if self.metrics is None:
            self.metrics = self._report(peers.rank, len(peers.ranks))
        self.metrics.rank, self.metrics.world_size = peers.rank, len(peers.ranks)
        self.counts.quorums += 1
        if self._peers is not None:
            stay = {each.process for each in peers.statements}
            if gone := [each.name for each in self._peers.statements if each.process not in stay]:
                self._count_lost(gone, peers)
        self.leave()
        self._peers = peers

    def leave(self) -> None:
        """Keep what was not sent, without the connections of the last quorum."""
        if self._reducer is not None:
            self._state = carried(self._reducer.state_dict())
            self._reducer = None

    def _count_lost(self, gone: list[str], peers: QuorumPeers) -> None:
        self.counts.replicas_left += len(gone)
        norm = max(each.debt for each in peers.statements)
        self._lose("replicas_left", len(gone) * sum(numel for numel, _ in self._tensors.values()), norm, gone)
        if peers.rank == 0:
            logger.warning(
                f"dct: replica {', '.join(map(repr, gone))} has left after step {self._step}. What it had "
                f"not sent is lost: a gradient of norm {norm:.3g} or so, the largest of what the remaining "
                "replicas have not sent"
            )

    def _lose(self, event: str, entries: int, norm: float, replicas: list[str]) -> None:
        """Count entries of residuals that are lost."""
        self.counts.entries_lost += entries
        assert self.metrics is not None
        self.metrics.event(event, step=self._step, replicas=replicas, entries=entries, norm=norm)

    def debt(self) -> tuple[int, float]:
        """Return the entries of the residuals of this replica's own gradients, and their norm."""
        streams = (
            self._state["streams"] if self._reducer is None else self._reducer.group.streams.state_dict()
        )
        own = [s["residual"] for name, s in streams.items() if not checkpoint.is_answer(name)]
        residuals = [unpacked(residual) for residual in own if residual is not None]
        return sum(r.numel() for r in residuals), sum(float(r.norm()) ** 2 for r in residuals) ** 0.5

    @property
    def _step(self) -> int:
        return int(self._state["step"] if self._reducer is None else self._reducer.group.step)

    # -- rounds ---

    def settle(self, step: int) -> bool:
        """Keep what the last round changed if it was committed, else take it back; return which.

        Args:
            step: Steps committed by now.
        """
        last, self._round = self._round, None
        if last is None:
            return False
        committed = step > last.step
        self.counts.steps_rolled_back += not committed
        if self._reducer is not None:
            self._reducer.end_step(skipped=not committed)
        if committed and self.metrics is not None:
            self.metrics.step(step)
        return committed

    def name_of(self, tensor: Tensor, *, step: int, fragments: int) -> str:
        """Return the name of the stream of the next tensor of a round.

        Args:
            tensor: The tensor.
            step: Steps committed by now.
            fragments: Number of DiLoCo's fragments, which take turns.

        Raises:
            ConfigError: Another tensor was in its place before.
        """
        if self._round is None:
            self._round = Round(step, f"fragment {step % fragments} " if fragments > 1 else "")
        of = self._round
        if tensor.numel() < self.config.data_parallel.min_numel:
            of.small += 1
            return f"{of.fragment}small {of.small}"
        of.large += 1
        name = f"{of.fragment}all-reduce {of.large}"
        found = (tensor.numel(), tensor.dtype)
        known = self._tensors.setdefault(name, found)
        if found != known:
            raise ConfigError(
                f"dct: {name} of step {of.step} has {found[0]} entries of {found[1]}, and had {known[0]} of "
                f"{known[1]} before. What is not sent is kept by the order of the all-reduces: make all "
                "of min_numel entries or more in the same order in every step"
            )
        return name

    def reduce(self, name: str, tensor: Tensor, *, step: int, scale: float, participates: bool) -> None:
        """Replace a tensor by ``scale`` times its thresholded sum over the replicas of the quorum.

        Args:
            participates: False: the tensor is zeros and the residual stays as it is.
        """
        reducer = self._reducer_of(tensor.device)
        reducer.begin_step(step)
        flat = tensor.detach().view(-1)
        places: Sequence[dict[str, Any]] = (
            () if participates else (reducer.group.streams, reducer.group.streams.loaded)
        )
        held = [place.pop(name, None) for place in places]
        try:
            reducer.all_reduce([(name, flat)], scale=scale)
        finally:
            for place, kept in zip(places, held, strict=True):
                place.pop(name, None)
                if kept is not None:
                    place[name] = kept

    def _reducer_of(self, device: torch.device) -> GradientReducer:
        if self._reducer is None:
            assert self._peers is not None, "a quorum comes first"
            self._reducer = GradientReducer(
                self.config.data_parallel,
                self._peers,
                metrics=self.metrics,
                device=device,
                kernels=self.config.kernels,
                transactional=True,
            )
            self._reducer.load_state_dict(self._state)
        return self._reducer

    # -- healing ---

    def state_dict(self) -> dict[str, Any]:
        """Return what another replica needs to heal: thresholds and counters, not the residuals."""
        streams = {} if self._reducer is None else self._reducer.group.streams
        thresholds = {name: each.threshold.state_dict() for name, each in streams.items()}
        known = {name: each["threshold"] for name, each in self._state["streams"].items()} | thresholds
        return {
            "step": self._step,
            "tensors": dict(self._tensors),
            "thresholds": {name: each for name, each in known.items() if not checkpoint.is_answer(name)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state_dict` of another replica. The residuals of this one belong to weights that
        it no longer has, and are dropped, except those of sums that it owns in this quorum.
        """
        entries, norm = self.debt()
        if norm:
            dropped = f"what it had not sent is dropped: a gradient of norm {norm:.3g}"
            logger.warning(f"dct: this replica takes over another one's state; {dropped}")
            self._lose("healed", entries, norm, [])
        self.counts.times_healed += 1
        streams = {
            name: {"threshold": each, "residual": None, "shape": None}
            for name, each in state["thresholds"].items()
        }
        self._state = {"step": state["step"], "loss_scale": 1.0, "streams": streams}
        self._tensors = dict(state["tensors"])
        if self._reducer is not None:
            owned = {n: each for n, each in self._reducer.group.streams.items() if checkpoint.is_answer(n)}
            self._reducer.load_state_dict(self._state)
            self._reducer.group.streams.update(owned)


def carried(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reducer's state for another number of ranks. What an owner of sums has not sent of them
    becomes part of its own residual.
    """
    own = checkpoint.reshard([{"state": state, "unit": 1.0}])["streams"]
    streams = {}
    for name, each in state["streams"].items():
        if each["residual"] is None and not checkpoint.is_answer(name):
            streams[name] = each
        elif name in own:
            streams[name] = {**each, "residual": own[name]["residual"]}
    return {"step": state["step"], "loss_scale": state["loss_scale"], "streams": streams}


#: Version of the averages of a replica that has none.
NO_AVERAGE = -1


class AveragedWeights:
    """The last committed average of each tensor, the same on all replicas.

    A threshold cannot select weights: small weights matter, too. It selects entries of the difference from
    the last average. If a replica lacks the last average of the others, all weights are summed densely once;
    so is a tensor at whose position in the order another one was averaged before, or none.

    Args:
        residuals: The streams of the differences.

    Attributes:
        version: Number of committed steps when the averages were committed; -1 before the first.
    """

    def __init__(self, residuals: ReplicaResiduals) -> None:
        self.version = NO_AVERAGE
        self._residuals = residuals
        self._averages: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}
        self._dense = True

    def enter(self, statements: Sequence[Statement]) -> None:
        """Go on with the replicas of a new quorum."""
        versions = {each.reference for each in statements}
        self._dense = NO_AVERAGE in versions or len(versions) > 1

    def settle(self, step: int, *, committed: bool) -> None:
        """Take over the averages of the last round if it was ``committed``; ``step``: committed steps."""
        if committed and self._pending:
            if self._dense:  # all replicas have the same averages
                self._averages = {}
            self._averages.update(self._pending)
            self.version, self._dense = step, False
        self._pending = {}

    def reduce(
        self, name: str, weights: Tensor, peers: QuorumPeers, *, step: int, count: int, participates: bool
    ) -> None:
        """Replace weights by ``count`` times their average over the participants.

        Args:
            weights: Zeros on a replica that does not participate; changed in place.
        """
        last = self._averages.get(name)
        if self._dense or last is None or last.shape != weights.shape:
            if len(peers.ranks) > 1:
                peers.all_reduce(weights)
            self._pending[name] = weights / count
            return
        difference = weights.to(torch.float32) - last if participates else torch.zeros_like(last)
        self._residuals.reduce(name, difference, step=step, scale=1.0 / count, participates=participates)
        self._pending[name] = last + difference.to(last.dtype)
        torch.mul(self._pending[name], count, out=weights)
