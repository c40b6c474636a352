"""The topologies: which rank sends what to whom, where a message is added, and the choice of one.

A reduction is one exchange of messages or two, its *phases*. A phase encodes a plan into messages, and adds
those that arrive; :mod:`.plan_exchange` carries them. Updates of weights are a phase, too.

- Direct: every rank sends all of its gradient to all ranks, and every rank sums.
- Scatter: every rank sends the parts of its gradient to their owners, who keep the sums.
- Two-phase: owners sum the parts of the gradient, threshold the sums, and send those to all. Source: Gupta et
  al., KDD 2021, section 3: a parameter server, sharded over the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.payload import dense_payload_nbytes
from ..codecs.values import ValueDtype
from ..compression.stream import Compressor, Encoded, as_flat, encode_all, parts_of
from ..errors import PayloadError
from ..host_traffic import bytes_sent
from ..kernels.job import GRAD_DTYPES
from ..policy.rules import exchange_by_rule
from ..transport.slots import AgreedCapacities, Slots
from .plan import PlannedTensor, ReductionPlan, Shard, shards_of
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
        batch for it (``batched`` of :class:`.kernels.Backend`).
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

    def payload_bounds(self, tensor: PlannedTensor) -> Sequence[int]:
        """Return the most bytes of the payload of each part of a tensor."""
        if tensor.small:
            dtype = self.small_dtype(tensor.tensor.dtype)
            return [dense_payload_nbytes(stop - start, dtype) for _, start, stop in tensor.parts]
        density, dtype, most_kept = self.density(tensor), self.value_dtype, self.group.backend.most_kept
        if self.from_owners:  # a part is all of its owner's stream
            bounds = tensor.parts.bounds
            return [parts_of(None, stop - start, density, dtype, most_kept).total for start, stop in bounds]
        return parts_of(tensor.parts.bounds, tensor.numel, density, dtype, most_kept).nbytes

    def density(self, tensor: PlannedTensor) -> float:
        """Return the share of the entries of a tensor that is sent."""
        return tensor.sparsity.density

    @property
    def value_dtype(self) -> ValueDtype:
        """The type of the selected values."""
        return self.group.value_dtype

    def small_dtype(self, dtype: torch.dtype) -> ValueDtype:
        """Return the type of a small tensor's entries on the wire: its own, without loss."""
        return ValueDtype.lossless(dtype)

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


class Topology:
    """Assignment of the parts of gradients to their owners, and the exchanges that bring them there.

    Attributes:
        name: Name in fingerprints.
        phases: The exchanges: one, or two of which the second answers the first.
        owners: Ranks that own parts, where the host does not say it.
        sums_everywhere: Every rank gets the whole sums; else each owner gets its part.
    """

    def __init__(
        self, name: str, phases: Sequence[Phase], *, owners: int = 1, sums_everywhere: bool = True
    ) -> None:
        self.name, self.phases, self.owners, self.sums_everywhere = name, phases, owners, sums_everywhere

    def shards(self, name: str, numel: int, *, small: bool) -> Sequence[Shard]:
        """Return the parts of a tensor and their owners."""
        return shards_of(name, numel, self.owners, undivided=small)

    def owner_residuals(self, name: str, numel: int) -> Iterator[tuple[Shard, str]]:
        """Yield the parts of the sum of a tensor that this rank has residuals of, as their owner, and the
        names of their streams.
        """
        return iter(())


