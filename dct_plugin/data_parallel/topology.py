"""The interface of topologies: which rank sends what to whom, and where a message is added.

A reduction is one exchange of messages or two, its *phases*. A phase encodes a plan into messages, and adds
those that arrive; :mod:`.plan_exchange` carries them. Updates of weights are a phase, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..codecs.message import Key, MessageWriter
from ..codecs.values import ValueDtype
from ..compression.stream import Compressor, Encoded, parts_of
from ..errors import PayloadError
from ..kernels.job import GRAD_DTYPES
from ..transport.slots import AgreedCapacities, Slots
from .plan import PlannedTensor, ReductionPlan, Shard
from .stream_group import StreamGroup


class WrittenTensor(NamedTuple):
    """One tensor in a message, to be recorded when the message is complete."""

    name: str | None
    """Name of a gradient of this rank, to be named where it is not finite. None for weights and for answers
    of owners, which are not finite because of other ranks.
    """
    cls: str
    """Class in the metrics."""
    encoded: Encoded
    stream: Compressor | None
    dense_bytes: float
    """Bytes that the framework would have sent."""
    copies: Sequence[int]
    """Number of ranks that each payload is sent to."""
    label: str = ""
    """Share of the class under which it is recorded besides."""


@contextmanager
def naming_sender(group: StreamGroup, first: int = 0) -> Iterator[None]:
    """Name the sender of a message that is found damaged within the block: ``first``, or the rank so many
    messages behind it.
    """
    try:
        yield
    except PayloadError as error:
        sender = first + error.message
        raise PayloadError(f"rank {group.rank}: message from rank {sender} of the group: {error}") from error


def add_up(
    group: StreamGroup, messages: Sequence[Tensor], tensors: Sequence[Tensor], scale: float, first: int = 0
) -> None:
    """Set tensors, zeros at first, to ``scale`` times the sum of messages, in the order of the ranks.

    Raises:
        PayloadError: A message is damaged; names its sender, of which ``first`` is the first one.
    """
    # What the kernels do not write themselves (fp64) is added up beside.
    sums = [t if t.dtype in GRAD_DTYPES else torch.zeros_like(t, dtype=torch.float32) for t in tensors]
    with naming_sender(group, first):
        group.backend.sum_messages(messages, sums, scale)
    for tensor, total in zip(tensors, sums, strict=True):
        if total is not tensor:
            tensor.copy_(total)


class Phase(ABC):
    """One exchange of messages: this rank encodes its own, and adds those of all ranks.

    Attributes:
        to_all: Every rank sends one message to all ranks; else it sends one to each owner of a part.
        from_owners: A message holds the sender's shards; else it holds those of the receiver, or all, and all
            are added to one destination.
        spare: Tensors stay as they are where the sender failed; else they become NaN.
        follows: The next slots follow the lengths of the last messages, and :meth:`complete` exchanges what
            messages do not hold; else slots hold any message.
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
    def encode(self, plan: ReductionPlan, writer: MessageWriter) -> list[WrittenTensor]:
        """Write this rank's messages: one, or one for each rank, into an empty ``writer``. The caller opens a
        batch for it (:meth:`.kernels.Backend.batched`).
        """

    @abstractmethod
    def add(self, plan: ReductionPlan, messages: Sequence[Tensor]) -> None:
        """Add the messages of all ranks, in the order of the ranks.

        Raises:
            PayloadError: A message is damaged; names its sender.
        """

    def sums(self, plan: ReductionPlan) -> tuple[Sequence[Tensor], float]:
        """Return the tensors that all messages are added to, and the factor of the sums; for phases whose
        messages hold the receiver's shards, or all.
        """
        raise NotImplementedError

    def prepare_sum(self, plan: ReductionPlan, slots: Slots) -> Callable[[], Tensor]:
        """Return a function that adds the messages in slots once they are there, and returns the first words
        of each slot, as :meth:`.kernels.Backend.prepare_sum` says.
        """
        group, scale, spans = self.group, plan.scale, None
        if self.from_owners:
            tensors: Sequence[Tensor] = [each.tensor for each in plan.tensors]
            spans = plan.owners.spans(range(group.world_size))
        else:
            tensors, scale = self.sums(plan)
        return group.backend.prepare_sum(
            slots.received, slots.bounds, tensors, scale, spans, spare=self.spare, bits=group.value_dtype.bits
        )

    @abstractmethod
    def payload_bounds(self, tensor: PlannedTensor) -> Sequence[int]:
        """Return the most bytes of the payload of each part of a tensor."""

    def most_bytes(
        self, bounds: Key | None, numel: int, density: float, value_dtype: ValueDtype | None = None
    ) -> Sequence[int]:
        """Return the most bytes of the payloads that :meth:`.Compressor.encode` writes of parts."""
        value_dtype, kernels = value_dtype or self.group.value_dtype, self.group.backend
        return parts_of(bounds, numel, density, value_dtype, kernels.most_kept).nbytes

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
