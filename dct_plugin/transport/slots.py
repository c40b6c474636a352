"""Messages in slots: buffers of a capacity that sender and receiver agree on, with the length in the header.

The kernels of a device write a message whose length the host does not know. So that the host need not wait
for it, the message travels in a slot (:mod:`dct_plugin.codecs.slots`). Sender and receiver compute the same
capacity from the lengths of the last messages between the two. What did not fit of a message is sent behind
it. The first messages are exchanged with their lengths, which also proves that all ranks exchange the same
tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..codecs.message import MessageWriter
from ..codecs.slots import FAILED, PREFIX, WORDS, first_words, slot_bytes
from .exchange import Exchange

#: Number of messages whose lengths decide the next capacity.
_REMEMBERED = 4
#: Slots of unequal capacity travel at the largest one, in one all-gather, up to so many times their bytes.
_MOST_PADDING = 1.03


class Slots:
    """The slots of one exchange: one to and one from each other rank, and this rank's own.

    Args:
        rank: Position of this rank.
        leaving, arriving: Bytes of the slot to and from each rank; the own one is among those that arrive.
        device: Device of the slots.
        shared: Every rank gets the same message, that of the own slot; ``leaving`` counts for nothing.

    Attributes:
        received: uint8: the slots from all ranks. The own one is the last, unless an all-gather sends them.
        bounds: For each rank, the first byte of its slot in ``received``, and the byte behind it.
        memory: uint8: the slots from all ranks, and behind them those to other ranks.
        bounds_to: The first byte of the slot to each rank in ``memory``, and the byte behind it; that of the
            own slot alone if it is for all.
        room_to, room_from: For each other rank, the bytes that the slots to and from it have for messages.
    """

    def __init__(
        self,
        rank: int,
        leaving: Sequence[int],
        arriving: Sequence[int],
        device: torch.device,
        *,
        shared: bool,
    ) -> None:
        self._rank, self._shared = rank, shared
        largest, total, ranks = max(arriving), sum(arriving), len(arriving)
        self._equal = shared and largest * ranks <= _MOST_PADDING * total
        if self._equal:
            arriving, total = [largest] * ranks, largest * ranks
        own = arriving[rank]
        *begins, _ = itertools.accumulate(arriving, initial=0)
        if not self._equal:
            begins[rank:] = [total - own, *[begin - own for begin in begins[rank + 1 :]]]
        self.bounds = [(begin, begin + size) for begin, size in zip(begins, arriving, strict=True)]
        self.room_from = [size - PREFIX for size in arriving]
        leaving = [own] * ranks if shared else [*leaving]
        self.room_to = [size - PREFIX for size in leaving]
        leaving[rank] = 0
        self._sizes_to = [] if self._equal else leaving
        self.memory = torch.empty(total + sum(self._sizes_to), dtype=torch.uint8, device=device)
        self.received = self.memory if self._equal else self.memory[:total]
        self.bounds_to = [self.bounds[rank]]
        if not shared:
            self.bounds_to = list(itertools.pairwise(itertools.accumulate(leaving, initial=total)))
            self.bounds_to[rank] = self.bounds[rank]

    def slot_from(self, sender: int) -> Tensor:
        """Return the slot that arrives from ``sender``."""
        return self.received[slice(*self.bounds[sender])]

    def message_from(self, sender: int, nbytes: int) -> Tensor:
        """Return the first ``nbytes`` of the message that arrived from ``sender``."""
        return self.slot_from(sender)[PREFIX : PREFIX + nbytes]

    def headers(self) -> Tensor:
        """Return the first words of all slots, int64 [ranks, WORDS]."""
        return first_words(self.received, self.bounds)

    def send(self, exchange: Exchange) -> None:
        """Exchange the slots."""
        if self._equal:
            exchange.gather_into(self.received)
            return
        begin, end = self.bounds[self._rank]  # that of the last slot
        sent, sizes = self.memory[end:], [end - begin for begin, end in self.bounds]
        sizes[self._rank] = 0
        if self._shared:
            sent.view(-1, end - begin).copy_(self.slot_from(self._rank))
        exchange.scatter_into(self.received[:begin], sizes, sent, self._sizes_to)


def fail(slots: Iterable[AgreedCapacities], device: torch.device) -> None:
    """Send slots that say that this rank failed, in place of those that others wait for. Never raises."""
    with contextlib.suppress(Exception):  # the transport is gone as well: the others will see that
        for capacities in slots:
            capacities.send_empty(device, FAILED, 0)


class AgreedCapacities:
    """The capacities of the slots between this rank and all others, for messages of one kind.

    Args:
        exchange: The transport.
        fingerprint: Description of the operation, the same on every rank.
        bounds: Most bytes that the message of each rank can have.
        shared: Every rank gets the same message.
    """

    def __init__(self, exchange: Exchange, fingerprint: int, bounds: Sequence[int], *, shared: bool) -> None:
        self.exchange, self.fingerprint, self.shared = exchange, fingerprint, shared
        self._bounds = bounds
        nothing = [0] * exchange.world_size
        self._sent, self._received = ([nothing] * _REMEMBERED for _ in range(2))

    def slots(self, device: torch.device) -> Slots:
        """Return empty slots for messages to and from all ranks."""
        leaving = [] if self.shared else [slot_bytes(max(last)) for last in zip(*self._sent, strict=True)]
        largest = map(max, zip(*self._received, strict=True))
        arriving = list(map(slot_bytes, largest, self._bounds))
        return Slots(self.exchange.rank, leaving, arriving, device, shared=self.shared)

    def send_empty(self, device: torch.device, size: int, fingerprint: int) -> Slots:
        """Send slots without messages, with this size and fingerprint; return them."""
        slots = self.slots(device)
        head = to_device(torch.tensor([size, fingerprint, 0, 0]), device)
        for begin, end in slots.bounds_to:
            slots.memory[begin:end].view(torch.int64)[:WORDS] = head
        slots.send(self.exchange)
        return slots

    def resend(
        self,
        slots: Slots,
        writer: MessageWriter,
        sent: Mapping[int, int],
        received: Mapping[int, int],
    ) -> dict[int, Tensor]:
        """Exchange what did not fit of messages; return the truncated ones, whole, by sender.

        Args:
            slots: The slots of the exchange.
            writer: That of the whole messages.
            sent, received: Bytes of the messages by receiver, and by sender.
        """
        rank, ranks = self.exchange.rank, range(self.exchange.world_size)
        truncated_to = {r for r, size in sent.items() if r != rank and size > slots.room_to[r]}
        truncated_from = {s for s, size in received.items() if s != rank and size > slots.room_from[s]}
        if not truncated_to and not truncated_from:
            return {}
        nothing, messages = slots.received[:0], writer.read() * (len(ranks) if self.shared else 1)
        arrived = self.exchange.transfer(
            [messages[r][slots.room_to[r] :] if r in truncated_to else nothing for r in ranks],
            [received[s] - slots.room_from[s] if s in truncated_from else 0 for s in ranks],
        )
        return {s: torch.cat([slots.slot_from(s)[PREFIX:], arrived[s]]) for s in truncated_from}

    def remember(self, sent: Mapping[int, int], received: Mapping[int, int]) -> None:
        """Remember the bytes of messages by receiver, and by sender, for the next capacities."""
        for last, now in ((self._sent, sent), (self._received, received)):
            last[:] = [*last[1:], [now[rank] for rank in range(len(now))]]
