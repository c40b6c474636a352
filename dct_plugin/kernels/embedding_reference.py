"""The embedding kernels in numpy and torch, which define the results of the compiled ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..codecs.payload import OVERFLOW_MAGNITUDE
from .embedding_format import (
    ESCAPE,
    FORMAT_VERSION,
    HEADER,
    HEADER_SIZE,
    MAGIC,
    MAX_CODE,
    MAX_RICE,
    NONFINITE,
    PACKED,
    RAW,
    RICE_COST,
    SPARSE,
    ZERO,
    EmbeddingKernels,
    Encoded,
    FloatArray,
    IntArray,
    Outgoing,
    OutOfRange,
    fault_text,
    payload_bytes,
)

_ESCAPED_BITS = 16
#: Step widths are this much below twice the bound, for the rounding of the quotient.
SLACK = 1.0 - 2.0**-12
SMALLEST_STEP = 2.0**-100

BitTokens = tuple[npt.NDArray[np.uint64], IntArray]  # codes, and bits of each


def half_steps(bounds: FloatArray) -> FloatArray:
    """Return half step widths for bounds: the largest bf16 number safely below each; 0: too small to work
    with.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        target = (bounds * SLACK).astype(np.float32)
    half = (target.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    return np.where(half >= SMALLEST_STEP, half, 0.0)


class ReferenceEmbeddingKernels(EmbeddingKernels):
    """See :class:`~dct_plugin.kernels.embedding_format.EmbeddingKernels`."""

    name = "reference"

    def mean_squares(self, parts: Sequence[Outgoing]) -> list[FloatArray]:
        found = []
        for part in parts:
            sizes = torch.from_numpy(part.lengths)
            mean = torch.segment_reduce(part.x.square(), "mean", lengths=sizes, initial=0.0)
            found.append(mean.to(torch.float64).nan_to_num(0.0).numpy() if len(sizes) else np.empty(0))
        return found

    def encode(self, parts: Sequence[Outgoing], bit_cost: int, *, decoded: bool = False) -> list[Encoded]:
        return [_encode(part, bit_cost, decoded or not part.send) for part in parts]

    def decode(
        self, payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
    ) -> list[str | None]:
        found: list[str | None] = []
        for payload, sizes, out in zip(payloads, lengths, outs, strict=True):
            try:
                _decode(payload.numpy(), sizes, out.numpy())
                found.append(None)
            except _Fault as fault:
                status, value = fault.args
                found.append(fault_text(status, value, out.numel(), len(sizes)))
        return found

    def distinct_rows(
        self, ids: Tensor, order: IntArray, limits: IntArray, base: IntArray
    ) -> tuple[Tensor, IntArray, Tensor]:
        rows, counts = [torch.empty(0, dtype=torch.int64)], np.empty(len(order), dtype=np.int64)
        positions = torch.empty_like(ids)
        total = 0
        for at, column in enumerate(order.tolist()):
            wrong = (ids[:, column] < 0) | (ids[:, column] >= int(limits[column]))
            if bool(wrong.any()):
                raise OutOfRange(column, int(ids[wrong, column][0]))
            distinct, inverse = torch.unique(ids[:, column], return_inverse=True)
            rows.append(distinct + int(base[column]))
            positions[:, column] = inverse + total
            counts[at] = len(distinct)
            total += len(distinct)
        return torch.cat(rows), counts, positions

    def add_rows(self, out: Tensor, rows: Tensor, x: Tensor) -> None:
        np.add.at(out.numpy(), rows.numpy(), x.numpy())


# -- encode ---


def _encode(part: Outgoing, bit_cost: int, decoded: bool) -> Encoded:
    x, lengths = part.x.numpy(), part.lengths
    segments = len(lengths)
    if not bool((np.abs(x) < OVERFLOW_MAGNITUDE).all()):
        message = _finish(NONFINITE, len(x), segments, b"", part.kind) if part.send else None
        return Encoded(message, None, False)
    methods, halves, streams = [], [], []
    out = x.copy()
    raw: list[bytes] = []
    for entries, rounded, bound in zip(
        _segments(x, lengths), _segments(out, lengths), part.bounds, strict=True
    ):
        largest = float(np.abs(entries).max(initial=0.0))
        half = float(half_steps(np.array([bound if largest else 1.0]))[0])
        if not largest < half * (2.0 * (MAX_CODE - 1)):
            methods.append(RAW)
            halves.append(0.0)
            raw.append(entries.tobytes())
            continue
        number = np.rint(entries.astype(np.float64) / (2.0 * half)).astype(np.int64)
        rounded[:] = number * (2.0 * half)
        method, tokens = _choose(_zigzag(number), bit_cost)
        methods.append(method)
        halves.append(half)
        streams += tokens
    message = None
    if part.send:
        steps = np.array(halves, dtype=np.float32).view(np.uint32) >> 16
        sections = [bytes(methods), steps.astype("<u2").tobytes(), *raw, _pack(streams)]
        message = _finish(0, len(x), segments, b"".join(sections), part.kind)
    return Encoded(message, torch.from_numpy(out) if decoded else None, True)


def _finish(flags: int, numel: int, segments: int, body: bytes, kind: int) -> Tensor:
    return torch.frombuffer(
        bytearray(payload_bytes(flags, numel, segments, body) + bytes([kind])), dtype=torch.uint8
    )


def _segments(array: npt.NDArray[Any], lengths: IntArray) -> list[npt.NDArray[Any]]:
    return np.split(array, np.cumsum(lengths))[: len(lengths)]


def _zigzag(q: IntArray) -> IntArray:
    """Map 0, 1, -1, 2, -2, ... to 0, 1, 2, 3, 4, ..."""
    return 2 * np.abs(q) - (q > 0)


def _best_rice(v: IntArray) -> tuple[int, int]:
    """Return the best parameter (the smallest of equals) and the bits, as if no quotient was escaped."""
    bits = [int((v >> k).sum()) + len(v) * (k + 1) for k in range(MAX_RICE + 1)]
    return bits.index(min(bits)), min(bits)


def _choose(z: IntArray, bit_cost: int) -> tuple[int, list[BitTokens]]:
    """Return the cheapest method for a segment's codes, and its bits."""
    n, at = len(z), np.flatnonzero(z)
    nnz = len(at)
    if not nnz:
        return ZERO, []
    width = int(z.max()).bit_length()
    method, least = PACKED + width, n * width * bit_cost
    packed = [(z.astype(np.uint64), np.full(n, width))]
    if not bit_cost:
        return method, packed
    k, bits = _best_rice(z)
    if bits * bit_cost + n * RICE_COST < least:
        method, least = k, bits * bit_cost + n * RICE_COST
    if 4 * nnz < n:
        gaps, v = np.diff(at, prepend=-1) - 1, z[at] - 1
        gap_param = min(max(((n - nnz) // nnz).bit_length() - 1, 0), MAX_RICE)
        value_param, bits = _best_rice(v)
        bits += n.bit_length() + 8 + nnz * (gap_param + 1) + int((gaps >> gap_param).sum())
        if bits * bit_cost + 2 * nnz * RICE_COST < least:
            width = n.bit_length()
            head = np.array([nnz | (gap_param | value_param << 4) << width], dtype=np.uint64)
            pairs = zip(_rice(gaps, gap_param, 32), _rice(v, value_param, _ESCAPED_BITS), strict=True)
            both, widths = (np.stack(pair, axis=1).reshape(-1) for pair in pairs)
            return SPARSE, [(head, np.array([width + 8])), (both, widths)]
    return method, packed if method > PACKED else [_rice(z, k, _ESCAPED_BITS)]


def _rice(v: IntArray, k: int, escaped_bits: int) -> BitTokens:
    quotient = v >> k
    escaped = quotient >= ESCAPE
    low = (1 | (v & ((1 << k) - 1)) << 1) << np.where(escaped, 0, quotient)
    code = np.where(escaped, v << ESCAPE, low).astype(np.uint64)
    return code, np.where(escaped, ESCAPE + escaped_bits, quotient + 1 + k)


def _pack(tokens: Sequence[BitTokens]) -> bytes:
    if not tokens:
        return b""
    codes, widths = np.concatenate([c for c, _ in tokens]), np.concatenate([w for _, w in tokens])
    which = np.repeat(np.arange(len(codes)), widths)
    offset = np.arange(len(which)) - (np.cumsum(widths) - widths)[which]
    bits = (codes[which] >> offset.astype(np.uint64)).astype(np.uint8) & 1
    return np.packbits(bits, bitorder="little").tobytes()


# -- decode ---


class _Fault(Exception):
    """A fault of a payload: its number, and what was found."""


def _decode(data: npt.NDArray[np.uint8], lengths: IntArray, out: npt.NDArray[np.float32]) -> None:
    """Fill ``out``."""
    payload = data.tobytes()
    if len(payload) < HEADER_SIZE:
        raise _Fault(1, len(payload))
    magic, version, flags, numel, segments, reserved, size, check = HEADER.unpack_from(payload)
    body = payload[HEADER_SIZE:]
    if magic != MAGIC:
        raise _Fault(2, magic)
    if version != FORMAT_VERSION:
        raise _Fault(3, version)
    if flags > NONFINITE or reserved:
        raise _Fault(4, flags)
    if numel != len(out) or segments != len(lengths):
        raise _Fault(5, numel if numel != len(out) else segments)
    if size != len(body) or (flags == NONFINITE and size):
        raise _Fault(6, len(payload))
    if check != zlib.crc32(body, zlib.crc32(payload[:16])):
        raise _Fault(7, 0)
    if flags == NONFINITE:
        out[:] = np.nan
        return
    if size < 3 * segments:
        raise _Fault(10, 0)
    methods = list(body[:segments])
    words = np.frombuffer(body, dtype="<u2", count=segments, offset=segments).astype(np.uint32)
    for method, word, n in zip(methods, words.tolist(), lengths.tolist(), strict=True):
        if method > PACKED + 16 or method == PACKED:
            raise _Fault(8, method)
        if word >= 0x7F80 or (n and (method == RAW) != (word == 0)):
            raise _Fault(9, 0)
    raw = sum(n for method, n in zip(methods, lengths.tolist(), strict=True) if method == RAW)
    at = 3 * segments
    if 4 * raw > len(body) - at:
        raise _Fault(10, 0)
    values = np.frombuffer(body, dtype="<f4", count=raw, offset=at)
    reader = _Reader(body[at + 4 * raw :])
    halves = (words << 16).view(np.float32)
    with np.errstate(over="ignore"):
        for part, method, half in zip(_segments(out, lengths), methods, halves, strict=True):
            if method == RAW:
                part[:], values = values[: len(part)], values[len(part) :]
                continue
            z = reader.segment(method, len(part))
            part[:] = np.where(z & 1, (z + 1) >> 1, -(z >> 1)) * (np.float32(2) * half)
    if not bool(np.isfinite(out).all()):
        raise _Fault(12, 0)
    reader.end()


class _Reader:
    """Bits from the least significant one up; zeros past the end until :meth:`segment` notices."""

    def __init__(self, data: bytes) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
        self._digits = (self._bits + ord("0")).tobytes()
        self._bit = 0

    def take(self, bits: int) -> int:
        digits = self._digits[self._bit : self._bit + bits]
        self._bit += bits
        return int(digits[::-1] or b"0", 2)

    def rice(self, k: int, escaped_bits: int) -> int:
        one = self._digits.find(b"1", self._bit, self._bit + ESCAPE)
        if one < 0:
            self._bit += ESCAPE
            return self.take(escaped_bits)
        zeros, self._bit = one - self._bit, one + 1
        return zeros << k | self.take(k)

    def segment(self, method: int, n: int) -> IntArray:
        """Return z of ``n`` entries, int64."""
        total = len(self._bits)
        z = np.zeros(n, dtype=np.int64)
        if method <= MAX_RICE:
            if n > total:
                raise _Fault(10, 0)
            z[:] = [self.rice(method, _ESCAPED_BITS) for _ in range(n)]
        elif method == SPARSE:
            nnz, gap_param, value_param = self.take(n.bit_length()), self.take(4), self.take(4)
            if gap_param > MAX_RICE or value_param > MAX_RICE:
                raise _Fault(11, 0)
            if nnz > n or nnz > total:
                raise _Fault(10, 0)
            at = 0
            for _ in range(nnz):
                at += self.rice(gap_param, 32)
                code = self.rice(value_param, _ESCAPED_BITS) + 1
                if at >= n:
                    raise _Fault(11, 0)
                if self._bit > total:
                    raise _Fault(10, 0)
                z[at] = code
                at += 1
        elif method > PACKED and n:
            width = method - PACKED
            if self._bit + n * width > total:
                raise _Fault(10, 0)
            bits = self._bits[self._bit : self._bit + n * width].reshape(n, width)
            z[:] = bits.astype(np.int64) @ (1 << np.arange(width))
            self._bit += n * width
        if self._bit > total:
            raise _Fault(10, 0)
        if z.max(initial=0) > 2 * (MAX_CODE - 1):
            raise _Fault(11, 0)
        return z

    def end(self) -> None:
        """Raise unless nothing is left but zeros in the last byte."""
        if len(self._bits) - self._bit >= 8 or self._bits[self._bit :].any():
            raise _Fault(13, 0)
