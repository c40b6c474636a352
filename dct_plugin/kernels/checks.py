"""Argument checks that the backends share, and the opening of payloads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..codecs.payload import Payload, check_numel, parse_payload, verify_checksum
from ..errors import PayloadError

#: Entries of a residual in int8 that share an exponent, see :meth:`.backend.Backend.pack`.
PACK_BLOCK = 64
#: The smallest and the largest of these exponents.
PACK_EXPONENTS = (-112, 121)


def open_payload(payload: Payload | Tensor, numel: int, *, verify: bool = True) -> Payload:
    """Return ``payload`` with its header, checked; ``verify=False`` leaves the checksum to the kernel.

    Raises:
        PayloadError: The payload is not valid, or not of ``numel`` entries.
    """
    if not isinstance(payload, Payload):
        return Payload(payload, parse_payload(payload, numel, verify=verify))
    check_numel(payload.header, numel)
    if verify:
        verify_checksum(payload.header, payload.data)
    return payload


def split_message(messages: Sequence[Tensor], which: int, outs: Sequence[Tensor]) -> list[Payload]:
    """Return the payloads of ``messages[which]``. Checksums are left to the kernel.

    Raises:
        PayloadError: The message does not hold one payload for each of ``outs``.
    """
    with naming_message(which):
        payloads = Payload.split(messages[which], verify=False)
        if len(payloads) != len(outs):
            raise PayloadError(f"the message holds {len(payloads)} payloads, expected {len(outs)}")
        for payload, out in zip(payloads, outs, strict=True):
            check_numel(payload.header, out.numel())
        return payloads


@contextmanager
def naming_message(which: int) -> Iterator[None]:
    """Note in a :class:`PayloadError` of the block that it is about message ``which``."""
    try:
        yield
    except PayloadError as error:
        error.message = which
        raise


def scales_first(messages: int, scale: float) -> bool:
    """Return whether :meth:`.backend.Backend.sum_messages` may multiply before it adds: no bit of a normal
    number changes then.
    """
    return messages == 1 or math.frexp(scale)[0] == 0.5
