"""The choice of the topologies of one reducer."""

from __future__ import annotations

from collections.abc import Callable

from ..policy.rules import exchange_by_rule
from .direct import Direct
from .scatter import Scatter
from .stream_group import StreamGroup
from .topology import Topology
from .two_phase import TwoPhase

#: Topologies of sums that all ranks get, by their names in the configuration.
ALL_REDUCE: dict[str, Callable[[StreamGroup], Topology]] = {"direct": Direct, "two_phase": TwoPhase}


class Topologies:
    """The topologies of one reducer: who sends what to whom.

    Args:
        group: The streams of the reducer.

    Attributes:
        is_direct: True if ranks send each other whole messages: the configuration asks for it, or it has the
            fewest bytes.
        all_reduce: Topology of sums that all ranks get.
        small: Topology of tensors below ``min_numel``; None if it is that of all tensors.
        scatter: Topology of sums of which each owner gets its part.
        sums_at_owners: True if the host has asked for sums of which each owner gets its part.
    """

    def __init__(self, group: StreamGroup) -> None:
        name = exchange_by_rule(group.settings, group.world_size)
        self.is_direct = name == "direct"
        self.all_reduce = ALL_REDUCE[name](group)
        self.small = TwoPhase(group) if self.is_direct and group.world_size > 2 else None
        self.scatter = Scatter(group)
        self.sums_at_owners = False
