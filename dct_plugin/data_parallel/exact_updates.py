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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..codecs.changes import add_steps, record_bound, steps_between
from ..codecs.message import MessageWriter
from ..codecs.slots import first_words
from ..codecs.stats import Stats
from ..codecs.values import ValueDtype
from ..compression.stream import Encoded, encode_all
from ..transport.slots import Slots
from .plan import PlannedTensor, ReductionPlan
from .topology import OwnersToAll, WrittenTensor, naming_sender

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
        ranks = range(self.group.world_size)  # the tensors of the sums are made when messages are there
        return lambda: torch.cat([self._add_slot(plan.views_of(owner), slots, owner) for owner in ranks])

    def _add_slot(self, weights: Sequence[Tensor], slots: Slots, owner: int) -> Tensor:
        """Add the message in the slot of an owner to its weights; return the first words of the slot."""
        group, bounds = self.group, slots.bounds[owner]
        if owner == group.rank:
            return first_words(slots.received, [bounds])
        with _steps(weights) as outs:
            return group.backend.prepare_sum(slots.received, [bounds], outs, 1.0, spare=True)()


@contextmanager
def _steps(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Give zeros for the payloads of a message; add the steps that are in them then to the weights."""
    parts = [part for tensor in weights for part in tensor.split(_PART)]
    steps = [each.new_zeros((2, each.numel()), dtype=torch.float16) for each in parts]
    yield [each for both in steps for each in both]
    for part, both in zip(parts, steps, strict=True):
        add_steps(part, *both)


def _most_bytes(weights: Tensor) -> int:
    """Return the bytes that a message can have for these weights."""
    return sum(record_bound(part.numel()) for part in weights.split(_RECORD))
