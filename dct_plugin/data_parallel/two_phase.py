"""The two-phase topology: owners sum the parts of the gradient, threshold the sums, and send those to all.

Source: Gupta et al., KDD 2021, section 3: a parameter server, sharded over the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.values import ValueDtype
from ..compression.stream import encode_all
from ..transport.slots import Slots
from .gradient_messages import GradientMessages
from .plan import PlannedTensor, ReductionPlan, Shard, shards_of
from .stream_group import StreamGroup, WrittenTensor
from .topology import Destination, Phase, Sum, Topology


class TwoPhase(Topology):
    """Every rank sends parts to their owners, and owners send the thresholded sums to all ranks.

    Bytes per rank do not grow with the number of ranks. What an owner does not send back stays in a residual
    of its own.
    """

    name = "two_phase"

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self.phases = [_MessagesToSummingOwners(group), _Answers(group)]

    def shards(self, name: str, numel: int, *, small: bool) -> list[Shard]:
        return shards_of(name, numel, self._group.world_size, whole=small)

    def owner_residuals(self, name: str, numel: int) -> Iterator[tuple[Shard, str]]:
        for shard in self.shards(name, numel, small=self._group.is_small(name, numel)):
            yield shard, _stream_of(name, shard)


class _MessagesToSummingOwners(GradientMessages):
    """The first phase: sums go into scratch memory."""

    to_all = False

    def dense_bytes(self, nbytes: float) -> float:
        return super().dense_bytes(nbytes) / 2  # the answers are the other half

    def destinations(self, plan: ReductionPlan) -> list[Destination]:
        sums = _sums(self.group, plan)
        return [Sum(self.group, range(self.group.world_size), sums, 1.0)]


class _Answers(Phase):
    """The second phase: every owner sends its sums, thresholded once more, to all ranks."""

    to_all = True
    from_owners = True

    def write(self, plan: ReductionPlan, writers: Sequence[MessageWriter]) -> list[WrittenTensor]:
        owned = plan.owned_by(self.group.rank)
        with self.group.backend.batched():
            return [
                self._write(tensor, shard, total, writers[0])
                for (tensor, shard), total in zip(owned, _sums(self.group, plan), strict=True)
            ]

    def _write(
        self, tensor: PlannedTensor, shard: Shard, total: Tensor, writer: MessageWriter
    ) -> WrittenTensor:
        """Write a sum, and leave zeros in ``total``."""
        density = min(1.0, self.group.sparsity(tensor.name).density * self.group.settings.server_density)
        stream = None
        if tensor.small:
            # A sum of bf16 is rounded to bf16 on arrival. One of fp16 may not be an fp16 before it is scaled.
            bf16 = tensor.tensor.dtype == torch.bfloat16
            values = ValueDtype.BF16 if bf16 else ValueDtype.FP32
            encoded = encode_all(self.group.backend, total, writer, values, clear=True)
        else:
            stream = self.group.stream(_stream_of(tensor.name, shard))
            encoded = stream.encode(total, [(0, total.numel(), writer)], density, clear=True)
        receivers = self.group.world_size - 1
        return WrittenTensor(
            None,
            "gradient_small" if tensor.small else "gradient_answer",
            encoded,
            stream,
            receivers * total.numel() * tensor.tensor.element_size(),
            [receivers],
        )

    def destinations(self, plan: ReductionPlan) -> list[Destination]:
        return [
            Sum(self.group, [owner], plan.views_of(owner), plan.scale)
            for owner in range(self.group.world_size)
        ]

    def add_slots(self, plan: ReductionPlan, slots: Slots) -> tuple[Tensor, Tensor]:
        outs = [plan.views_of(owner) for owner in range(self.group.world_size)]
        bits = self.group.value_bits
        return self.group.backend.sum_slots(slots.received, slots.bounds, outs, plan.scale, bits=bits)


def _stream_of(name: str, shard: Shard) -> str:
    """Return the name of an owner's stream, which saved states have."""
    return f"{name}[{shard.start}:{shard.stop}]"


def _sums(group: StreamGroup, plan: ReductionPlan) -> list[Tensor]:
    """Return memory for the sums of this rank's shards, fp32; whoever uses it leaves zeros in it."""
    owned = plan.owned_by(group.rank)
    bounds = list(itertools.accumulate((shard.stop - shard.start for _, shard in owned), initial=0))
    memory = group.scratch.zeros("sums", bounds[-1], group.device)
    return [memory[start:stop] for start, stop in itertools.pairwise(bounds)]
