"""Thresholded updates of weights between nodes: they cross once, and are gathered inside the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...transport.node_transport import copy_all
from ..plan import Part, Shard, common
from .ranks import NodeRanks


class UpdatesBetweenNodes:
    """Updates of weights whose messages go to one rank of each node, which all the others get them from.

    Args:
        node: The ranks of this rank's node.
        layout: Positions in the host's process group of each node's ranks.
        pending: Whether every rank is to know what the node's owners have not sent of its part of a tensor.

    Attributes:
        pending: By name, a shard of this rank's part, and what the node's owners have not sent of it (fp32).
    """

    def __init__(self, node: NodeRanks, layout: Sequence[Sequence[int]], own: int, *, pending: bool) -> None:
        self._node, self._own, self._wants_pending = node, own, pending
        self._place = {r: (number, at) for number, ranks in enumerate(layout) for at, r in enumerate(ranks)}
        self.pending: dict[str, tuple[Shard, Tensor]] = {}

    def exchanged(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, Shard]]:
        """Yield the shards that ranks with this rank's position own, and each as a whole of its node."""
        for shard in shards:
            number, at = self._place[shard.owner]
            if at == self._node.position:
                yield shard, Shard(number, 0, shard.stop - shard.start)

    def gather(
        self,
        entries: Sequence[tuple[str, Tensor, Sequence[Shard]]],
        pending_of: Callable[[str], tuple[Shard, Tensor] | None],
    ) -> None:
        """Give every rank of the node the weights that the others updated; a collective of these ranks.

        Args:
            entries: See :meth:`ParameterUpdates.update`.
            pending_of: Returns what this rank has not sent of its own shard.
        """
        weights = [(name, working) for name, working, _ in entries]
        self._node.gather("weights", weights, held={n: self._held(shards) for n, _, shards in entries})
        if self._wants_pending:
            self._share_pending(entries, pending_of)

    def _share_pending(
        self,
        entries: Sequence[tuple[str, Tensor, Sequence[Shard]]],
        pending_of: Callable[[str], tuple[Shard, Tensor] | None],
    ) -> None:
        """Tell the other ranks of the node what this rank has not sent of their parts of its shards."""
        node, ranks = self._node, range(self._node.size)
        outgoing: list[list[Tensor]] = [[] for _ in ranks]
        incoming: list[list[Tensor]] = [[] for _ in ranks]
        nothing, self.pending = torch.empty(0, device=node.exchange.device), {}
        for name, working, shards in entries:
            parts = node.parts(name, working.numel())
            if not node.is_divided(working.numel()):
                continue
            held = self._held([shard for shard in shards if self._place[shard.owner][0] == self._own])
            owned = [[common(parts[node.position], each) for each in held[rank]] for rank in ranks]
            bounds = [each for of in owned for each in of if each[0] < each[1]]
            first, last = min(bounds, default=(0, 0))[0], max([stop for _, stop in bounds], default=0)
            known = torch.zeros(last - first, device=nothing.device)
            own = pending_of(name)
            for rank in ranks:
                incoming[rank] += [known[a - first : b - first] if a < b else nothing for a, b in owned[rank]]
                for start, stop in held[node.position]:
                    a, b = common(parts[rank], (start, stop))
                    # Cloned, since the next name may use the same memory.
                    unsent = nothing if own is None or a == b else own[1][a - start : b - start].clone()
                    outgoing[rank].append(
                        unsent if own is not None else torch.zeros(b - a, device=known.device)
                    )
            if bounds:
                offset = parts[node.position][0]
                self.pending[name] = Shard(self._own, first - offset, last - offset), known
        arrived = node.all_to_all_in_node(
            "unsent", outgoing, incoming, [(name, working) for name, working, _ in entries]
        )
        arrived[node.position] = outgoing[node.position]
        copy_all(incoming, arrived)

    def _held(self, shards: Sequence[Shard]) -> list[list[Part]]:
        """Return the bounds of the shards by their owners' positions."""
        ranks = range(self._node.size)
        return [[(s.start, s.stop) for s in shards if self._place[s.owner][1] == at] for at in ranks]
