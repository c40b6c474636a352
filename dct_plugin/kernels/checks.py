"""Argument checks that the backends share, and the opening of payloads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..codecs.changes import record_bound
from ..codecs.payload import Payload, check_numel, parse_payload, verify_checksum
from ..errors import PayloadError
from .job import GRAD_DTYPES, check_out, check_pair, check_vector

#: Entries of a residual in int8 that share an exponent, see :meth:`.backend.Backend.pack`.
PACK_BLOCK = 64
#: The smallest and the largest of these exponents.
PACK_EXPONENTS = (-112, 121)


def check_sample(grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int) -> None:
    check_pair(grad, residual)
    if not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction is {keep_fraction}; it must be in (0, 1]")
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; it must be at least 1")


def check_exact(grad: Tensor, residual: Tensor | None, k: int) -> None:
    check_pair(grad, residual)
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")


def check_difference(wanted: Tensor, held: Tensor, out: Tensor) -> None:
    for name, tensor in (("wanted", wanted), ("held", held)):
        check_vector(name, tensor, (*GRAD_DTYPES, torch.float64), out.numel())
    check_vector("out", out, (torch.float32,))


def check_changes(wanted: Tensor, held: Tensor, out: Tensor) -> None:
    check_vector("wanted", wanted, (torch.bfloat16, torch.float16))
    check_vector("held", held, (wanted.dtype,), wanted.numel())
    check_out(out, record_bound(wanted.numel()))


def check_pack(values: Tensor, packed: Tensor, exponents: Tensor | None) -> None:
    numel = values.numel()
    check_vector("values", values, (torch.float32,))
    check_vector("packed", packed, (torch.bfloat16, torch.int8), numel)
    if (exponents is None) != (packed.dtype == torch.bfloat16):
        raise ValueError(f"{packed.dtype} {'needs' if exponents is None else 'has no'} exponents")
    if exponents is not None:
        check_vector("exponents", exponents, (torch.int8,), -(-numel // PACK_BLOCK))


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
