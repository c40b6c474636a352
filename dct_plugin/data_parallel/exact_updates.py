"""Exact updates of the weights: owners send the working weights whose bits changed.

A 16-bit weight changes in a step only if its master moved far enough. All ranks hold bitwise what a gather of
all weights would give them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..codecs.changes import record_bound
from ..codecs.message import MessageWriter
from ..compression.stream import Encoded
from ..transport.slots import Slots
from .plan import ReductionPlan
from .stream_group import StreamGroup, WrittenTensor
from .topology import Destination, OwnersToAll

#: Class in the metrics.
EXACT_CLASS = "parameter_exact"
#: Messages with a larger share of the bytes of their weights do not pay, and are left out for at most so
#: many steps.
_WORTH, _MOST_STEPS = 0.95, 64
#: Most entries of a record: positions and differences stay in a cache.
_RECORD = 1 << 20


class WholeGathers:
    """Decides in which steps the host gathers weights whole: the first one, since weights may have been
    loaded; and 1, 2, 4, ... steps after messages that were not smaller. All ranks get all messages, and
    decide alike.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, list[int]] = {}
        self._due: dict[str, tuple[int, int]] = {}
        """Each name has the last step of its whole gathers, and their number."""

    def clear(self) -> None:
        """Forget all: weights were loaded."""
        self._bytes.clear()
        self._due.clear()

    def due(self, name: str, step: int) -> bool:
        """Return whether weights are to be gathered whole in a step."""
        return name not in self._due or step <= self._due[name][0]

    def gathered(self, name: str) -> None:
        """Note that the host has gathered weights whole."""
        self._due.setdefault(name, (-1, 0))

    def add_message(self, names: Iterable[str], sent: int, whole: int) -> None:
        """Note the bytes of a message with changes of ``names``, and those of all its weights."""
        for name in names:
            found = self._bytes.setdefault(name, [0, 0])
            found[:] = found[0] + sent, found[1] + whole

    def end_update(self, step: int) -> None:
        """Decide by the messages of this step."""
        for name, (sent, whole) in self._bytes.items():
            count = min(2 * self._due.get(name, (-1, 0))[1] or 1, _MOST_STEPS)
            self._due[name] = (step + count, count) if sent > _WORTH * whole else (-1, 0)
        self._bytes.clear()


class ChangesToAll(OwnersToAll):
    """Every owner compares its working weights with those before the step, and sends what differs."""

    def __init__(self, group: StreamGroup, whole: WholeGathers) -> None:
        super().__init__(group)
        self.whole = whole

    def write(self, plan: ReductionPlan, writers: Sequence[MessageWriter]) -> list[WrittenTensor]:
        group, writer, written = self.group, writers[0], []
        copies = group.world_size - 1
        for each, shard in plan.owned_by(group.rank):
            held, encoded = each.view(shard), Encoded(numel=shard.stop - shard.start)
            before = self.masters(each.name)
            for new, old in zip(held.split(_RECORD), before.split(_RECORD), strict=True):
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
        self._whole, self._names = phase.whole, [each.name for each in plan.tensors]

    def add_messages(self, messages: Sequence[Tensor]) -> None:
        size = sum(each.numel() * each.element_size() for each in self.tensors)
        self._whole.add_message(self._names, messages[0].numel(), size)
        if self.senders[0] == self.group.rank:  # they are new already
            return
        parts = [part for tensor in self.tensors for part in tensor.split(_RECORD)]
        with self.group.naming_sender(self.senders[0]):
            self.group.backend.apply_changes(messages[0], parts)

    def add_slots(self, slots: Slots) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("records of changed weights travel with their lengths")
