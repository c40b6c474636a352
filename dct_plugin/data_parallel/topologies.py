"""The choice of the topologies of one reducer, and the change from one to another in mid-training."""

from __future__ import annotations

from ..compression.feedback import unpacked
from ..policy.rules import alternative_exchange, exchange_by_rule
from .direct import Direct
from .hierarchical import Hierarchical
from .node_ranks import NodeRanks
from .scatter import Scatter
from .stream_group import StreamGroup
from .topology import Topology
from .two_phase import TwoPhase


class Topologies:
    """The topologies of one reducer: who sends what to whom.

    Args:
        group: The streams of the reducer. If it has nodes, ``group.node`` is set.

    Attributes:
        all_reduce: Topology of sums that all ranks get.
        small: Topology of tensors below ``min_numel``; None if it is that of all tensors.
        scatter: Topology of sums of which each owner gets its part.
        exchange: Name of the topology in ``all_reduce``, ``"direct"`` or ``"two_phase"``.
        by_rule: Name of the topology that the configuration asks for, or that has the fewest bytes.
        alternative: Name of the other one, if the automatic mode may choose it; else None.
        sums_at_owners: True if the host has asked for sums of which each owner gets its part.
    """

    all_reduce: Topology
    small: Topology | None
    exchange = ""
    sums_at_owners = False

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self.by_rule = exchange_by_rule(group.settings, group.world_size)
        self.alternative: str | None = None
        # Capacities of slots are agreed for one topology.
        if group.world_size > 2 and group.backend.lengths_on_host:
            self.alternative = alternative_exchange(group.settings, self.by_rule)
        if group.nodes is not None:
            group.node = NodeRanks(
                group.nodes, group.device, group.settings.min_numel, group.metrics, group.backend
            )
        self.scatter = self._between_nodes(Scatter(group))
        self.switch_to(None)

    def switch_to(self, exchange: str | None) -> None:
        """Sum by another topology from the next reduction on. All ranks switch in the same step.

        Nothing is lost: what a rank held back as an owner becomes a part of its own residuals.

        Args:
            exchange: Name of the topology; None: the one by rule.
        """
        exchange, previous = exchange or self.by_rule, self.exchange
        if exchange == previous:
            return
        if previous == "two_phase":
            self._add_owner_residuals()
        group, direct = self._group, exchange == "direct"
        self.exchange = exchange
        self.all_reduce = self._between_nodes(Direct(group) if direct else TwoPhase(group))
        self.small = self._between_nodes(TwoPhase(group)) if direct and group.world_size > 2 else None

    def _between_nodes(self, topology: Topology) -> Topology:
        node = self._group.node
        return topology if node is None else Hierarchical(topology, node, self._group)

    def _add_owner_residuals(self) -> None:
        """Add the residuals of the sums that this rank owns to those of its gradients. The sum over the ranks
        stays the same.
        """
        streams = self._group.streams_state()
        for name, stream in list(streams.items()):
            if stream["residual"] is None:
                continue
            residual = unpacked(stream["residual"]).clone()
            for shard, stream_of_sum in self.all_reduce.owner_residuals(name, residual.numel()):
                owner_residuals = streams.pop(stream_of_sum, {}).get("residual")
                if owner_residuals is not None:
                    residual[shard.start : shard.stop] += unpacked(owner_residuals)
            if name in streams:
                streams[name] = {**stream, "residual": residual}
        self._group.streams.clear()
        self._group.loaded = streams
