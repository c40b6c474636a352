"""Exact updates of the weights: owners send the working weights whose bits changed.

A 16-bit weight changes in a step only if its master moved far enough. All ranks hold bitwise what a gather of
all weights would give them. A message has payloads of changes for each part of the weights
(:mod:`dct_plugin.codecs.changes`). If they are not smaller than the weights, or a payload has no room for its
changes, the weights follow as they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..codecs.changes import BANDS, PART
from ..codecs.message import MessageWriter
from ..codecs.slots import first_words
from ..compression.stream import Encoded
from ..kernels.job import Spans
from ..transport.slots import Slots
from .plan import PlannedTensor, ReductionPlan
from .topology import OwnersToAll, WrittenTensor, naming_sender

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
