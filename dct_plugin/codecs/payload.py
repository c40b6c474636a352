"""Payload: one compressed tensor as one contiguous uint8 tensor, wire format version 2 (little endian).

====== ==== ===============================================================================================
offset type field
====== ==== ===============================================================================================
0      u16  magic 0xDC7A
2      u8   version, 2
3      u8   value dtype (:class:`~dct_plugin.codecs.values.ValueDtype`)
4      u8   flags; bit 0: the tensor held a non-finite entry, or one of magnitude >= 2**126
            (then nnz is 0 and there is no body)
5      u8   3 bytes, 0
8      u32  numel
12     u32  nnz
16     u32  check1: sum of w_i modulo 2**32
20     u32  check2: sum of (i + 1) * w_i modulo 2**32
24          index section (:mod:`.index`), then value section: their sizes follow from numel, nnz, value dtype
====== ==== ===============================================================================================

``w_i`` are the 32-bit words of bytes 0..15, then those of the body padded with zeros to a multiple of 4.
A message is a concatenation of payloads: each one says how long it is.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import PayloadError
from .index import index_bound, index_form
from .values import ValueDtype, value_nbytes

MAGIC = 0xDC7A
FORMAT_VERSION = 2
HEADER_NBYTES = 24
FLAG_NONFINITE = 1
# Entries of this magnitude count as overflow: sums of a few of them, and the residual arithmetic, stay finite
# below it.
OVERFLOW_MAGNITUDE = 2.0**126

_CHECKED = struct.Struct("<HBBB3xII")
_CHECKS = struct.Struct("<II")
_WORDS_AT_ONCE = 1 << 20

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("dct_plugin's wire format is little endian and is read through views; this host is not")


class Header(NamedTuple):
    """The fields of a payload's header. ``parse`` has checked them against each other."""

    value_dtype: ValueDtype
    nonfinite: bool
    numel: int
    nnz: int
    check1: int = 0
    check2: int = 0

    @property
    def index_nbytes(self) -> int:
        return index_form(self.nnz, self.numel).nbytes

    @property
    def value_nbytes(self) -> int:
        return value_nbytes(self.nnz, self.value_dtype)

    @property
    def nbytes(self) -> int:
        """Size of the whole payload, bytes."""
        return HEADER_NBYTES + self.index_nbytes + self.value_nbytes

    def pack(self) -> bytes:
        """Return the 24 bytes, with the checksums that this header has."""
        return self._pack_checked() + _CHECKS.pack(self.check1, self.check2)

    def with_checks(self, body: Tensor) -> Header:
        """Return this header with the checksums of itself and ``body`` (uint8)."""
        check1, check2 = checksum(self._pack_checked(), body)
        return self._replace(check1=check1, check2=check2)

    def _pack_checked(self) -> bytes:
        flags = FLAG_NONFINITE if self.nonfinite else 0
        return _CHECKED.pack(MAGIC, FORMAT_VERSION, self.value_dtype, flags, self.numel, self.nnz)

    @classmethod
    def parse(cls, data: bytes, available: int | None = None) -> Header:
        """Read and check the header of a payload.

        Args:
            data: at least the first 24 bytes.
            available: bytes from the payload's start to the end of the buffer; nothing the header announces
                may pass it.
        Raises:
            PayloadError: with the field and the value that is wrong.
        """
        if len(data) < HEADER_NBYTES:
            raise PayloadError(f"payload is truncated: {len(data)} bytes, a header has {HEADER_NBYTES}")
        magic, version, dtype, flags, numel, nnz = _CHECKED.unpack_from(data)
        check1, check2 = _CHECKS.unpack_from(data, _CHECKED.size)
        if magic != MAGIC:
            raise PayloadError(f"not a payload: magic is 0x{magic:04X}, expected 0x{MAGIC:04X}")
        if version != FORMAT_VERSION:
            raise PayloadError(f"payload has format version {version}, expected {FORMAT_VERSION}")
        try:
            value_dtype = ValueDtype.parse(dtype)
        except ValueError as error:
            raise PayloadError(str(error)) from None
        if flags & ~FLAG_NONFINITE or any(data[5:8]):
            raise PayloadError(f"flags 0x{flags:02X}, reserved bytes {data[5:8].hex()}: unknown")
        header = cls(value_dtype, bool(flags), numel, nnz, check1, check2)
        if nnz > (0 if header.nonfinite else numel):
            raise PayloadError(f"nnz {nnz} of numel {numel} is impossible, flags 0x{flags:02X}")
        if available is not None and header.nbytes > available:
            raise PayloadError(f"payload is truncated: {header.nbytes} bytes announced, {available} there")
        return header


def checksum(checked: bytes, body: Tensor) -> tuple[int, int]:
    """Return both checksums of the header's first 16 bytes followed by ``body``, uint8 [any]."""
    words = struct.unpack("<4I", checked)
    check1, check2 = sum(words), sum((i + 1) * w for i, w in enumerate(words))
    # Sums wrap modulo 2**64, which keeps them right modulo 2**32.
    for lo in range(0, body.numel(), 4 * _WORDS_AT_ONCE):
        part = body[lo : lo + 4 * _WORDS_AT_ONCE]
        padded = functional.pad(part, (0, -part.numel() % 4))
        w = padded.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        first = 5 + lo // 4
        place = torch.arange(first, first + w.numel(), dtype=torch.int64, device=body.device)
        check1 += int(w.sum())
        check2 += int((w * place).sum())
    return check1 & 0xFFFFFFFF, check2 & 0xFFFFFFFF


