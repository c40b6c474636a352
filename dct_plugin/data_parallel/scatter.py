"""The scatter topology: every rank sends the parts of its gradient to their owners, who keep the sums."""

from __future__ import annotations

from ..host_traffic import bytes_sent
from .gradient_messages import GradientMessages
from .plan import ReductionPlan, Shard
from .stream_group import StreamGroup
from .topology import Destination, Sum, Topology


class Scatter(Topology):
    """The owner of a part keeps its sum, as under ZeRO-1 and 2; the host says who owns what."""

    name = "reduce_scatter"
    sums_everywhere = False

    def __init__(self, group: StreamGroup) -> None:
        self.phases = [_MessagesToOwners(group)]

    def shards(self, name: str, numel: int, *, small: bool) -> list[Shard]:
        raise ValueError(f"{name}: the host says which parts its ranks own")


class _MessagesToOwners(GradientMessages):
    """Every rank sends one message to each owner, who keeps the sums in place of its gradient."""

    to_all = False

    def dense_bytes(self, nbytes: float) -> float:
        group = self.group
        return bytes_sent(group.host_collective, nbytes, group.world_size, gloo=group.device.type == "cpu")

    def destinations(self, plan: ReductionPlan) -> list[Destination]:
        tensors = plan.views_of(self.group.rank)
        return [Sum(self.group, range(self.group.world_size), tensors, plan.scale)]