class GradientPhase(Phase):
    """Every rank sends its thresholded gradients, and leaves zeros in their place."""

    def dense_bytes(self, nbytes: float, collective: str = "all_reduce") -> float:
        """Return the bytes that the host would send for ``nbytes`` of gradients, where these messages go."""
        group = self.group
        return bytes_sent(collective, nbytes, group.world_size, gloo=group.device.type == "cpu")

    def encode(self, plan: ReductionPlan, writer: MessageWriter) -> list[WrittenTensor]:
        dense, others = self.dense_bytes(1.0), [self.group.world_size - 1] if self.to_all else None
        return [self._encode(tensor, writer, dense, others) for tensor in plan.tensors]

    def add(self, plan: ReductionPlan, messages: Sequence[Tensor]) -> None:
        add_up(self.group, messages, *self.sums(plan))

    def _encode(
        self, tensor: PlannedTensor, writer: MessageWriter, dense: float, copies: Sequence[int] | None
    ) -> WrittenTensor:
        """Write a tensor, for each byte of which the host would send so many bytes (``dense``), in so many
        ``copies`` of each payload; None: one to each owner that is another rank.
        """
        group, stream, bounds, owners = self.group, None, tensor.parts.bounds, tensor.parts.owners
        grad, (density, label) = as_flat(tensor.tensor), tensor.sparsity
        if tensor.small:
            dtype = self.small_dtype(grad.dtype)
            encoded = encode_all(group.backend, grad, writer, dtype, bounds, owners, clear=True)
        else:
            stream = group.streams.named(tensor.name)
            encoded = stream.encode(grad, writer, density, bounds, owners, clear=True)
        if grad is not tensor.tensor and grad.data_ptr() != tensor.tensor.data_ptr():
            tensor.tensor.zero_()
        if copies is None:
            copies = [int(owner != group.rank) for owner in owners]
        cls = "gradient_small" if tensor.small else "gradient"
        dense *= tensor.tensor.nbytes
        return WrittenTensor(tensor.name, cls, encoded, stream, dense, copies, label)


def direct(group: StreamGroup) -> Topology:
    """Return the topology in which every rank sends one message to all: fewest bytes for two ranks, and one
    exchange instead of two.
    """
    return Topology("direct", [_MessagesToAll(group)])


class _MessagesToAll(GradientPhase):
    to_all = True

    def sums(self, plan: ReductionPlan) -> tuple[Sequence[Tensor], float]:
        return [each.tensor for each in plan.tensors], plan.scale


class _MessagesToOwners(GradientPhase):
    """Every rank sends one message to each owner, who keeps the sums in place of its gradient."""

    to_all = False

    def dense_bytes(self, nbytes: float, collective: str = "") -> float:
        return super().dense_bytes(nbytes, collective or self.group.host_collective)

    def sums(self, plan: ReductionPlan) -> tuple[Sequence[Tensor], float]:
        return plan.views_of(self.group.rank), plan.scale

    def small_dtype(self, dtype: torch.dtype) -> ValueDtype:
        """fp32 crosses in bf16 beside entries in 8 bits or fewer that have no residual either."""
        few = not self.group.settings.feedback.keeps_residual and self.group.value_dtype.bits <= 8
        return ValueDtype.BF16 if few and dtype == torch.float32 else super().small_dtype(dtype)


class TwoPhase(Topology):
    """Every rank sends parts to their owners, and owners send the thresholded sums to all ranks.

    Bytes per rank do not grow with the number of ranks. What an owner does not send back stays in a residual
    of its own.
    """

    def __init__(self, group: StreamGroup) -> None:
        phases = [_MessagesToSummingOwners(group), _Answers(group)]
        super().__init__("two_phase", phases, owners=group.world_size)
        self._group = group

    def owner_residuals(self, name: str, numel: int) -> Iterator[tuple[Shard, str]]:
        for shard in self.shards(name, numel, small=self._group.is_small(name, numel)):
            yield shard, _stream_of(name, shard)


class _MessagesToSummingOwners(GradientPhase):
    """The first phase: sums go into scratch memory."""

    to_all = False

    def dense_bytes(self, nbytes: float, collective: str = "all_reduce") -> float:
        return super().dense_bytes(nbytes, collective) / 2  # the answers are the other half

    def sums(self, plan: ReductionPlan) -> tuple[Sequence[Tensor], float]:
        return _sums(self.group, plan), 1.0


