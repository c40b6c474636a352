"""Exact updates of the weights: owners send the working weights whose bits changed.

A 16-bit weight changes in a step only if its master moved far enough. All ranks hold bitwise what a gather of
all weights would give them.

Where the host knows the lengths of messages, a message has a record of changes for each part of the weights.
Where lengths stay on a device, it has two payloads for each part: the changes by one step in the order of the
floats, 2 bits each, and all others, 16 bits each (:mod:`dct_plugin.codecs.changes`). If that is not smaller
than the weights, or a change has no code, or the message is longer than its slot, the weights follow as they
are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from ..codecs.changes import add_steps, record_bound, steps_between
from ..codecs.message import MessageWriter
from ..codecs.slots import first_words
from ..codecs.stats import Stats
from ..codecs.values import ValueDtype
from ..compression.stream import Encoded, encode_all
from ..kernels.job import Spans
from ..transport.slots import Slots
from .plan import PlannedTensor, ReductionPlan
from .topology import OwnersToAll, WrittenTensor, naming_sender

_Item = TypeVar("_Item")
#: Class in the metrics.
EXACT_CLASS = "parameter_exact"
#: Most entries of a record: positions and differences stay in a cache. Most entries of two payloads.
_RECORD, _PART = 1 << 20, 1 << 24


class ChangesToAll(OwnersToAll):
    """Every owner compares its working weights with those before the step, and sends what differs."""

    follows = True

    def encode(self, plan: ReductionPlan, writer: MessageWriter) -> list[WrittenTensor]:
        group, written = self.group, []
        copies, self.nothing_to_add = group.world_size - 1, None
        self._cut: list[Tensor] = []
        for each, shard in plan.owned_by(group.rank):
            held, encoded = each.view(shard), Encoded(numel=shard.stop - shard.start, density=0.0)
            size = _RECORD if group.backend.lengths_on_host else _PART
            for new, old in zip(held.split(size), self.masters(each.name).split(size), strict=True):
                encoded.stats += self._changes(new, old, writer)
            dense = copies * held.nbytes
            written.append(WrittenTensor(None, EXACT_CLASS, encoded, None, dense, []))
        if written and not group.backend.lengths_on_host:
            self._give_up_large(plan.views_of(group.rank), written)
        return [each._replace(copies=[copies] * len(each.encoded.stats)) for each in written]

    def _changes(self, new: Tensor, old: Tensor, writer: MessageWriter) -> list[Stats]:
        """Append the changes of a part of the weights to the message."""
        backend = self.group.backend
        if not backend.lengths_on_host:
            single, others, cut = steps_between(new, old)
            self._cut.append(cut)
            coded = ((single, ValueDtype.INT2), (others, ValueDtype.FP16))
            return [encode_all(backend, each, writer, code, zeros=False).stats[0] for each, code in coded]
        stats = backend.encode_changes(new, old, writer.reserve(record_bound(old.numel())))
        writer.advance(stats)
        return [stats]

    def _give_up_large(self, weights: Sequence[Tensor], written: Sequence[WrittenTensor]) -> None:
        """Have the weights follow payloads that are not smaller, or lack a change; the host is not asked."""
        sizes = torch.stack([stats.device_counts for each in written for stats in each.encoded.stats])[:, 0]
        large = sizes.sum() >= sum(each.nbytes for each in weights)
        self.nothing_to_add = (large | torch.stack(self._cut).any()).to(torch.int64)

    def payload_bounds(self, tensor: PlannedTensor) -> Sequence[int]:
        return [tensor.view(shard).nbytes for shard in tensor.parts]

    def complete(self, plan: ReductionPlan, senders: Sequence[int]) -> None:
        rank, ranks = self.group.rank, range(self.group.world_size)
        weights = {owner: [each.view(torch.uint8) for each in plan.views_of(owner)] for owner in senders}
        nothing = torch.empty(0, dtype=torch.uint8, device=self.group.device)
        own = torch.cat([nothing, *weights.get(rank, ())])
        sizes = [sum(each.numel() for each in weights.get(owner, ())) for owner in ranks]
        arrived = self.group.exchange.transfer([own for _ in ranks], sizes)
        for owner in set(senders) - {rank}:
            parts = arrived[owner].split([each.numel() for each in weights[owner]])
            torch._foreach_copy_(weights[owner], parts)

    def largest_messages(self, plan: ReductionPlan) -> list[int]:
        return [sum(map(_most_bytes, plan.views_of(owner))) for owner in range(self.group.world_size)]

    def add(self, plan: ReductionPlan, messages: Sequence[Tensor]) -> None:
        group = self.group
        for owner, message in enumerate(messages):
            if owner != group.rank:  # whose weights are new already
                parts = [part for weights in plan.views_of(owner) for part in weights.split(_RECORD)]
                with naming_sender(group, owner):
                    group.backend.apply_changes(message, parts)

    def prepare_sum(self, plan: ReductionPlan, slots: Slots) -> Callable[[], Tensor]:
        return lambda: self._add_slots(plan, slots)  # memory for the sums is made when messages are there

    def _add_slots(self, plan: ReductionPlan, slots: Slots) -> Tensor:
        """Add the messages in slots to the weights of their owners, of many owners together; return the first
        words of the slots.
        """
        group, heads = self.group, [*first_words(slots.received, slots.bounds)]
        parts = {
            owner: [part for weights in plan.views_of(owner) for part in weights.split(_PART)]
            for owner in range(group.world_size)
            if owner != group.rank  # whose weights are new already
        }
        for owners in _together([owner for owner in parts if parts[owner]], lambda o: _entries(parts[o])):
            places = [slots.bounds[owner] for owner in owners]
            spans = _spans(tuple(tuple([part.numel() for part in parts[owner]]) for owner in owners))
            with _steps([part for owner in owners for part in parts[owner]]) as outs:
                found = group.backend.prepare_sum(slots.received, places, outs, 1.0, spans, spare=True)()
            for owner, words in zip(owners, found, strict=True):
                heads[owner] = words
        return torch.stack(heads)


@contextmanager
def _steps(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Give zeros for the two payloads of each part of the weights; add the steps that are in them then."""
    sizes = [part.numel() for part in parts]
    single, others = steps = parts[0].new_zeros((2, sum(sizes)), dtype=torch.float16)
    yield [step for pair in zip(*(each.split(sizes) for each in steps), strict=True) for step in pair]
    at = 0
    for batch in _together(parts, Tensor.numel):
        weights = [part.view(torch.int16) for part in batch]
        bits, end = torch.cat(weights), at + _entries(batch)
        add_steps(bits, single[at:end], others[at:end])
        torch._foreach_copy_(weights, bits.split([part.numel() for part in batch]))
        at = end


def _entries(parts: Sequence[Tensor]) -> int:
    return sum([part.numel() for part in parts])


def _together(items: Iterable[_Item], entries: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yield successive items together, as many as have the entries of the largest part; one at least."""
    batch, most = list[_Item](), 0
    for item in items:
        most += entries(item)
        if batch and most > _PART:
            yield batch
            batch, most = [], entries(item)
        batch.append(item)
    if batch:
        yield batch


@functools.lru_cache(maxsize=1024)
def _spans(numels: tuple[tuple[int, ...], ...]) -> Spans:
    """Return the spans of messages that hold two payloads for each part; ``numels``: by message."""
    first = itertools.count()
    return Spans([[(next(first), 0, numel) for numel in message for _ in range(2)] for message in numels])


def _most_bytes(weights: Tensor) -> int:
    """Return the bytes that a message can have for these weights."""
    return sum(record_bound(part.numel()) for part in weights.split(_RECORD))
