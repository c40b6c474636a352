"""The interface of topologies: which rank sends what to whom, and where a message is added.

A reduction is one exchange of messages or two, its *phases*. A topology names the phases;
:mod:`.plan_exchange` carries the messages of any phase. Updates of weights are a phase, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..kernels.job import GRAD_DTYPES
from ..transport.slots import AgreedCapacities, Slots
from .plan import PlannedTensor, ReductionPlan, Shard
from .stream_group import StreamGroup, WrittenTensor


class Destination(ABC):
    """Tensors that the messages of some ranks are added to."""

    def __init__(
        self, group: StreamGroup, senders: Sequence[int], tensors: Sequence[Tensor], scale: float = 1.0
    ) -> None:
        self.group, self.senders, self.tensors, self.scale = group, senders, tensors, scale

    @abstractmethod
    def add_messages(self, messages: Sequence[Tensor]) -> None:
        """Add the messages of :attr:`senders`.

        Raises:
            PayloadError: A message is damaged; names its sender.
        """


class Sum(Destination):
    """Tensors, zeros at first, that become ``scale`` times the sum of messages, in the order of the ranks."""

    def add_messages(self, messages: Sequence[Tensor]) -> None:
        # What the kernels do not write themselves (fp64) is added up beside.
        sums = [
            each if each.dtype in GRAD_DTYPES else torch.zeros_like(each, dtype=torch.float32)
            for each in self.tensors
        ]
        with self.group.naming_sender(self.senders[0]):
            self.group.backend.sum_messages(messages, sums, self.scale)
        for tensor, total in zip(self.tensors, sums, strict=True):
            if total is not tensor:
                tensor.copy_(total)


class Phase(ABC):
    """One exchange of messages.

    Attributes:
        to_all: Every rank sends one message to all ranks; else it sends one to each owner of a part.
        from_owners: A message holds the sender's shards; else it holds those of the receiver, or all, and all
            are added to one destination.
        spare: Tensors stay as they are where the sender failed; else they become NaN.
        follows: The next slots follow the lengths of the last messages; else they hold any message.
        nothing_to_add: int64 []: 1 if the message that was written last has nothing to add; None where it
            has.
    """

    to_all: ClassVar[bool]
    from_owners: ClassVar[bool] = False
    spare: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    def __init__(self, group: StreamGroup) -> None:
        self.group = group
        self.nothing_to_add: Tensor | None = None

    @abstractmethod
    def write(self, plan: ReductionPlan, writer: MessageWriter) -> list[WrittenTensor]:
        """Write this rank's messages: one, or one for each rank, into an empty ``writer``. The caller opens a
        batch for it (:meth:`.kernels.Backend.batched`).
        """

    @abstractmethod
    def destinations(self, plan: ReductionPlan) -> list[Destination]:
        """Return the tensors that messages are added to, by senders."""

    def prepare_sum(self, plan: ReductionPlan, slots: Slots) -> Callable[[], Tensor]:
        """Return a function that adds the messages in slots once they are there, and returns the first words
        of each slot, as :meth:`.kernels.Backend.prepare_sum` says.
        """
        group, scale, spans = self.group, plan.scale, None
        if self.from_owners:
            tensors: Sequence[Tensor] = [each.tensor for each in plan.tensors]
            spans = plan.owners.spans(range(group.world_size))
        else:
            (total,) = self.destinations(plan)
            tensors, scale = total.tensors, total.scale
        return group.backend.prepare_sum(
            slots.received, slots.bounds, tensors, scale, spans, spare=self.spare, bits=group.value_bits
        )

    @abstractmethod
    def payload_bounds(self, tensor: PlannedTensor) -> Sequence[int]:
        """Return the most bytes of the payload of each part of a tensor."""

    def capacities(self, plan: ReductionPlan) -> AgreedCapacities:
        """Return the capacities of slots that hold any message of a plan."""
        exchange, ranks = self.group.exchange, range(self.group.world_size)
        bounds = [0 for _ in ranks]
        for tensor in plan.tensors:
            for (owner, *_), nbytes in zip(tensor.parts, self.payload_bounds(tensor), strict=True):
                bounds[owner] += nbytes
        if self.from_owners:
            return AgreedCapacities(exchange, None, bounds)
        if self.to_all:  # one rank is the nominal owner of all parts
            return AgreedCapacities(exchange, None, [sum(bounds)] * len(ranks))
        return AgreedCapacities(exchange, bounds, [bounds[self.group.rank]] * len(ranks))

    def complete(self, plan: ReductionPlan, senders: Sequence[int]) -> None:
        """Exchange what the messages of these senders did not hold, where slots :attr:`follow <follows>`."""
        raise NotImplementedError

    def largest_messages(self, plan: ReductionPlan) -> list[int]:
        """Return, for each sender, bytes that its message cannot reach."""
        ranks = range(self.group.world_size)
        if self.from_owners:
            return plan.owners.largest_messages(ranks)
        # Messages to all hold every tensor whole, with rank 0 as its nominal owner.
        receiver = 0 if self.to_all else self.group.rank
        return plan.owners.largest_messages(range(receiver, receiver + 1)) * len(ranks)


class OwnersToAll(Phase):
    """Every owner of weights sends all ranks what is new in them."""

    to_all = True
    from_owners = True

    masters: Callable[[str], Tensor] = staticmethod(lambda name: torch.empty(0))
    """Returns the masters of this rank's shard of a name, while an update runs."""

    def forget(self) -> None:
        """Note that the host gathered all weights."""
        return

    def pending_of(self, name: str) -> tuple[Shard, Tensor] | None:
        """See :meth:`.parameters.ParameterUpdates.pending_of`."""
        return None


class Topology(ABC):
    """Assignment of the parts of gradients to their owners, and the exchanges that bring them there.

    Attributes:
        name: Name in fingerprints.
        sums_everywhere: Every rank gets the whole sums; else each owner gets its part.
        phases: The exchanges: one, or two of which the second answers the first.
    """

    name: str
    sums_everywhere: bool = True
    phases: Sequence[Phase]

    @abstractmethod
    def shards(self, name: str, numel: int, *, small: bool) -> Sequence[Shard]:
        """Return the parts of a tensor and their owners."""

    def owner_residuals(self, name: str, numel: int) -> Iterator[tuple[Shard, str]]:
        """Yield the parts of the sum of a tensor that this rank has residuals of, as their owner, and the
        names of their streams.
        """
        return iter(())