class _Answers(Phase):
    """The second phase: every owner sends its sums, thresholded once more, to all ranks."""

    to_all = True
    from_owners = True

    def encode(self, plan: ReductionPlan, writer: MessageWriter) -> list[WrittenTensor]:
        owned = plan.owned_by(self.group.rank)
        return [
            self._encode(tensor, shard, total, writer)
            for (tensor, shard), total in zip(owned, _sums(self.group, plan), strict=True)
        ]

    def add(self, plan: ReductionPlan, messages: Sequence[Tensor]) -> None:
        for owner, message in enumerate(messages):
            add_up(self.group, [message], plan.views_of(owner), plan.scale, owner)

    def _encode(
        self, tensor: PlannedTensor, shard: Shard, total: Tensor, writer: MessageWriter
    ) -> WrittenTensor:
        """Write a sum, and leave zeros in ``total``."""
        stream = None
        if tensor.small:
            dtype = self.small_dtype(tensor.tensor.dtype)
            encoded = encode_all(self.group.backend, total, writer, dtype, clear=True)
        else:
            stream = self.group.streams.named(_stream_of(tensor.name, shard))
            stream.set_value_dtype(self.value_dtype)
            encoded = stream.encode(total, writer, self.density(tensor), clear=True)
        receivers, cls = self.group.world_size - 1, "gradient_small" if tensor.small else "gradient_answer"
        dense = receivers * total.numel() * tensor.tensor.element_size()
        return WrittenTensor(None, cls, encoded, stream, dense, [receivers])

    def density(self, tensor: PlannedTensor) -> float:
        return min(1.0, tensor.sparsity.density * self.group.settings.server_density)

    @property
    def value_dtype(self) -> ValueDtype:
        """The type of the values; signs lose too much of sums."""
        dtype = self.group.value_dtype
        return ValueDtype.INT2 if dtype is ValueDtype.SIGN else dtype

    def small_dtype(self, dtype: torch.dtype) -> ValueDtype:
        """Return the type in which the sum of a small tensor is sent. A sum of bf16 is rounded to bf16 on
        arrival. One of fp16 may not be an fp16 before it is scaled.
        """
        return ValueDtype.BF16 if dtype == torch.bfloat16 else ValueDtype.FP32


def _stream_of(name: str, shard: Shard) -> str:
    """Return the name of an owner's stream, which saved states have."""
    return f"{name}[{shard.start}:{shard.stop}]"


def _sums(group: StreamGroup, plan: ReductionPlan) -> list[Tensor]:
    """Return memory for the sums of this rank's shards, fp32; whoever uses it leaves zeros in it.

    A plan keeps its memory, whose addresses kernels have before messages are there.
    """
    if plan.sums is None:
        sizes = [shard.stop - shard.start for _, shard in plan.owned_by(group.rank)]
        zeros = group.streams.scratch.zeros("sums", sum(sizes), group.device)
        plan.sums = list(torch.split_with_sizes(zeros, sizes))
    return plan.sums


#: Topologies of sums that all ranks get, by their names in the configuration.
ALL_REDUCE: dict[str, Callable[[StreamGroup], Topology]] = {"direct": direct, "two_phase": TwoPhase}


class Topologies:
    """The topologies of one reducer: who sends what to whom.

    Args:
        group: The streams of the reducer.

    Attributes:
        is_direct: True if ranks send each other whole messages: the configuration asks for it, or it has the
            fewest bytes.
        all_reduce: Topology of sums that all ranks get.
        small: Topology of tensors below ``min_numel``; None if it is that of all tensors.
        scatter: Topology of sums of which each owner gets its part, as under ZeRO-1 and 2; the host says who
            owns what.
        sums_at_owners: True if the host has asked for sums of which each owner gets its part.
    """

    def __init__(self, group: StreamGroup) -> None:
        name = exchange_by_rule(group.settings, group.world_size)
        self.is_direct = name == "direct"
        self.all_reduce = ALL_REDUCE[name](group)
        self.small = TwoPhase(group) if self.is_direct and group.world_size > 2 else None
        self.scatter = Topology("reduce_scatter", [_MessagesToOwners(group)], sums_everywhere=False)
        self.sums_at_owners = False