@functools.lru_cache(maxsize=8192)  # asked for every tensor in every step
def payload_bound(numel: int, capacity: int | None, value_dtype: int, *, dense: bool = False) -> int:
    """Return the largest size in bytes of a payload of ``numel`` entries that keeps at most ``capacity``
    (None: any number), or all of them (``dense``).
    """
    if dense:
        return dense_payload_nbytes(numel, value_dtype)
    nnz = numel if capacity is None else max(0, min(capacity, numel))
    return HEADER_NBYTES + index_bound(nnz, numel) + value_nbytes(nnz, value_dtype)


def dense_payload_nbytes(numel: int, value_dtype: int) -> int:
    """Return the bytes of a payload that keeps all of ``numel`` entries."""
    return HEADER_NBYTES + value_nbytes(numel, value_dtype)


def write_payload(out: Tensor, header: Header, *sections: Tensor) -> int:
    """Write a payload (sections: uint8) to the start of ``out``, with checksums; returns its bytes."""
    at = HEADER_NBYTES
    for section in sections:
        out[at : at + section.numel()] = section
        at += section.numel()
    packed = bytearray(header.with_checks(out[HEADER_NBYTES:at]).pack())
    out[:HEADER_NBYTES] = torch.frombuffer(packed, dtype=torch.uint8).to(out.device)
    return at


def header_bytes(data: Tensor) -> bytes:
    """Return the first (at most) 24 bytes of a uint8 tensor on any device."""
    return data[:HEADER_NBYTES].cpu().numpy().tobytes()


def check_numel(header: Header, numel: int) -> None:
    """Raise :class:`PayloadError` unless the payload is of a tensor of ``numel`` entries."""
    if header.numel != numel:
        raise PayloadError(f"payload is of a tensor of {header.numel} entries, expected {numel}")


def verify_checksum(header: Header, data: Tensor) -> None:
    """Raise :class:`PayloadError` unless the body in ``data`` has the header's checksums."""
    found = checksum(header._pack_checked(), data[HEADER_NBYTES : header.nbytes])
    if found != (header.check1, header.check2):
        raise PayloadError("payload checksum is wrong: corrupted in transit or in memory")


@dataclass(frozen=True)
class Payload:
    """One compressed tensor.

    Attributes:
        data: uint8 [nbytes], the wire format.
        header: its parsed header.
    """

    data: Tensor
    header: Header

    @classmethod
    def from_tensor(cls, data: Tensor, *, verify: bool = True, head: bytes | None = None) -> Payload:
        """Wrap a received tensor, uint8 1-D contiguous, that is exactly one payload.

        Args:
            verify: False leaves the checksum to a later decode.
            head: The first (at most) 24 bytes, where the caller has read them.

        Raises:
            PayloadError: the reason.
        """
        if data.dtype is not torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            found = f"{data.dtype} of shape {tuple(data.shape)}"
            raise PayloadError(f"a payload is a contiguous 1-D uint8 tensor, got {found}")
        header = Header.parse(header_bytes(data) if head is None else head, data.numel())
        if header.nbytes != data.numel():
            raise PayloadError(f"payload announces {header.nbytes} bytes, the buffer has {data.numel()}")
        if verify:
            verify_checksum(header, data)
        return cls(data, header)

    @classmethod
    def split(cls, message: Tensor, *, verify: bool = True) -> list[Payload]:
        """Return the payloads of a message, uint8, which is a concatenation of them (views, no copies).

        A message on a device is copied to the host once, to find the headers.

        Raises:
            PayloadError: the reason; ``verify=False`` leaves the checksums to a later decode.
        """
        if message.dtype is not torch.uint8 or message.dim() != 1 or not message.is_contiguous():
            raise PayloadError(f"a message is a contiguous 1-D uint8 tensor, got {message.dtype}")
        payloads = []
        at, host = 0, message.cpu()
        while at < message.numel():
            header = Header.parse(header_bytes(host[at:]), message.numel() - at)
            payload = cls(message[at : at + header.nbytes], header)
            if verify:
                verify_checksum(header, payload.data)
            payloads.append(payload)
            at += header.nbytes
        return payloads

    @classmethod
    def from_bytes(cls, data: bytes) -> Payload:
        """Do the inverse of :meth:`to_bytes`; check everything that :meth:`from_tensor` checks."""
        return cls.from_tensor(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))

    def to_bytes(self) -> bytes:
        return self.data.cpu().numpy().tobytes()

    def to(self, device: torch.device | str) -> Payload:
        return replace(self, data=self.data.to(device))

    @property
    def numel(self) -> int:
        return self.header.numel

    @property
    def nnz(self) -> int:
        return self.header.nnz

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    @property
    def density(self) -> float:
        return self.nnz / self.numel if self.numel else 0.0

    @property
    def value_dtype(self) -> str:
        return self.header.value_dtype.label

    @property
    def nonfinite(self) -> bool:
        return self.header.nonfinite


def open_payload(payload: Payload | Tensor, numel: int, *, verify: bool = True) -> Payload:
    """Return ``payload`` with its header, checked; ``verify=False`` leaves the checksum to the kernel.

    Raises:
        PayloadError: The payload is not valid, or not of ``numel`` entries.
    """
    if not isinstance(payload, Payload):
        payload = Payload.from_tensor(payload, verify=False)
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
