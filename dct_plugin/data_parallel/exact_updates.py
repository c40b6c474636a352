"""Exact updates of the weights: owners send the working weights whose bits changed.

A 16-bit weight changes in a step only if its master moved far enough. All ranks hold bitwise what a gather of
all weights would give them.

Where the host knows the lengths of messages, a message has a record of changes for each part of the weights.
Where lengths stay on a device, it has two payloads for each part: the changes by one step in the order of the
floats, 2 bits each, and all others, 16 bits each (:mod:`dct_plugin.codecs.changes`). If that is not smaller
than the weights, or a change has no code, the message is the weights as they are, without any header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..codecs.changes import add_steps, record_bound, steps_between
from ..codecs.copies import to_device
from ..codecs.message import MessageWriter
from ..codecs.slots import first_words
from ..codecs.stats import Figures, Stats
from ..codecs.values import ValueDtype
from ..compression.stream import Encoded, encode_all
from ..transport.slots import Slots
from .plan import ReductionPlan
from .stream_group import WrittenTensor
from .topology import Destination, OwnersToAll

#: Class in the metrics.
EXACT_CLASS = "parameter_exact"
#: Most entries of a record: positions and differences stay in a cache. Most entries of two payloads.
_RECORD, _PART = 1 << 20, 1 << 24


class ChangesToAll(OwnersToAll):
    """Every owner compares its working weights with those before the step, and sends what differs."""

    def write(self, plan: ReductionPlan, writer: MessageWriter) -> list[WrittenTensor]:
        group, written = self.group, []
        copies, self.unreadable = group.world_size - 1, None
        self._cut: list[Tensor] = []
        for each, shard in plan.owned_by(group.rank):
            held, encoded = each.view(shard), Encoded(numel=shard.stop - shard.start, density=0.0)
            size = _RECORD if group.backend.lengths_on_host else _PART
            for new, old in zip(held.split(size), self.masters(each.name).split(size), strict=True):
                encoded.stats += self._changes(new, old, writer)
            dense = copies * held.nbytes
            written.append(WrittenTensor(None, EXACT_CLASS, encoded, None, dense, []))
        if written and not group.backend.lengths_on_host:
            self._replace_large(plan.views_of(group.rank), written, writer)
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

    def _replace_large(
        self, weights: Sequence[Tensor], written: Sequence[WrittenTensor], writer: MessageWriter
    ) -> None:
        """Put the weights into the message in place of payloads that are not smaller, or lack a change; the
        host is not asked.
        """
        figures = [stats.device_counts for each in written for stats in each.encoded.stats]
        large = torch.stack(figures)[:, 0].sum() >= sum(each.nbytes for each in weights)
        self.unreadable = replaced = (large | torch.stack(self._cut).any()).to(torch.int64)
        torch._foreach_mul_([counts[:1] for counts in figures], 1 - replaced)
        sizes = torch.tensor([number for held in weights for number in (held.nbytes, 0, 0, 0)])
        table = Figures(to_device(sizes, replaced.device) * replaced)
        for number, (held, each) in enumerate(zip(weights, written, strict=True)):
            writer.reserve(held.nbytes).copy_(held.view(torch.uint8))
            stats = Stats.on_device(table, number)
            writer.advance(stats)
            each.encoded.stats.append(stats)

    def largest_messages(self, plan: ReductionPlan) -> list[int]:
        return [sum(map(_most_bytes, plan.views_of(owner))) for owner in range(self.group.world_size)]

    def destinations(self, plan: ReductionPlan) -> list[Destination]:
        ranks = range(self.group.world_size)
        return [_ChangedWeights(self.group, [owner], plan.views_of(owner)) for owner in ranks]

    def prepare_sum(self, plan: ReductionPlan, slots: Slots) -> Callable[[], tuple[Tensor, Tensor]]:
        def add() -> tuple[Tensor, Tensor]:  # the tensors of the sums are made then
            ranks = range(self.group.world_size)
            found = [_ChangedWeights(self.group, [o], plan.views_of(o)).add_slots(slots) for o in ranks]
            heads, missing = zip(*found, strict=True)
            return torch.cat(heads), torch.cat(missing)

        return add


def _most_bytes(weights: Tensor) -> int:
    """Return the bytes that a message can have for these weights."""
    return sum(record_bound(part.numel()) for part in weights.split(_RECORD))


class _ChangedWeights(Destination):
    """An owner's working weights, which its message changes."""

    def add_messages(self, messages: Sequence[Tensor]) -> None:
        group, (message,) = self.group, messages
        if self.senders[0] == group.rank:  # they are new already
            return
        with group.naming_sender(self.senders[0]):
            if group.backend.lengths_on_host:
                parts = [part for tensor in self.tensors for part in tensor.split(_RECORD)]
                group.backend.apply_changes(message, parts)
            elif message.numel() == sum(each.nbytes for each in self.tensors):
                weights = message.split([each.nbytes for each in self.tensors])
                for tensor, own in zip(self.tensors, weights, strict=True):
                    tensor.view(torch.uint8).copy_(own)
            else:
                with self._steps() as outs:
                    group.backend.sum_messages([message], outs)

    def add_slots(self, slots: Slots) -> tuple[Tensor, Tensor]:
        group, bounds = self.group, slots.bounds[self.senders[0]]
        if self.senders[0] == group.rank:
            return first_words(slots.received, [bounds]), slots.received.new_zeros(1, dtype=torch.int64)
        with self._steps() as outs:
            return group.backend.prepare_sum(slots.received, [bounds], outs, 1.0, spare=True)()

    @contextmanager
    def _steps(self) -> Iterator[list[Tensor]]:
        """Give zeros for the payloads of a message; add the steps that are in them then to the weights."""
        parts = [part for tensor in self.tensors for part in tensor.split(_PART)]
        steps = [each.new_zeros((2, each.numel()), dtype=torch.float16) for each in parts]
        yield [each for both in steps for each in both]
        for part, both in zip(parts, steps, strict=True):
            add_steps(part, *both)
