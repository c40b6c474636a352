"""Argument checks that the backends share, and the opening of payloads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..codecs.changes import record_bound
from ..codecs.index import NO_POSITIONS, IndexEncoding
from ..codecs.payload import Header, Payload, check_numel, parse_payload, payload_bound, verify_checksum
from ..codecs.values import ValueDtype
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


def open_positions(payload: Payload | Tensor, numel: int, *, verify: bool = True) -> Payload:
    """Do what :func:`open_payload` does, for a payload that has to hold its own positions."""
    opened = open_payload(payload, numel, verify=verify)
    if opened.header.encoding is IndexEncoding.SHARED_MASK:
        raise PayloadError(NO_POSITIONS)
    return opened


def open_pair(
    payload: Payload | Tensor, positions: Payload | Tensor | None, numel: int, *, verify: bool = True
) -> tuple[Payload, Payload]:
    """Return a payload, and the one that holds its positions: ``positions``, or (None) itself.

    Raises:
        PayloadError: One of them is not valid, or they do not fit each other.
    """
    if positions is None:
        opened = open_positions(payload, numel, verify=verify)
        return opened, opened
    opened = open_payload(payload, numel, verify=verify)
    if opened.nonfinite:
        return opened, opened
    mask = open_positions(positions, numel, verify=verify)
    _check_shared(opened, mask)
    return opened, mask


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


def check_encode_shared(
    source: Tensor, index_payload: Payload | Tensor, value_dtype: int, out: Tensor, *, verify: bool = True
) -> tuple[Payload, Header]:
    """Check the arguments of :meth:`.backend.Backend.encode_shared`.

    Returns:
        The payload of the mask, and the header to write if no value that is sent overflows.
    """
    check_vector("source", source, GRAD_DTYPES)
    vt = ValueDtype.parse(value_dtype)
    mask = open_positions(index_payload, source.numel(), verify=verify)
    check_out(out, payload_bound(mask.numel, mask.nnz, vt, IndexEncoding.SHARED_MASK))
    if mask.nonfinite:
        return mask, Header.flagged(vt, mask.numel)
    return mask, Header(IndexEncoding.SHARED_MASK, vt, False, 0, mask.numel, mask.nnz, 0)


def _check_shared(payload: Payload, mask: Payload) -> None:
    """Raise :class:`PayloadError` unless a shared-mask payload fits the payload its mask comes from."""
    if payload.header.encoding is not IndexEncoding.SHARED_MASK:
        raise PayloadError(f"payload has encoding {payload.encoding}, expected shared_mask")
    if mask.nonfinite:
        raise PayloadError("the payload given for the mask is flagged non-finite and holds no positions")
    if mask.nnz != payload.nnz:
        raise PayloadError(f"payload has {payload.nnz} values, the mask {mask.nnz} positions")
