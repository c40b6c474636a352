"""Exact updates of the weights: owners send the working weights whose bits changed.

A 16-bit weight changes in a step only if its master moved far enough. All ranks hold bitwise what a gather of
all weights would give them. A message has payloads of changes for each part of the weights
(:mod:`dct_plugin.codecs.changes`). If they are not smaller than the weights, or a payload has no room for its
changes, the weights follow as they are.

Whole gathers leave the same bits, so :class:`GatherChoice` decides by a measured time. A *trial* has two
steps with whole gathers, then three with exact updates. The least time per weight of each way, over steps and
ranks, decides for many steps. A way that is in use stays unless the other one is clearly faster.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs.changes import BANDS, PART
from ..codecs.message import MessageWriter
from ..codecs.slots import first_words
from ..compression.stream import Encoded
from ..console import logger
from ..host_traffic import own_traffic
from ..kernels.job import Spans
from ..transport import lost_ranks
from ..transport.slots import Slots
from .plan import PlannedTensor, ReductionPlan
from .stream_group import StreamGroup
from .topologies import OwnersToAll, WrittenTensor, naming_sender

#: Class in the metrics.
EXACT_CLASS = "parameter_exact"
#: Messages from several owners are added together if these have so many entries, or fewer.
_TOGETHER = 1 << 24


class ChangesToAll(OwnersToAll):
    """Every owner compares its working weights with those before the step, and sends what differs."""

    follows = True

    def encode(self, plan: ReductionPlan, writer: MessageWriter) -> list[WrittenTensor]:
        group, written = self.group, []
        copies, self.nothing_to_add = group.world_size - 1, None
        for each, shard in plan.owned_by(group.rank):
            held, encoded = each.view(shard), Encoded(numel=shard.stop - shard.start, density=0.0)
            parts = [*zip(held.split(PART), self.masters(each.name).split(PART), strict=True)]
            for new, old in parts:
                encoded.stats += group.backend.encode_changes(new, old, writer)
            dense, payloads = copies * held.nbytes, len(parts) * len(BANDS)
            written.append(WrittenTensor(None, EXACT_CLASS, encoded, None, dense, [copies] * payloads))
        if written:
            self._give_up_large(sum(each.nbytes for each in plan.views_of(group.rank)), written, writer)
        return written

    def _give_up_large(self, nbytes: int, written: Sequence[WrittenTensor], writer: MessageWriter) -> None:
        """Have the weights of so many bytes follow a message that is not smaller, or lacks a change. Where
        figures stay on a device, the host does not ask for them.
        """
        stats = [part for each in written for part in each.encoded.stats]
        if not stats[0].pending:
            if sum(each.nbytes for each in stats) >= nbytes or any(each.above > each.nnz for each in stats):
                writer.clear()
            return
        size, sent, changed, _ = torch.stack([each.device_counts for each in stats]).unbind(1)
        self.nothing_to_add = ((size.sum() >= nbytes) | (changed > sent).any()).to(torch.int64)

    def payload_bounds(self, tensor: PlannedTensor) -> Sequence[int]:
        return [tensor.view(shard).nbytes for shard in tensor.parts]

    def complete(self, plan: ReductionPlan, senders: Sequence[int]) -> None:
        rank, ranks = self.group.rank, range(self.group.world_size)
        weights = {owner: [each.view(torch.uint8) for each in plan.views_of(owner)] for owner in senders}
        if not any(weights.values()):
            return
        nothing = torch.empty(0, dtype=torch.uint8, device=self.group.device)
        own = torch.cat([nothing, *weights.get(rank, ())])
        sizes = [sum(each.numel() for each in weights.get(owner, ())) for owner in ranks]
        arrived = self.group.exchange.transfer([own for _ in ranks], sizes)
        for owner, views in weights.items():
            if views and owner != rank:
                torch._foreach_copy_(views, arrived[owner].split([each.numel() for each in views]))

    def largest_messages(self, plan: ReductionPlan) -> list[int]:
        owners = range(self.group.world_size)
        return [sum(each.nbytes for each in plan.views_of(owner)) for owner in owners]

    def add(self, plan: ReductionPlan, messages: Sequence[Tensor]) -> None:
        for owner, message in enumerate(messages):
            if owner != self.group.rank and message.numel():  # the own weights are new already
                payloads = [part for part in _parts(plan, owner) for _ in BANDS]
                with naming_sender(self.group, owner):
                    self.group.backend.sum_messages([message], payloads)

    def prepare_sum(self, plan: ReductionPlan, slots: Slots) -> Callable[[], Tensor]:
        backend, rank, sums = self.group.backend, self.group.rank, []
        others = [owner for owner in range(self.group.world_size) if owner != rank and plan.views_of(owner)]
        for owners in _together(plan, others):
            parts, places = [_parts(plan, owner) for owner in owners], [slots.bounds[each] for each in owners]
            outs = [*itertools.chain(*parts)]
            spans = _spans(tuple([tuple([part.numel() for part in each]) for each in parts]))
            add = backend.prepare_sum(slots.received, places, outs, 1.0, spans, spare=True)
            sums.append((owners, add))

        def add_up() -> Tensor:
            heads = [*first_words(slots.received, slots.bounds)]
            for owners, add in sums:
                for owner, words in zip(owners, add(), strict=True):
                    heads[owner] = words
            return torch.stack(heads)

        return add_up


def _parts(plan: ReductionPlan, owner: int) -> list[Tensor]:
    """Return the parts of an owner's weights, by their bits."""
    return [part for weights in plan.views_of(owner) for part in weights.view(torch.int16).split(PART)]


