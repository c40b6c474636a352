"""Slots: places of fixed size for messages. Both ends know the size beforehand, so nobody reads a size first.

====== ==== ===========================================================================================
offset type field
====== ==== ===========================================================================================
0      i64  bytes of the message. If there is less room, it is not there. -1: the sender failed.
8      i64  fingerprint of the operation
16     i64  1 if this message has nothing to add: the weights follow as they are
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


def slot_bytes(most: int) -> int:
    """Return the bytes of a slot for a message of at most so many."""
    return PREFIX + -(-most // ALIGNMENT) * ALIGNMENT


def first_words(buffer: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Return the words before the messages, int64 [slots, WORDS], of slots that begin at these bytes. The
    last word, which says nothing, is 0 whatever arrived.
    """
    words = buffer.view(torch.int64)
    found = torch.stack([words[begin // 8 : begin // 8 + WORDS] for begin, _ in bounds])
    found[:, -1] = 0
    return found
