"""The topologies of one reducer: how they are chosen, and how one takes the place of another."""

from __future__ import annotations

from ..config.automatic import alternative_exchange, exchange_by_rule
from ..feedback import unpacked
from .direct import Direct
from .hierarchical import Hierarchical
from .node_ranks import NodeRanks
from .scatter import Scatter
from .stream_group import StreamGroup
from .topology import Topology
from .two_phase import TwoPhase


class Topologies:
    """The topologies of one reducer.

    Args:
        group: Its streams; it gets the ranks of its node where it has nodes.

    Attributes:
        everywhere: Topology of sums that all ranks get.
        small: That of tensors below ``min_numel``, where it is another one.
        scatter: Topology of sums that owners get.
        exchange: Name of the topology in use for sums that all ranks get, as ``exchange`` has it.
        by_rule: The one that the configuration asks for, or that has the fewest bytes.
        alternative: The other one, if the automatic mode may choose it; else None.
        sums_at_owners: True if the host has asked for sums that owners alone get.
    """

    everywhere: Topology
    small: Topology | None
    exchange = ""
    sums_at_owners = False

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self.by_rule = exchange_by_rule(group.settings, group.world_size)
        self.alternative: str | None = None
        # On a device slots are laid out for one topology.
        if group.world_size > 2 and not group.fixed_size:
            self.alternative = alternative_exchange(group.settings, self.by_rule)
        if group.nodes is not None:
            group.node = NodeRanks(
                group.nodes, group.device, group.settings.min_numel, group.metrics, group.backend
            )
        self.scatter = self._between_nodes(Scatter(group))
        self.use(None)

    def use(self, exchange: str | None) -> None:
        """Sum by another topology from the next reduction on, on all ranks alike; None: the one by rule.

        What a rank held back as an owner becomes a part of its own residuals, so that nothing is lost.
        """
        exchange, previous = exchange or self.by_rule, self.exchange
        if exchange == previous:
            return
        if previous == "two_phase":
            self._take_over_answers()
        group, direct = self._group, exchange == "direct"
        self.exchange = exchange
        self.everywhere = self._between_nodes(Direct(group) if direct else TwoPhase(group))
        self.small = self._between_nodes(TwoPhase(group)) if direct and group.world_size > 2 else None

    def _between_nodes(self, topology: Topology) -> Topology:
        node = self._group.node
        return topology if node is None else Hierarchical(topology, node, self._group)

    def _take_over_answers(self) -> None:
        """Add the residuals of this rank's sums to those of its gradients: ranks add up to the same sum."""
        streams = self._group.streams_state()
        for name, stream in list(streams.items()):
            if stream["residual"] is None:
                continue
            residual = unpacked(stream["residual"]).clone()
            for shard, answer in self.everywhere.held_back(name, residual.numel()):
                held_back = streams.pop(answer, {}).get("residual")
                if held_back is not None:
                    residual[shard.start : shard.stop] += unpacked(held_back)
            if name in streams:
                streams[name] = {**stream, "residual": residual}
        self._group.streams.clear()
        self._group.loaded = streams