def _together(plan: ReductionPlan, owners: Sequence[int]) -> Iterator[list[int]]:
    """Yield successive owners whose messages are added together."""
    batch, entries = list[int](), 0
    for owner in owners:
        numel = sum([weights.numel() for weights in plan.views_of(owner)])
        if batch and entries + numel > _TOGETHER:
            yield batch
            batch, entries = [], 0
        batch.append(owner)
        entries += numel
    if batch:
        yield batch


@functools.lru_cache(maxsize=1024)
def _spans(numels: tuple[tuple[int, ...], ...]) -> Spans:
    """Return the spans of messages that hold payloads of changes for each part; ``numels``: by message."""
    spans, first = [], 0
    for message in numels:
        parts = enumerate(message, first)
        spans.append([(number, 0, numel) for number, numel in parts for _ in BANDS])
        first += len(message)
    return Spans(spans)


#: Returns the time in seconds. Tests give their own figures.
clock = time.perf_counter
#: Steps of a trial with whole gathers, and with exact updates; steps from a decision to the next trial.
WHOLE, EXACT, PERIOD = 2, 3, 1024
#: The way in use stays while it takes at most so many times the time of the other one.
_HYSTERESIS = 1.1


class GatherChoice:
    """Decides in which steps the host gathers updated weights whole, on all ranks alike.

    Args:
        group: The ranks of the host's gathers.
    """

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self.clear()

    def clear(self) -> None:
        """Forget all: weights were loaded."""
        self._step, self._next_trial = -1, 0
        self._whole: bool | None = None
        """The decision; None before the first one."""
        self._times: dict[bool, dict[int, tuple[float, int]]] = {True: {}, False: {}}
        """Each way (True: whole gathers) has the seconds and the weights of every step of a trial."""

    def is_whole(self, step: int) -> bool:
        """Return whether weights are to be gathered whole in a step; a collective in the step after a trial.

        True in the first steps, since weights may have been loaded.
        """
        if step != self._step:
            self._step = step
            if len(self._times[False]) == EXACT:
                self._decide()
        on_trial = step >= self._next_trial
        return len(self._times[True]) < WHOLE if on_trial else bool(self._whole)

    @contextmanager
    def timed(self, weights: int, *, whole: bool) -> Iterator[bool]:
        """Surround a gather or an exact update of so many weights; give whether its time is measured."""
        measured = self._step >= self._next_trial and weights > 0
        began = self._now() if measured else 0.0
        yield measured
        if measured:
            seconds, count = self._times[whole].get(self._step, (0.0, 0))
            self._times[whole][self._step] = seconds + self._now() - began, count + weights

    def _now(self) -> float:
        group = self._group
        with lost_ranks.reported("gather of updated weights", group.process_group, self._step):
            lost_ranks.await_device(group.device, group.process_group)
        return clock()

    @own_traffic(recorded=False)
    def _decide(self) -> None:
        """Compare the times of a trial; a collective."""
        group, step = self._group, self._step
        least = [min(s / count for s, count in self._times[way].values()) for way in (True, False)]
        agreed = torch.tensor(least, dtype=torch.float64, device=group.device)
        with lost_ranks.reported("choice between gathers and exact updates", group.process_group, step):
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group.process_group)
            whole, exact = lost_ranks.received(agreed, group.process_group).tolist()
        before, factor = bool(self._whole), {None: 1.0, True: 1 / _HYSTERESIS, False: _HYSTERESIS}
        self._whole, self._next_trial = exact > whole * factor[self._whole], step + PERIOD
        self._times = {True: {}, False: {}}
        if self._whole == before:
            return
        way = "whole gathers" if self._whole else "exact updates"
        why = f"a million weights take {1e9 * whole:.3g} ms whole, {1e9 * exact:.3g} ms by what changed"
        if group.metrics is not None:
            group.metrics.event("decision", step=step, setting=way, reason=why)
        if dist.get_rank() == 0:
            said = f"dct: from step {step} on updated weights cross in {way}: {why}; compared again after"
            logger.warning("%s %d steps", said, PERIOD)
