"""Dense sums inside a node, around the thresholded messages between nodes.

Every rank gets its part of the mean of its node's gradients, dense, over the fast link. The ranks that have
the same part on different nodes exchange it by a topology, as if the node were one rank. The sums are
gathered inside the node. So a node has one residual, of which each rank keeps its part. Updates of weights
cross once between nodes, too, and are gathered inside the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ...metrics import Record
from ..plan import Entries, Part, Shard, common
from ..stream_group import StreamGroup
from .ranks import NodeRanks, Wanted


class NodeSums:
    """Gradients on their way into an exchange between nodes, and sums on their way out of it.

    Args:
        node: The ranks of this rank's node.
        group: Streams and metrics.
        preparing: Surrounds work before an exchange between nodes, see :meth:`.PlanExchanges.preparing`.
    """

    def __init__(
        self, node: NodeRanks, group: StreamGroup, preparing: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._node, self._group, self._preparing = node, group, preparing
        self._node_of = {rank: number for number, ranks in enumerate(group.layout) for rank in ranks}
        self._reduced: list[tuple[Entries, Wanted | None]] = []
        """Tensors that are being reduced, and what each rank of the node gets of them."""

    def reduce_in_node(
        self, entries: Entries, shards: Sequence[Sequence[Shard]] | None, exchange_record: Record
    ) -> tuple[Entries, Sequence[Sequence[Shard]] | None]:
        """Return what takes part in the exchange in place of this rank's gradients, and its shards where the
        host names owners; a collective.
        """
        self._node.exchange.step = self._group.step
        with exchange_record.timed("exchange"), self._preparing():
            parts = self._node.means(entries, in_place=True)
        owners = None if shards is None else {n: s for (n, _), s in zip(entries, shards, strict=True)}
        wanted = None if owners is None else {name: self._wanted(of) for name, of in owners.items()}
        self._reduced.append((entries, wanted))
        if owners is None:
            return parts, None
        return parts, [self._nodes_as_owners(name, owners[name]) for name, _ in parts]

    def gather_in_node(self, exchange_record: Record) -> None:
        """Give the ranks the sums of what was reduced, behind its exchange; a collective."""
        reduced, self._reduced = self._reduced, []
        with exchange_record.timed("exchange"):
            for entries, wanted in reduced:
                self._node.gather("gather", entries, wanted)

    def _wanted(self, shards: Sequence[Shard]) -> list[list[Part]]:
        """Return what each rank of this node owns of a tensor."""
        own = self._group.layout[self._group.rank]
        return [[(s.start, s.stop) for s in shards if s.owner == rank] for rank in own]

    def _nodes_as_owners(self, name: str, shards: Sequence[Shard]) -> list[Shard]:
        """Return what each node owns of this rank's part of a tensor."""
        part = self._node.part(name, max(shard.stop for shard in shards))
        found: list[Shard] = []
        for shard in sorted(shards, key=lambda shard: shard.start):
            start, stop = (bound - part[0] for bound in common(part, (shard.start, shard.stop)))
            owner = self._node_of[shard.owner]
            if found and found[-1].owner == owner and found[-1].stop == start:
                found[-1] = Shard(owner, found[-1].start, stop)
            elif start < stop:
                found.append(Shard(owner, start, stop))
        return found


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
