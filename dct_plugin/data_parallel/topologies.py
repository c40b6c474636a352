"""The topologies: who sends what to whom, and the choice of one.

- Direct: every rank sends all of its gradient to all ranks, and every rank sums.
- Scatter: every rank sends the parts of its gradient to their owners, who keep the sums.
- Two-phase: owners sum the parts of the gradient, threshold the sums, and send those to all. Source: Gupta et
  al., KDD 2021, section 3: a parameter server, sharded over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.payload import dense_payload_nbytes
from ..codecs.values import ValueDtype
from ..compression.stream import as_flat, encode_all, encode_dense
from ..host_traffic import bytes_sent
from ..policy.rules import exchange_by_rule
from .plan import PlannedTensor, ReductionPlan, Shard, shards_of
from .stream_group import StreamGroup
from .topology import Phase, Topology, WrittenTensor, add_up


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
        group, stream, shards = self.group, None, tensor.parts
        grad, (density, label) = as_flat(tensor.tensor), tensor.sparsity
        if tensor.small:
            dtype = self._small_dtype(grad)
            encoded = encode_dense(group.backend, grad, writer, shards.bounds, shards.owners, dtype)
        else:
            stream = group.streams.named(tensor.name)
            encoded = stream.encode(grad, writer, density, shards.bounds, shards.owners, clear=True)
        if grad is not tensor.tensor and grad.data_ptr() != tensor.tensor.data_ptr():
            tensor.tensor.zero_()
        if copies is None:
            copies = [int(owner != group.rank) for owner in shards.owners]
        cls = "gradient_small" if tensor.small else "gradient"
        dense *= tensor.tensor.nbytes
        return WrittenTensor(tensor.name, cls, encoded, stream, dense, copies, label)

    def payload_bounds(self, tensor: PlannedTensor) -> Sequence[int]:
        if not tensor.small:
            return self.most_bytes(tensor.parts.bounds, tensor.numel, tensor.sparsity.density)
        dtype, numels = self._small_dtype(tensor.tensor), [stop - start for _, start, stop in tensor.parts]
        return [dense_payload_nbytes(numel, dtype) for numel in numels]

    def _small_dtype(self, tensor: Tensor) -> ValueDtype:
        """Return the type of a small tensor's entries on the wire: its own, without loss."""
        return ValueDtype.lossless(tensor.dtype)


class Direct(Topology):
    """Every rank sends one message to all: fewest bytes for two ranks, and one exchange instead of two."""

    name = "direct"

    def __init__(self, group: StreamGroup) -> None:
        self.phases = [_MessagesToAll(group)]

    def shards(self, name: str, numel: int, *, small: bool) -> Sequence[Shard]:
        return shards_of(name, numel, 1)


class _MessagesToAll(GradientPhase):
    to_all = True

    def sums(self, plan: ReductionPlan) -> tuple[Sequence[Tensor], float]:
        return [each.tensor for each in plan.tensors], plan.scale


class Scatter(Topology):
    """The owner of a part keeps its sum, as under ZeRO-1 and 2; the host says who owns what."""

    name = "reduce_scatter"
    sums_everywhere = False

    def __init__(self, group: StreamGroup) -> None:
        self.phases = [_MessagesToOwners(group)]

    def shards(self, name: str, numel: int, *, small: bool) -> Sequence[Shard]:
        raise ValueError(f"{name}: the host says which parts its ranks own")


class _MessagesToOwners(GradientPhase):
    """Every rank sends one message to each owner, who keeps the sums in place of its gradient."""

    to_all = False

    def dense_bytes(self, nbytes: float, collective: str = "") -> float:
        return super().dense_bytes(nbytes, collective or self.group.host_collective)

    def sums(self, plan: ReductionPlan) -> tuple[Sequence[Tensor], float]:
        return plan.views_of(self.group.rank), plan.scale

    def _small_dtype(self, tensor: Tensor) -> ValueDtype:
        """fp32 crosses in bf16 beside entries in 8 bits or fewer that have no residual either."""
        few = self.group.value_dtype.bits <= 8 and not self.group.settings.feedback.keeps_residual
        return ValueDtype.BF16 if few and tensor.dtype == torch.float32 else super()._small_dtype(tensor)


class TwoPhase(Topology):
    """Every rank sends parts to their owners, and owners send the thresholded sums to all ranks.

    Bytes per rank do not grow with the number of ranks. What an owner does not send back stays in a residual
    of its own.
    """

    name = "two_phase"

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self.phases = [_MessagesToSummingOwners(group), _Answers(group)]

    def shards(self, name: str, numel: int, *, small: bool) -> Sequence[Shard]:
        return shards_of(name, numel, self._group.world_size, undivided=small)

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
            encoded = encode_all(self.group.backend, total, writer, _sum_dtype(tensor), clear=True)
        else:
            stream = self.group.streams.named(_stream_of(tensor.name, shard))
            stream.set_value_dtype(self._value_dtype)
            encoded = stream.encode(total, writer, self._density(tensor), clear=True)
        receivers, cls = self.group.world_size - 1, "gradient_small" if tensor.small else "gradient_answer"
        dense = receivers * total.numel() * tensor.tensor.element_size()
        return WrittenTensor(None, cls, encoded, stream, dense, [receivers])

    def _density(self, tensor: PlannedTensor) -> float:
        return min(1.0, tensor.sparsity.density * self.group.settings.server_density)

    def payload_bounds(self, tensor: PlannedTensor) -> Sequence[int]:
        numels = [stop - start for _, start, stop in tensor.parts]
        if tensor.small:
            return [dense_payload_nbytes(numel, _sum_dtype(tensor)) for numel in numels]
        density, dtype = self._density(tensor), self._value_dtype
        return [self.most_bytes(None, numel, density, dtype)[0] for numel in numels]

    @property
    def _value_dtype(self) -> ValueDtype:
        """The type of the values; signs lose too much of sums."""
        dtype = self.group.value_dtype
        return ValueDtype.INT2 if dtype is ValueDtype.SIGN else dtype


def _sum_dtype(tensor: PlannedTensor) -> ValueDtype:
    """Return the type in which the sum of a small tensor is sent. A sum of bf16 is rounded to bf16 on
    arrival. One of fp16 may not be an fp16 before it is scaled.
    """
    return ValueDtype.BF16 if tensor.tensor.dtype == torch.bfloat16 else ValueDtype.FP32


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
