"""Averages of weights, as LocalSGD takes them: differences from the last average are thresholded and sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .quorum import QuorumPeers, Statement
from .residuals import ReplicaResiduals

#: Version of the averages of a replica that has none.
NO_AVERAGE = -1


class AveragedWeights:
    """The last committed average of each tensor, the same on all replicas.

    A threshold cannot select weights: small weights matter, too. It selects entries of the difference from
    the last average. If a replica lacks the last average of the others, all weights are summed densely once.

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
