"""A frame: a message in a room whose size both ends know beforehand, so that nobody has to look at its own.

====== ==== ===========================================================================================
offset type field
====== ==== ===========================================================================================
0      i64  bytes of the message; more than there is room for: it did not fit, and what is there is its
            beginning. -1: the sender failed.
8      i64  fingerprint of the operation
16     i64  1 if the sender lacked a message that did not fit, so that this one stands for nothing
24     i64  0
32          the message
====== ==== ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

#: Bytes, and 64-bit words, before the message.
PREFIX = 32
WORDS = 4
FAILED = -1
#: Frames are a multiple of it longer than their prefix.
ALIGNMENT = 256


def frame_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a frame for the next message of a series whose last ones had ``sizes``.

    An eighth more than the largest: thresholds that follow a sample hardly ever need more.
    """
    room = max(sizes) * 9 // 8
    return PREFIX + -(-room // ALIGNMENT) * ALIGNMENT
