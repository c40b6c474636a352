"""Exchanges whose message sizes are not read from a device before the messages are sent.

The kernels of a device write a message whose size the host does not know. So that the host need not wait for
it, the message travels in a slot of fixed size (:mod:`dct_plugin.codecs.slots`). Sender and receiver compute
the same size of the slot from the sizes of the last messages between the two. A message that does not fit is
sent again, whole. The first messages are exchanged with their sizes, which also proves that all ranks
exchange the same tensors.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..codecs.slots import FAILED, PREFIX, WORDS, slot_bytes
from .exchange import Exchange

#: Number of messages whose sizes decide the next slot.
_REMEMBERED = 4
#: Set in the fingerprint of operations that use slots: a rank that always exchanges sizes does another one.
FIXED_SIZE = 1 << 62


class SlotTransfer:
    """One exchange of slots, each rank with each other rank.

    Attributes:
        leaving: uint8: the slots to other ranks, one behind the other.
        arriving: uint8: the slots from all ranks, one behind the other.
        sends, bounds: For each rank, the first byte of its slot in ``leaving`` or ``arriving``, and the byte
            behind it.
    """

    def __init__(
        self, slots: tuple[Sequence[int], Sequence[int]], device: torch.device, shared: int | None = None
    ) -> None:
        self._shared = shared
        self.sends, self.bounds = (
            list(itertools.pairwise(itertools.accumulate(each, initial=0))) for each in slots
        )
        self.leaving, self.arriving = (
            torch.empty(sum(each), dtype=torch.uint8, device=device) for each in slots
        )

    def slot_to(self, receiver: int) -> Tensor:
        """Return the slot for the message to ``receiver``; if all ranks get the same, the own slot."""
        if self._shared is not None:
            return self.slot_from(self._shared)
        begin, end = self.sends[receiver]
        return self.leaving[begin:end]

    def slot_from(self, sender: int) -> Tensor:
        """Return the slot that arrives from ``sender``."""
        begin, end = self.bounds[sender]
        return self.arriving[begin:end]

    def message_from(self, sender: int, nbytes: int) -> Tensor:
        """Return the first ``nbytes`` of the message that arrived from ``sender``."""
        begin = self.bounds[sender][0] + PREFIX
        return self.arriving[begin : begin + nbytes]

    def room_to(self, receiver: int) -> int:
        """Return the bytes that the slot to ``receiver`` has for its message."""
        return max(self.slot_to(receiver).numel() - PREFIX, 0)

    def room_from(self, sender: int) -> int:
        """Return the bytes that the slot from ``sender`` has for its message."""
        begin, end = self.bounds[sender]
        return max(end - begin - PREFIX, 0)

    def words(self, senders: Sequence[int]) -> Tensor:
        """Return the first words of the slots from ``senders``, int64 [senders, WORDS]."""
        words = self.arriving.view(torch.int64)
        firsts = [words[self.bounds[s][0] // 8 :][:WORDS] for s in senders]
        return torch.cat([words[:0], *firsts]).view(-1, WORDS)


class FixedSizeExchange:
    """Slots between this rank and all others, for messages of one kind.

    Args:
        exchange: The transport.
        fingerprint: 62-bit description of the operation, the same on every rank.

    Attributes:
        fingerprint: That of the operation in slots.
    """

    def __init__(self, exchange: Exchange, fingerprint: int) -> None:
        self.exchange = exchange
        self.fingerprint = fingerprint | FIXED_SIZE
        ranks = range(exchange.world_size)
        self._sent, self._got = ([deque[int](maxlen=_REMEMBERED) for _ in ranks] for _ in range(2))

    def slots(self, device: torch.device, *, shared: bool = False) -> SlotTransfer:
        """Return empty slots for messages to and from all ranks. This rank's message to itself lies among
        those that arrive.

        Args:
            device: Device of the slots.
            shared: Every rank gets the same message, the one to itself.
        """
        rank = self.exchange.rank
        leaving = [0 if shared or r == rank else slot_bytes(each) for r, each in enumerate(self._sent)]
        arriving = [slot_bytes(each) for each in self._got]
        return SlotTransfer((leaving, arriving), device, rank if shared else None)

    def send(self, transfer: SlotTransfer) -> None:
        """Exchange the slots."""
        ranks = range(self.exchange.world_size)
        self.exchange.transfer_into(
            [transfer.slot_to(r) for r in ranks], [transfer.slot_from(r) for r in ranks]
        )

    def fail(self, transfer: SlotTransfer) -> None:
        """Send slots that say that this rank failed. Never raises."""
        try:
            for receiver in range(self.exchange.world_size):
                if (slot := transfer.slot_to(receiver)).numel():
                    head = torch.zeros(WORDS, dtype=torch.int64)
                    head[0] = FAILED
                    slot.view(torch.int64)[:WORDS] = to_device(head, slot.device)
            self.send(transfer)
        except Exception:  # the transport is gone as well: the others will see that
            return

    def resend(
        self,
        transfer: SlotTransfer,
        sent: Mapping[int, int],
        message_to: Callable[[int], Tensor],
        got: Mapping[int, int],
    ) -> dict[int, Tensor]:
        """Exchange the messages that did not fit; return those that arrive, by sender.

        Args:
            transfer: What was sent.
            sent, got: Bytes of the messages by receiver, and by sender.
            message_to: Returns the whole message to a receiver.
        """
        rank, ranks = self.exchange.rank, range(self.exchange.world_size)
        cut = {r for r, size in sent.items() if r != rank and size > transfer.room_to(r)}
        late = {s for s, size in got.items() if s != rank and size > transfer.room_from(s)}
        if not cut and not late:
            return {}
        nothing = transfer.arriving[:0]
        arrived = self.exchange.transfer(
            [message_to(r).to(nothing.device) if r in cut else nothing for r in ranks],
            [got[r] if r in late else 0 for r in ranks],
        )
        return {sender: arrived[sender] for sender in late}

    def remember(self, sent: Mapping[int, int], got: Mapping[int, int]) -> None:
        """Remember the bytes of messages by receiver, and by sender, for the size of the next slots."""
        for receiver, nbytes in sent.items():
            self._sent[receiver].append(nbytes)
        for sender, nbytes in got.items():
            self._got[sender].append(nbytes)
