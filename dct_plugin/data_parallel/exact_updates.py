"""Exact updates of the weights: owners send the working weights whose bits changed.

A 16-bit weight changes in a step only if its master moved far enough. All ranks hold bitwise what a gather of
all weights would give them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..codecs.changes import record_bound
from ..codecs.message import MessageWriter
from ..compression.stream import Encoded
from ..transport.slots import Slots
from .plan import ReductionPlan
from .stream_group import WrittenTensor
from .topology import Destination, OwnersToAll

#: Class in the metrics.
EXACT_CLASS = "parameter_exact"
#: Most entries of a record: positions and differences stay in a cache.
_RECORD = 1 << 20


class ChangesToAll(OwnersToAll):
    """Every owner compares its working weights with its masters, rounded, and sends what differs."""

    def write(self, plan: ReductionPlan, writers: Sequence[MessageWriter]) -> list[WrittenTensor]:
        group, writer, written = self.group, writers[0], []
        copies = group.world_size - 1
        for each, shard in plan.owned_by(group.rank):
            held, encoded = each.view(shard), Encoded(numel=shard.stop - shard.start)
            wanted = self.masters(each.name).to(held.dtype)
            for new, old in zip(wanted.split(_RECORD), held.split(_RECORD), strict=True):
                stats = group.backend.encode_changes(new, old, writer.reserve(record_bound(old.numel())))
                writer.advance(stats)
                encoded.stats.append(stats)
            # No density is aimed at: the metrics get the share that changed.
            encoded.density = sum(stats.nnz for stats in encoded.stats) / max(encoded.numel, 1)
            dense = copies * held.numel() * held.element_size()
            sent = [copies] * len(encoded.stats)
            written.append(WrittenTensor(None, EXACT_CLASS, encoded, None, dense, sent))
        return written

    def destinations(self, plan: ReductionPlan) -> list[Destination]:
        return [_ChangedWeights(self, plan, owner) for owner in range(self.group.world_size)]


class _ChangedWeights(Destination):
    """An owner's working weights, which its message changes."""

    def __init__(self, phase: ChangesToAll, plan: ReductionPlan, owner: int) -> None:
        super().__init__(phase.group, [owner], plan.views_of(owner))
        own = plan.owned_by(owner) if owner == phase.group.rank else []
        self._wanted = [phase.masters(each.name) for each, _ in own]

    def add_messages(self, messages: Sequence[Tensor]) -> None:
        if self._wanted:  # what the message says, in one pass
            for held, wanted in zip(self.tensors, self._wanted, strict=True):
                held.copy_(wanted)
            return
        parts = [part for tensor in self.tensors for part in tensor.split(_RECORD)]
        with self.group.naming_sender(self.senders[0]):
            self.group.backend.apply_changes(messages[0], parts)

    def add_slots(self, slots: Slots) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("records of changed weights travel with their lengths")
