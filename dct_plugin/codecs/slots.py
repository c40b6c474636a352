"""Slots: places of fixed size for messages. Both ends know the size beforehand, so nobody reads a size first.

====== ==== ===========================================================================================
offset type field
====== ==== ===========================================================================================
0      i64  bytes of the message. If there is less room, the slot holds its beginning. -1: the sender
            failed.
8      i64  fingerprint of the operation
16     i64  1 if this message has no payloads to add: the sender lacked a message that did not fit, and this
            one stands for nothing; or it is weights as they are
24     i64  0
32          the message
====== ==== ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Bytes, and 64-bit words, before the message.
PREFIX = 32
WORDS = 4
FAILED = -1
#: A slot without its prefix is a multiple of this many bytes.
ALIGNMENT = 256


def slot_bytes(largest: int, most: int = 1 << 62) -> int:
    """Return the bytes of a slot for the next message of a series, of whose last messages the ``largest`` is
    so long.

    A slot has an eighth more: thresholds that follow a sample hardly ever need more. It has no more than
    ``most``, rounded up.
    """
    room = min(largest * 9 // 8, most)
    return PREFIX + -(-room // ALIGNMENT) * ALIGNMENT


def first_words(buffer: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Return the words before the messages, int64 [slots, WORDS], of slots that begin at these bytes. The
    last word, which says nothing, is 0 whatever arrived.
    """
    words = buffer.view(torch.int64)
    found = torch.stack([words[begin // 8 : begin // 8 + WORDS] for begin, _ in bounds])
    found[:, -1] = 0
    return found
