"""Thresholded updates of weights between nodes: they cross once, and are gathered inside the node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..plan import Part, Shard
from .ranks import NodeRanks


class UpdatesBetweenNodes:
    """Updates of weights whose messages go to one rank of each node, which all the others get them from.

    Args:
        node: The ranks of this rank's node.
        layout: Positions in the host's process group of each node's ranks.
    """

    def __init__(self, node: NodeRanks, layout: Sequence[Sequence[int]]) -> None:
        self._node = node
        self._place = {r: (number, at) for number, ranks in enumerate(layout) for at, r in enumerate(ranks)}

    def exchanged(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, Shard]]:
        """Yield the shards that ranks with this rank's position own, and each as a whole of its node."""
        for shard in shards:
            number, at = self._place[shard.owner]
            if at == self._node.position:
                yield shard, Shard(number, 0, shard.stop - shard.start)

    def gather(self, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]]) -> None:
        """Give every rank of the node the weights that the others updated; a collective of these ranks.

        ``entries`` are those of :meth:`ParameterUpdates.update`.
        """
        weights = [(name, working) for name, working, _ in entries]
        self._node.gather("weights", weights, held={n: self._held(shards) for n, _, shards in entries})

    def _held(self, shards: Sequence[Shard]) -> list[list[Part]]:
        """Return the bounds of the shards by their owners' positions."""
        ranks = range(self._node.size)
        return [[(s.start, s.stop) for s in shards if self._place[s.owner][1] == at] for at in ranks]
