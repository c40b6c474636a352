"""Exchanges whose message sizes are not read from a device before the messages are sent.

The kernels of a device write a message whose size the host does not know. So that the host need not wait for
it, the message travels in a slot of fixed size (:mod:`dct_plugin.codecs.slots`). Sender and receiver compute
the same size of the slot: from what both know of the message (its entries), and from the bytes per entry of
the last messages between the two. A message that does not fit is sent again, whole. The first messages are
exchanged with their sizes, which also proves that all ranks exchange the same tensors.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..codecs.slots import ALIGNMENT, FAILED, PREFIX, WORDS
from .exchange import Exchange

#: Number of messages whose sizes decide the next slot, and the factor of spare room over the largest of them.
_REMEMBERED, _SPARE = 4, 9 / 8
#: Set in the fingerprint of operations that use slots: a rank that always exchanges sizes does another one.
FIXED_SIZE = 1 << 62


class MessageSize(NamedTuple):
    """The size of a message, as far as sender and receiver know it beforehand.

    Attributes:
        entries: The size grows with them; 0: nothing is sent.
        fixed: Bytes besides.
        most: Bytes that the message cannot exceed; None: not known.
    """

    entries: int
    fixed: int = 0
    most: int | None = None


class SizeHistory:
    """Bytes per entry of the last messages from one rank to another."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, size: MessageSize, nbytes: int) -> None:
        """Remember a message of ``nbytes``."""
        if size.entries:
            self._shares.append(max(nbytes - size.fixed, 0) / size.entries)

    def slot_bytes(self, size: MessageSize) -> int:
        """Return the bytes of the slot for the next message."""
        if not size.entries:
            return 0
        room = size.most
        if self._shares:
            expected = size.fixed + math.ceil(_SPARE * max(self._shares) * size.entries)
            room = expected if room is None else min(room, expected)
        assert room is not None, "the first messages are exchanged with their sizes"
        return PREFIX + -(-room // ALIGNMENT) * ALIGNMENT


class SlotTransfer:
    """One exchange of slots, each rank with each other rank.

    Attributes:
        sent, got: Sizes of the messages to every rank, and from it.
        leaving: uint8: the slots to other ranks, one behind the other.
        arriving: uint8: the slots from all ranks, one behind the other.
        sends, bounds: For each rank, the first byte of its slot in ``leaving`` or ``arriving``, and the byte
            behind it.
    """

    def __init__(
        self,
        sent: Sequence[MessageSize],
        got: Sequence[MessageSize],
        slots: tuple[Sequence[int], Sequence[int]],
        device: torch.device,
        shared: int | None = None,
    ) -> None:
        self.sent, self.got, self._shared = sent, got, shared
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

    def words(self, senders: Sequence[int], arrived: Tensor | None = None) -> Tensor:
        """Return the first words of the slots from ``senders``, int64 [senders, WORDS]; those in ``arrived``,
        a copy of :attr:`arriving`, if that is given.
        """
        words = (self.arriving if arrived is None else arrived).view(torch.int64)
        firsts = [words[self.bounds[s][0] // 8 :][:WORDS] for s in senders]
        return torch.cat([words[:0], *firsts]).view(-1, WORDS)


class FixedSizeExchange:
    """Slots between this rank and all others, for messages of one kind.

    Args:
        exchange: The transport.
        fingerprint: 62-bit description of the operation, the same on every rank.

    Attributes:
        fingerprint: That of the operation in slots.
        known: Whether messages have been exchanged before.
    """

    def __init__(self, exchange: Exchange, fingerprint: int) -> None:
        self.exchange = exchange
        self.fingerprint = fingerprint | FIXED_SIZE
        self.known = False
        ranks = range(exchange.world_size)
        self._sent, self._got = [SizeHistory() for _ in ranks], [SizeHistory() for _ in ranks]

    def slots(
        self,
        sent: Sequence[MessageSize],
        got: Sequence[MessageSize],
        device: torch.device,
        *,
        own: bool = False,
        shared: bool = False,
    ) -> SlotTransfer:
        """Return empty slots for messages to and from all ranks.

        Args:
            sent, got: Sizes of the messages to every rank, and from it.
            device: Device of the slots.
            own: Keep a slot for this rank's message to itself among those that arrive.
            shared: Every rank gets the same message, which lies in that slot.
        """
        rank = self.exchange.rank
        slots = (
            [history.slot_bytes(size) for history, size in zip(self._sent, sent, strict=True)],
            [history.slot_bytes(size) for history, size in zip(self._got, got, strict=True)],
        )
        slots[0][rank] = 0
        if shared:
            slots[0][:] = [0] * len(sent)
        if not own:
            slots[1][rank] = 0
        return SlotTransfer(sent, got, slots, device, rank if shared else None)

    def send(self, transfer: SlotTransfer) -> None:
        """Exchange the slots."""
        ranks = range(self.exchange.world_size)
        self.exchange.transfer_into(
            [transfer.slot_to(r) for r in ranks], [transfer.slot_from(r) for r in ranks]
        )

    @contextmanager
    def telling(self, transfer: SlotTransfer) -> Iterator[None]:
        """Tell the ranks that wait for the slots of an error within the block."""
        try:
            yield
        except BaseException:
            self.fail(transfer)
            raise

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

    def exchange_from_host(self, transfer: SlotTransfer, messages: Sequence[Tensor]) -> list[Tensor]:
        """Send ``messages`` to all ranks and return theirs, uint8 on the host, which waits once. The own
        message is passed through.

        Raises:
            DesyncError: See :meth:`checked_sizes`.
        """
        peers = [r for r in range(len(messages)) if r != self.exchange.rank]
        content = torch.zeros(transfer.leaving.numel(), dtype=torch.uint8)
        for r in peers:
            begin, end = transfer.sends[r]
            head = torch.tensor([messages[r].numel(), self.fingerprint, 0, 0])
            body = torch.cat([head.view(torch.uint8), messages[r]])[: end - begin]
            content[begin : begin + body.numel()] = body
        transfer.leaving.copy_(to_device(content, transfer.leaving.device))
        self.send(transfer)
        copy = to_host(transfer.arriving)
        words = transfer.words(peers, copy).view(-1).tolist()
        late, sizes = self.finish(transfer, {r: messages[r] for r in peers}, words, peers)
        received = list(messages)
        for r in peers:
            begin = transfer.bounds[r][0] + PREFIX
            received[r] = to_host(late[r]) if r in late else copy[begin : begin + sizes[r]]
        return received

    def finish(
        self,
        transfer: SlotTransfer,
        messages: Mapping[int, Tensor],
        words: Sequence[int],
        senders: Sequence[int],
    ) -> tuple[dict[int, Tensor], dict[int, int]]:
        """Check what arrived, send again what did not fit, and remember the sizes.

        Args:
            transfer: What was sent.
            messages: The messages that were sent, whole, by receiver.
            words: First words of the slots from ``senders``, on the host.
            senders: Ranks whose slots are not empty.

        Returns:
            The messages that did not arrive whole at first, and the sizes of all messages, by sender.

        Raises:
            DesyncError: See :meth:`checked_sizes`.
        """
        headers = {s: words[WORDS * at :][:2] for at, s in enumerate(senders)}
        got = self.checked_sizes(headers, {s: transfer.got[s].most for s in senders})
        sent = {r: message.numel() for r, message in messages.items()}
        late = self.resend(transfer, sent, messages.__getitem__, got)
        self.remember(transfer.sent, sent, transfer.got, got)
        return late, got

    def checked_sizes(
        self, headers: Mapping[int, Sequence[int]], most: Mapping[int, int | None]
    ) -> dict[int, int]:
        """Return the sizes of the messages that arrived, by sender.

        Args:
            headers: Size and fingerprint from each sender, the first words of its slot.
            most: Bytes that the message of a sender cannot exceed; None: not known.

        Raises:
            DesyncError: A rank failed, is at another operation, or announces more bytes than it can have.
        """
        all_headers: list[Sequence[int]] = [(0, self.fingerprint)] * self.exchange.world_size
        bounds = [0] * len(all_headers)
        for sender, header in headers.items():
            limit = most[sender]
            all_headers[sender], bounds[sender] = header, header[0] if limit is None else limit
        sizes = self.exchange.checked_sizes(all_headers, self.fingerprint, bounds)
        return {sender: sizes[sender] for sender in headers}

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

    def remember(
        self,
        sent: Sequence[MessageSize],
        sent_bytes: Mapping[int, int],
        got: Sequence[MessageSize],
        got_bytes: Mapping[int, int],
    ) -> None:
        """Remember the bytes of messages by receiver, and by sender, for the size of the next slots."""
        self.known = True
        for receiver, nbytes in sent_bytes.items():
            self._sent[receiver].add(sent[receiver], nbytes)
        for sender, nbytes in got_bytes.items():
            self._got[sender].add(got[sender], nbytes)
