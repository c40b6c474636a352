"""Error averaging: every so many steps the residuals of the ranks become their mean.

Source: Xu, Huo, Huang, *Step-Ahead Error Feedback for Distributed Training with Compressed Gradient*, AAAI
2021, section 4. What a rank has not sent is then shared by all alike, so that no rank runs ahead of, or lags
behind, the others by its own residual for longer than the interval.

Residuals cross compressed, through owners as gradients do in the two-phase exchange: everybody sends its
residual ``Q(E)`` and keeps ``E - Q(E)``; the owner of a part makes the mean ``M`` of what arrives and answers
``Q(M)``, which all ranks add, and keeps ``M - Q(M)`` for each of them. So the sum over the ranks is what it
was, up to the rounding of fp32 additions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.payload import payload_bound
from ..codecs.values import ValueDtype
from ..kernels import Job
from ..metrics import Record
from ..stream import Encoded
from .add_on import AddOn, ReducerContext
from .pipelined import PipelinedExchange
from .plan import PlannedTensor, ReductionPlan, shards_of
from .stream_group import StreamGroup, WrittenTensor
from .topology import Destination, Phase, Sum

__all__ = ["ErrorAveraging"]

#: Class of the messages in the metrics, and the operation in fingerprints.
CLASS = "error_averaging"


class ErrorAveraging(AddOn):
    """Averages the residuals of a group's streams.

    Args:
        group: Streams and process group; all ranks have streams of the same names.
        interval: Optimizer steps from one averaging to the next.
        add_ons: Told of residuals that were averaged.
        value_dtype: Type of residuals on the wire.
    """

    exchanges = True

    def __init__(
        self,
        group: StreamGroup,
        interval: int,
        add_ons: Sequence[AddOn],
        value_dtype: ValueDtype = ValueDtype.INT8,
    ) -> None:
        self._group, self._interval, self._add_ons = group, interval, add_ons
        self._phases = [_Residuals(group, value_dtype), _Means(group, value_dtype)]
        self._done: set[str] = set()
        """Tensors whose residuals were averaged in this step, which may have several micro-batches."""

    @classmethod
    def configured(cls, context: ReducerContext) -> ErrorAveraging | None:
        interval = context.config.expert.error_averaging
        return None if interval is None else cls(context.group, interval, context.add_ons)

    def before_reduce(self, plan: ReductionPlan, whole: Record) -> None:
        """Average the residuals of those tensors for which it is time."""
        group = self._group
        # Half an interval off, since step-ahead compares residuals at round steps: right after they were
        # averaged they are all alike, which says nothing about the steps to come.
        if group.step % self._interval != self._interval // 2:
            return
        due = [each for each in plan.tensors if not each.small and each.tensor.numel()]
        due = [each for each in due if each.name not in self._done and group.has_residual(each.name)]
        if due:
            self._done.update(each.name for each in due)
            self._average(due, whole)
            for add_on in self._add_ons:
                add_on.residuals_averaged([each.name for each in due])

    def end_step(self, *, skipped: bool) -> None:
        self._done.clear()

    def _average(self, due: Sequence[PlannedTensor], whole: Record) -> None:
        group, sizes = self._group, [each.tensor.numel() for each in due]
        means = torch.zeros(sum(sizes), device=group.device).split(sizes)
        tensors = [
            PlannedTensor(each.name, mean, shards_of(each.name, mean.numel(), group.world_size), False)
            for each, mean in zip(due, means, strict=True)
        ]
        plan = ReductionPlan(CLASS, tensors)
        PipelinedExchange(group, self._phases, [plan], whole).finish()
        for each in tensors:
            _residual(group, each.name).add_(each.tensor)


class _Residuals(Phase):
    """Every rank sends its residuals to the owners; what the message does not say stays in the residuals."""

    to_all = False

    def __init__(self, group: StreamGroup, value_dtype: ValueDtype) -> None:
        super().__init__(group)
        self._value_dtype = value_dtype

    def write(self, plan: ReductionPlan, writers: Sequence[MessageWriter]) -> list[WrittenTensor]:
        written = []
        for each in plan.tensors:
            parts = [(shard.start, shard.stop, writers[shard.owner]) for shard in each.shards]
            encoded = self.group.stream(each.name).encode_residual(each.tensor, parts, self._value_dtype)
            copies = [int(shard.owner != self.group.rank) for shard in each.shards]
            written.append(WrittenTensor(None, CLASS, encoded, None, 0.0, copies))
        return written

    def destinations(self, plan: ReductionPlan) -> list[Destination]:
        """The means of the parts that this rank owns take the place of its zeros."""
        ranks = range(self.group.world_size)
        return [Sum(self.group, ranks, plan.views_of(self.group.rank), 1.0 / len(ranks))]


class _Means(Phase):
    """Every owner sends its means to all; what the message does not say goes into its residual, once for
    every rank.
    """

    to_all = True
    from_owners = True

    def __init__(self, group: StreamGroup, value_dtype: ValueDtype) -> None:
        super().__init__(group)
        self._value_dtype = value_dtype

    def write(self, plan: ReductionPlan, writers: Sequence[MessageWriter]) -> list[WrittenTensor]:
        group, written = self.group, []
        for each, shard in plan.owned_by(group.rank):
            view = each.view(shard)
            mean, numel = view.clone(), view.numel()
            room = writers[0].reserve(payload_bound(numel, numel, self._value_dtype))
            stats = group.backend.compress(Job(view.zero_(), mean, 0.0, room, value_dtype=self._value_dtype))
            writers[0].advance(stats)
            encoded = Encoded([stats], numel)
            written.append(WrittenTensor(None, CLASS, encoded, None, 0.0, [group.world_size - 1]))
            rest = _residual(group, each.name)[shard.start : shard.stop]
            rest.add_(mean, alpha=group.world_size)
        return written

    def destinations(self, plan: ReductionPlan) -> list[Destination]:
        return [Sum(self.group, [owner], plan.views_of(owner), 1.0) for owner in range(self.group.world_size)]


def _residual(group: StreamGroup, name: str) -> Tensor:
    residual = group.stream(name).residual
    assert residual is not None
    return residual.current
