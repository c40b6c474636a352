"""Messages of embeddings in slots (:mod:`dct_plugin.transport.fixed_size`), written and read on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..codecs.slots import PREFIX, WORDS
from ..kernels.embedding_format import DeviceMessages
from ..transport.fixed_size import SlotTransfer


def fill_slots(
    transfer: SlotTransfer,
    fingerprint: int,
    numbers: Mapping[int, int],
    messages: DeviceMessages,
    nbytes: Tensor,
) -> None:
    """Put messages into their slots, as far as they fit.

    Args:
        fingerprint: That of the operation.
        numbers: Number of the message for each receiver.
        nbytes: int64 [messages] on the device, their sizes.
    """
    heads = torch.zeros(len(nbytes), WORDS, dtype=torch.int64, device=nbytes.device)
    heads[:, 0] = nbytes
    heads[:, 1] = fingerprint
    for receiver, number in numbers.items():
        slot = transfer.slot_to(receiver)
        body = messages.head(number, len(slot) - PREFIX)
        slot.view(torch.int64)[:WORDS] = heads[number]
        slot[PREFIX : PREFIX + len(body)] = body


class ArrivedMessages(NamedTuple):
    """Messages that arrived and have not been read.

    Attributes:
        words: int64 [senders, WORDS] on the device, first words of the slots.
        begins: First byte of each message in :attr:`SlotTransfer.arriving`.
        nbytes: int64 [senders] on the device: bytes of each message that are there, without ``spare``.
        most: Bytes that none of them exceeds.
    """

    words: Tensor
    begins: list[int]
    nbytes: Tensor
    most: int


def arrived_messages(transfer: SlotTransfer, senders: Sequence[int], spare: int = 0) -> ArrivedMessages:
    """Return the messages of ``senders`` without their last ``spare`` bytes, for kernels to read."""
    begins = [transfer.bounds[s][0] + PREFIX for s in senders]
    rooms = [transfer.room_from(s) - spare for s in senders]
    words = transfer.words(senders)
    room = to_device(torch.tensor(rooms, dtype=torch.int64), words.device)
    nbytes = torch.minimum(words[:, 0] - spare, room).clamp(min=0)
    return ArrivedMessages(words, begins, nbytes, max(rooms, default=0))
