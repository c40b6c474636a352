"""Averages of weights, as LocalSGD takes them: differences from the last average are thresholded and sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .quorum import QuorumPeers, Statement
from .residuals import ReplicaResiduals

#: Version of the references of a replica that has none.
NONE = -1


class AveragedWeights:
    """The last committed average of each tensor, the same on all replicas.

    A weight is no gradient: its small entries are not those that matter least. The differences from the last
    average are. Where a replica lacks the others' last average, all weights are summed densely once.

    Args:
        residuals: The streams of the differences.

    Attributes:
        version: Step in which the averages were committed.
    """

    def __init__(self, residuals: ReplicaResiduals) -> None:
        self.version = NONE
        self._residuals = residuals
        self._averages: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}
        self._dense = True

    def enter(self, statements: Sequence[Statement]) -> None:
        """Go on with the replicas of a new quorum."""
        versions = {each.reference for each in statements}
        self._dense = NONE in versions or len(versions) > 1

    def settle(self, step: int, *, committed: bool) -> None:
        """Take over the averages of the last round, if it was ``committed``; ``step`` are committed then."""
        if committed and self._pending:
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
        if self._dense:
            if len(peers.ranks) > 1:
                peers.all_reduce(weights)
            self._pending[name] = weights / count
            return
        last = self._averages[name]
        difference = weights.to(torch.float32) - last if participates else torch.zeros_like(last)
        self._residuals.reduce(name, difference, step=step, scale=1.0 / count, participates=participates)
        self._pending[name] = last + difference.to(last.dtype)
        torch.mul(self._pending[name], count, out=weights)
