"""Error averaging: every so many steps the residuals of the ranks become their mean.

Source: Xu, Huo, Huang, *Step-Ahead Error Feedback for Distributed Training with Compressed Gradient*, AAAI
2021, section 4. What a rank owes is then owed by all alike, so that no rank runs ahead of, or lags behind,
the others by its own residual for longer than the interval.

Residuals cross compressed, through owners as gradients do in the two-phase exchange: everybody sends its
residual ``Q(E)`` and keeps ``E - Q(E)``; the owner of a part makes the mean ``M`` of what arrives and answers
``Q(M)``, which all ranks add, and keeps ``M - Q(M)`` for each of them. So the sum over the ranks is what it
was, up to the rounding of fp32 additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.payload import payload_bound
from ..codecs.values import ValueDtype
from ..kernels import Job
from ..metrics import Record
from ..stream import Encoded
from .plan import Item, Plan, shards_of
from .stream_group import Member, Written

__all__ = ["ErrorAveraging"]

#: Class of what crosses, in the metrics.
CLASS = "error_averaging"


class ErrorAveraging:
    """Averages the residuals of a member's streams; every method but :meth:`end_step` is a collective.

    Args:
        member: Whose streams; all ranks of its group have streams of the same names.
        interval: Optimizer steps.
        value_dtype: Of residuals on the wire.
    """

    def __init__(self, member: Member, interval: int, value_dtype: str = "int8") -> None:
        self._member, self._interval = member, interval
        self._value_dtype = ValueDtype.parse(value_dtype)
        self._done: set[str] = set()  # in this step, which may have several micro-batches

    def average(self, tensors: Iterable[tuple[str, int]], whole: Record) -> list[str]:
        """Average the residuals of those tensors for which it is time; returns their names.

        Args:
            tensors: Name and number of entries.
            whole: Takes the time that is spent.

        Raises:
            DesyncError: A rank failed or averages other tensors.
            PayloadError: A message arrived damaged.
        """
        # Half an interval off, since step-ahead compares residuals at round steps: right after they were
        # averaged they are all alike, which says nothing about the steps to come.
        if self._member.step % self._interval != self._interval // 2:
            return []
        due = [(n, size) for n, size in tensors if size and n not in self._done and self._member.owes(n)]
        if due:
            self._done.update(name for name, _ in due)
            self._average(due, whole)
        return [name for name, _ in due]

    def end_step(self) -> None:
        """An optimizer step is over."""
        self._done.clear()

    def _average(self, tensors: Sequence[tuple[str, int]], whole: Record) -> None:
        member = self._member
        room = torch.zeros(sum(numel for _, numel in tensors), device=member.device)
        plan = Plan(
            CLASS,
            [
                Item(name, part, shards_of(name, part.numel(), member.world_size), False)
                for (name, _), part in zip(tensors, room.split([n for _, n in tensors]), strict=True)
            ],
        )
        exchange, ranks = member.exchange, range(member.world_size)
        with exchange.preparing():
            messages = self._lend(plan, whole)
        with whole.timed("exchange"):
            bounds = [plan.bound(member.rank)] * member.world_size
            received = exchange.all_to_all(messages, plan.fingerprint, bounds=bounds)
        with exchange.preparing():
            answer = self._answer(plan, received, whole)
        with whole.timed("exchange"):
            answers = exchange.all_gather(answer, plan.fingerprint, bounds=[plan.bound(r) for r in ranks])
        with whole.timed("decode"):
            for owner, message in enumerate(answers):
                outs = [item.view(shard) for item, shard in plan.owned_by(owner)]
                member.sum_messages([message], outs, 1.0, sender=owner)
            for item in plan.items:
                self._residual(item).add_(item.tensor)

    def _lend(self, plan: Plan, whole: Record) -> list[Tensor]:
        """Every rank's message to the owners; what it does not say stays in the residuals."""
        member = self._member
        writers = [MessageWriter(member.device) for _ in range(member.world_size)]
        written = []
        for item in plan.items:
            parts = [(shard.start, shard.stop, writers[shard.owner]) for shard in item.shards]
            encoded = member.stream(item.name).lend(item.tensor, parts, self._value_dtype)
            copies = [int(shard.owner != member.rank) for shard in item.shards]
            written.append(Written(None, CLASS, encoded, None, 0.0, copies))
        return member.complete(writers, written, whole)

    def _answer(self, plan: Plan, received: Sequence[Tensor], whole: Record) -> Tensor:
        """The mean of the parts that this rank owns; what the message does not say of it goes into the own
        residual, once for every rank.
        """
        member, owned = self._member, plan.owned_by(self._member.rank)
        means = [torch.zeros(shard.stop - shard.start, device=member.device) for _, shard in owned]
        with whole.timed("decode"):
            member.sum_messages(received, means, 1.0 / member.world_size)
        writer, written = MessageWriter(member.device), []
        for (item, shard), mean in zip(owned, means, strict=True):
            stats = member.backend.compress(
                Job(
                    item.view(shard),
                    mean,
                    0.0,
                    writer.reserve(payload_bound(mean.numel(), mean.numel(), self._value_dtype)),
                    value_dtype=self._value_dtype,
                )
            )
            writer.advance(stats)
            encoded = Encoded([stats], mean.numel())
            written.append(Written(None, CLASS, encoded, None, 0.0, [member.world_size - 1]))
            self._residual(item)[shard.start : shard.stop].add_(mean, alpha=member.world_size)
        (message,) = member.complete([writer], written, whole)
        return message

    def _residual(self, item: Item) -> Tensor:
        residual = self._member.stream(item.name).residual
        assert residual is not None
        return residual.current
