"""Messages in slots: buffers of a capacity that sender and receiver agree on, with the length in the header.

The kernels of a device write a message whose length the host does not know. So that the host need not wait
for it, the message travels in a slot (:mod:`dct_plugin.codecs.slots`). Both ends compute its capacity: the
most bytes that the message can have, or, for exact updates, what the last messages had.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..codecs.slots import FAILED, PREFIX, WORDS, first_words, slot_bytes
from .exchange import Exchange

#: Number of messages whose lengths decide the next capacity.
_REMEMBERED = 4
#: Slots of unequal capacity travel at the largest one, in one all-gather, up to so many times their bytes.
_MOST_PADDING = 1.03


class SlotLayout:
    """Places of the slots of one exchange: one to and one from each other rank, and this rank's own.

    Args:
        rank: Position of this rank.
        leaving, arriving: Bytes of the slot to and from each rank; the own one is among those that arrive.
            ``leaving`` None: every rank gets the same message, that of the own slot.

    Attributes:
        equal: The slots travel in one all-gather.
        bounds: For each rank, the first byte of its slot, and the byte behind it. The own slot is the last,
            unless an all-gather sends them.
        bounds_to: The same for the slot to each rank; that of the own slot alone if it is for all.
        arriving: Bytes of the slots from all ranks; those to other ranks lie behind them.
        sizes_to: Bytes of the slot to each rank; none for an all-gather.
        room_from: Bytes that the slot from each rank has for a message.
    """

    def __init__(self, rank: int, leaving: Sequence[int] | None, arriving: Sequence[int]) -> None:
        self.rank, self.shared = rank, leaving is None
        largest, total, ranks = max(arriving), sum(arriving), len(arriving)
        self.equal = self.shared and largest * ranks <= _MOST_PADDING * total
        if self.equal:
            arriving, total = [largest] * ranks, largest * ranks
        own = arriving[rank]
        *begins, _ = itertools.accumulate(arriving, initial=0)
        if not self.equal:
            begins[rank:] = [total - own, *[begin - own for begin in begins[rank + 1 :]]]
        self.bounds = [(begin, begin + size) for begin, size in zip(begins, arriving, strict=True)]
        self.room_from = [size - PREFIX for size in arriving]
        sizes_to = [own] * ranks if leaving is None else [*leaving]
        sizes_to[rank] = 0
        self.sizes_to, self.arriving = [] if self.equal else sizes_to, total
        self.bounds_to = [self.bounds[rank]]
        if leaving is not None:
            self.bounds_to = list(itertools.pairwise(itertools.accumulate(sizes_to, initial=total)))
            self.bounds_to[rank] = self.bounds[rank]


class Slots:
    """The slots of one exchange.

    Args:
        layout: Their places.
        device: Their device.

    Attributes:
        memory: uint8: all slots.
        received: uint8: the slots from all ranks.
    """

    def __init__(self, layout: SlotLayout, device: torch.device) -> None:
        self.layout, self.bounds, self.bounds_to = layout, layout.bounds, layout.bounds_to
        nbytes = layout.arriving + sum(layout.sizes_to)
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.received = self.memory if layout.equal else self.memory[: layout.arriving]

    def headers(self) -> Tensor:
        """Return the first words of all slots, int64 [ranks, WORDS]."""
        return first_words(self.received, self.bounds)

    def send(self, exchange: Exchange) -> None:
        """Exchange the slots."""
        layout = self.layout
        if layout.equal:
            exchange.gather_into(self.received)
            return
        begin, end = self.bounds[layout.rank]  # that of the last slot
        sent, sizes = self.memory[end:], [end - begin for begin, end in self.bounds]
        sizes[layout.rank] = 0
        if layout.shared:
            sent.view(-1, end - begin).copy_(self.received[begin:end])
        exchange.scatter_into(self.received[:begin], sizes, sent, layout.sizes_to)


def fail(slots: Iterable[AgreedCapacities], device: torch.device) -> None:
    """Send slots that say that this rank failed, in place of those that others wait for. Never raises."""
    with contextlib.suppress(Exception):  # the transport is gone as well: the others will see that
        for capacities in slots:
            capacities.send_empty(device, FAILED, 0)


class AgreedCapacities:
    """The capacities of the slots between this rank and all others, for messages of one kind.

    Args:
        exchange: The transport.
        leaving, arriving: Most bytes of the message to and from each rank. ``leaving`` None: every rank gets
            the same message.
    """

    def __init__(self, exchange: Exchange, leaving: Sequence[int] | None, arriving: Sequence[int]) -> None:
        self.exchange, self._most = exchange, arriving
        slots = None if leaving is None else [*map(slot_bytes, leaving)]
        self.layout = SlotLayout(exchange.rank, slots, [*map(slot_bytes, arriving)])
        self._lengths: deque[Sequence[int]] = deque(maxlen=_REMEMBERED)

    def slots(self, device: torch.device) -> Slots:
        """Return empty slots for messages to and from all ranks."""
        return Slots(self.layout, device)

    def send_empty(self, device: torch.device, size: int, fingerprint: int) -> Slots:
        """Send slots without messages, with this size and fingerprint; return them."""
        slots = self.slots(device)
        head = to_device(torch.tensor([size, fingerprint, 0, 0], device="cpu"), device)
        for begin, end in slots.bounds_to:
            slots.memory[begin:end].view(torch.int64)[:WORDS] = head
        slots.send(self.exchange)
        return slots

    def follow(self, lengths: Sequence[int]) -> None:
        """Give the next slots an eighth more than the mean of the last messages of each sender, where every
        rank gets the same message.
        """
        self._lengths.append(lengths)
        wanted = [sum(each) * 9 // (8 * len(each)) for each in zip(*self._lengths, strict=True)]
        arriving = [*map(slot_bytes, map(min, wanted, self._most))]
        self.layout = SlotLayout(self.exchange.rank, None, arriving)
