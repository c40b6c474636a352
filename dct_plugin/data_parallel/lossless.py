"""Dense sums with a lossless code: exponents are Huffman-coded, signs and mantissas cross as they are.

The exponents of a gradient take 2.5 to 4 of their 8 bits, mantissas all of theirs (``docs/automatic.md``).
Every rank sums a part of the gradient from the messages of all ranks, and sends the sum to all.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from ..errors import PayloadError
from ..metrics import Record
from .stream_group import StreamGroup

#: Most entries of a message.
_CHUNK = 1 << 17
#: torch's integers that have the bits of a float.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(flat: Tensor) -> Tensor:
    """Return the message of a contiguous 1-D tensor of floats on the CPU: mantissas, then coded exponents."""
    numel, size = flat.numel(), flat.element_size()
    words = flat.view(_WORDS[size]).numpy().view(f"u{size}")
    # With the sign at the other end, the exponents of fp32 and bf16 are whole bytes.
    turned = words << 1
    turned |= words >> (8 * size - 1)
    planes = turned.view(np.uint8)
    coder = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    exponents = np.frombuffer(coder.compress(planes[size - 1 :: size].copy()) + coder.flush(), np.uint8)
    message = np.empty((size - 1) * numel + len(exponents), np.uint8)
    for place in range(size - 1):
        message[place * numel : (place + 1) * numel] = planes[place::size]
    message[(size - 1) * numel :] = exponents
    return torch.from_numpy(message)


def decode(message: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of the shape and type of ``like`` that a message holds.

    Raises:
        PayloadError: The message is damaged.
    """
    numel, size, data = like.numel(), like.element_size(), message.numpy()
    turned = np.empty(numel, f"u{size}")
    planes = turned.view(np.uint8)
    try:
        for place in range(size - 1):
            planes[place::size] = data[place * numel : (place + 1) * numel]
        exponents = zlib.decompress(data[(size - 1) * numel :].data, bufsize=max(numel, 1))
        planes[size - 1 :: size] = np.frombuffer(exponents, np.uint8)
    except (ValueError, zlib.error) as error:
        raise PayloadError(f"a lossless message of {len(data)} bytes is damaged: {error}") from error
    words = turned >> 1
    words |= turned << (8 * size - 1)
    return torch.from_numpy(words.view(f"i{size}")).view(like.dtype)


def all_reduce(group: StreamGroup, flat: Tensor, exchange_record: Record) -> int:
    """Replace ``flat`` by its sum over the ranks, bitwise the same on all; return the bytes sent.

    One chunk is coded while others travel.

    Raises:
        DesyncError: See :meth:`.transport.exchange.Exchange.all_to_all`.
        PayloadError: A message arrived damaged.
    """
    exchange, rank, ranks = group.exchange, group.rank, group.world_size
    chunks = [chunk.tensor_split(ranks) for chunk in flat.split(_CHUNK * ranks)]
    sent: list[list[Tensor]] = []

    def post(messages: list[Tensor]) -> None:
        with exchange_record.timed("exchange"):
            exchange.post(messages)
            exchange.progress()
        sent.append(messages)

    def collected() -> list[list[Tensor]]:
        posted, sent[:] = list(sent), []
        with exchange.preparing(posts=0), exchange_record.timed("exchange"):
            return [exchange.collect(messages[rank]) for messages in posted]

    with exchange.preparing(posts=len(chunks)):
        for parts in chunks:
            post([encode(part) for part in parts])
    nbytes = sum(each.numel() for messages in sent for r, each in enumerate(messages) if r != rank)
    received = collected()
    with exchange.preparing(posts=len(chunks)):
        for parts, messages in zip(chunks, received, strict=True):
            total = _decoded(group, messages[0], parts[rank], 0)
            for sender, message in enumerate(messages[1:], start=1):
                total += _decoded(group, message, total, sender)
            post([encode(total)] * ranks)
    nbytes += (ranks - 1) * sum(messages[rank].numel() for messages in sent)
    for parts, messages in zip(chunks, collected(), strict=True):
        for sender, (part, message) in enumerate(zip(parts, messages, strict=True)):
            part.copy_(_decoded(group, message, part, sender))
    return nbytes


def _decoded(group: StreamGroup, message: Tensor, like: Tensor, sender: int) -> Tensor:
    with group.naming_sender(sender):
        return decode(message, like)
