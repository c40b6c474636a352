"""Error-bounded codes: ``q = round(x / (2 * bound))`` per segment, then an entropy stage.

Source: dual-level adaptive lossy compression (Feng et al., SC 2024, arXiv:2407.04272). A message holds the
segments of several embedding tables, each with its own bound; ``|x - decoded| <= bound`` holds for every
entry, in fp32, whatever the segment's scale.

A segment's code is the smallest one of :mod:`~dct_plugin.embedding.entropy`.

Layout (little endian): a 20-byte header (magic, version, flags, entries, segments, body bytes, CRC-32), per
segment one byte of method and two of step width (bf16), then one stream per method in use, in ascending order
of method, all but ``ZERO`` with a u32 length in front. Segments of one method share a stream. Their lengths
are not in the payload: both sides know which rows were asked for.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.payload import OVERFLOW_MAGNITUDE
from ..errors import PayloadError
from ..kernels import Backend
from .entropy import RAW, ZERO, choose_methods, decode_stream, encode_stream, host_bytes, to_bytes

__all__ = ["Codes", "decode_bounded", "encode_bounded", "quantise", "step_width", "within"]

MAGIC = 0xDC7B
FORMAT_VERSION = 1
_HEADER = struct.Struct("<HBBIHHII")
_FLAG_NONFINITE = 1

#: Codes are below this, so that code times step width (8 significant bits) is exact in fp32.
_MAX_CODE = 1 << 15
#: Step widths are this much below twice the bound, for the rounding of the quotient.
_SLACK = 1.0 - 2.0**-12
_SMALLEST_STEP = 2.0**-100


class Codes(NamedTuple):
    """Quantised segments.

    Attributes:
        q: int64 [numel]; 0 where the segment is sent raw.
        half_steps: float64 [segments], half of the step width; 0: the segment cannot be quantised (its
            values are too large for the bound) and is sent as it is.
        decoded: fp32 [numel], what a receiver gets.
    """

    q: Tensor
    half_steps: Tensor
    decoded: Tensor


def step_width(bounds: Tensor) -> Tensor:
    """Half step widths for ``bounds`` (any float, [segments]): the largest bf16 number safely below each.

    float64 [segments]; 0 where the bound is too small to work with.
    """
    target = (bounds.to(torch.float64) * _SLACK).to(torch.float32)
    half = (target.view(torch.int32) & -65536).view(torch.float32).to(torch.float64)
    return torch.where(half >= _SMALLEST_STEP, half, torch.zeros_like(half))


def quantise(x: Tensor, lengths: Tensor, bounds: Tensor) -> Codes:
    """Round ``x`` to multiples of twice its segment's bound.

    Args:
        x: fp32 [numel], finite.
        lengths: int64 [segments] on the same device, their sum is numel.
        bounds: float [segments], absolute, >= 0.
    """
    half = step_width(bounds)
    if x.numel():
        # A segment with a code out of range is sent raw.
        largest = torch.segment_reduce(x.abs(), "max", lengths=lengths, initial=0.0).to(torch.float64)
        half = torch.where(largest < half * (2.0 * (_MAX_CODE - 1)), half, torch.zeros_like(half))
        half = torch.where(largest == 0, step_width(torch.ones_like(half)), half)
    width = (2.0 * half).repeat_interleave(lengths)
    raw = width == 0
    q = torch.round(x.to(torch.float64) / torch.where(raw, torch.ones_like(width), width))
    q = torch.where(raw, torch.zeros_like(q), q)
    decoded = torch.where(raw, x, (q * width).to(torch.float32))
    return Codes(q.to(torch.int64), half, decoded)


def encode_bounded(
    codes: Codes, lengths: Sequence[int], kernels: Backend, *, entropy: str = "auto", repeats: bool = False
) -> Tensor:
    """The payload of quantised segments, uint8 on their device.

    Args:
        codes: From :func:`quantise`.
        lengths: Entries of each segment.
        kernels: For tensors on the codes' device.
        entropy: ``rice``, ``deflate``, or the smaller one for each segment (``auto``).
        repeats: Whole vectors may occur more than once, so that ``auto`` tries deflate, too.
    """
    q, device = codes.q, codes.q.device
    if not within(codes.decoded, OVERFLOW_MAGNITUDE):
        return _finish(q.numel(), len(lengths), to_bytes(b"", device), nonfinite=True)
    methods = choose_methods(q, codes.half_steps, lengths, entropy, repeats)
    sections = [to_bytes(bytes(methods), device), codes.half_steps.to(torch.bfloat16).view(torch.uint8)]
    parts, values = q.split(list(lengths)), codes.decoded.split(list(lengths))
    for method in _in_use(methods, lengths):
        where = [i for i, other in enumerate(methods) if other == method]
        if method == RAW:
            stream = torch.cat([values[i] for i in where]).contiguous().view(torch.uint8)
        else:
            stream = encode_stream(method, torch.cat([parts[i] for i in where]), kernels)
        sections += [to_bytes(struct.pack("<I", stream.numel()), device), stream]
    return _finish(q.numel(), len(lengths), torch.cat(sections), nonfinite=False)


def decode_bounded(payload: Tensor, lengths: Sequence[int], kernels: Backend) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`encode_bounded`.

    Args:
        payload: uint8.
        lengths: Entries of each segment.
        kernels: For tensors on the payload's device.

    Returns:
        decoded fp32 [numel] (all NaN if the sender met a non-finite entry), and q int64 [numel] with 1 for
        non-zero entries of segments that were sent raw. Both on the payload's device.

    Raises:
        PayloadError: truncated, corrupted, or not of these segments.
    """
    device, numel, count = payload.device, sum(lengths), len(lengths)
    nonfinite, body = _open(payload, numel, count)
    if nonfinite:
        return torch.full((numel,), math.nan, device=device), torch.ones(
            numel, dtype=torch.int64, device=device
        )
    if body.numel() < 3 * count:
        raise PayloadError(f"error-bounded payload is truncated: {body.numel()} bytes for {count} segments")
    methods = body[:count].tolist()
    half = body[count : 3 * count].clone().view(torch.bfloat16).to(torch.float64)
    if count and (max(methods) > ZERO or not bool((torch.isfinite(half) & (half >= 0)).all())):
        raise PayloadError("error-bounded payload has an unknown method or a step width that is not one")
    parts: dict[int, Tensor] = {}
    raw: dict[int, Tensor] = {}
    at = 3 * count
    for method in _in_use(methods, lengths):
        where = [i for i, other in enumerate(methods) if other == method]
        stream, at = _next_stream(body, at)
        sizes = [lengths[i] for i in where]
        expected = sum(sizes)
        if method == RAW:
            if stream.numel() != 4 * expected:
                raise PayloadError(f"raw stream has {stream.numel()} bytes for {expected} entries")
            raw.update(zip(where, stream.clone().view(torch.float32).split(sizes), strict=True))
            continue
        decoded = decode_stream(method, stream, expected, kernels)
        parts.update(zip(where, decoded.split(sizes), strict=True))
    if at != body.numel():
        raise PayloadError(f"error-bounded payload has {body.numel() - at} bytes too many")
    q = torch.zeros(numel, dtype=torch.int64, device=device)
    segments = q.split(list(lengths))
    for i, part in parts.items():
        segments[i].copy_(part)
    if not within(q, _MAX_CODE):
        raise PayloadError("error-bounded payload holds a code out of range")
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    values = (q * (2.0 * half).repeat_interleave(counts, output_size=numel)).to(torch.float32)
    if raw:
        pieces = values.split(list(lengths))
        for i, part in raw.items():
            pieces[i].copy_(part)
            segments[i].copy_(part != 0)
    if not within(values, math.inf):
        raise PayloadError("error-bounded payload holds a value that is not finite")
    return values, q


def within(x: Tensor, limit: float) -> bool:
    """Whether all magnitudes are below ``limit``; NaN is not."""
    if not x.numel():
        return True
    low, high = torch.stack(torch.aminmax(x)).tolist()
    return -limit < low <= high < limit


def _in_use(methods: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Methods that have a stream, ascending."""
    return sorted({method for method, n in zip(methods, lengths, strict=True) if n} - {ZERO})


def _finish(numel: int, segments: int, body: Tensor, *, nonfinite: bool) -> Tensor:
    fields = (MAGIC, FORMAT_VERSION, _FLAG_NONFINITE if nonfinite else 0, numel, segments, 0, body.numel())
    check = zlib.crc32(host_bytes(body), zlib.crc32(_HEADER.pack(*fields, 0)))
    return torch.cat([to_bytes(_HEADER.pack(*fields, check), body.device), body])


def _open(payload: Tensor, numel: int, segments: int) -> tuple[bool, Tensor]:
    """Whether the payload is flagged non-finite, and its body."""
    data = host_bytes(payload)
    if len(data) < _HEADER.size:
        raise PayloadError(f"error-bounded payload is truncated: {len(data)} of {_HEADER.size} header bytes")
    magic, version, flags, entries, count, reserved, size, check = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise PayloadError(f"not an error-bounded payload: magic is 0x{magic:04X}, expected 0x{MAGIC:04X}")
    if version != FORMAT_VERSION:
        raise PayloadError(f"error-bounded payload has format version {version}, expected {FORMAT_VERSION}")
    if flags & ~_FLAG_NONFINITE or reserved:
        raise PayloadError(f"flags 0x{flags:02X}, reserved {reserved}: unknown")
    if (entries, count) != (numel, segments):
        raise PayloadError(
            f"error-bounded payload is of {entries} entries in {count} segments, "
            f"expected {numel} in {segments}"
        )
    body = data[_HEADER.size :]
    if len(body) != size or (flags and size):
        raise PayloadError(f"error-bounded payload announces a body of {size} bytes, {len(body)} are there")
    fields = (magic, version, flags, entries, count, reserved, size, 0)
    if zlib.crc32(body, zlib.crc32(_HEADER.pack(*fields))) != check:
        raise PayloadError("error-bounded payload's checksum is wrong: corrupted in transit or in memory")
    return bool(flags), payload[_HEADER.size :]


def _next_stream(body: Tensor, at: int) -> tuple[Tensor, int]:
    """The stream whose length is at ``at``, and where the next one begins."""
    if body.numel() < at + 4:
        raise PayloadError("error-bounded payload is truncated: a stream's length is missing")
    (size,) = struct.unpack("<I", host_bytes(body[at : at + 4]))
    at += 4
    stream = body[at : at + size]
    if stream.numel() != size:
        raise PayloadError(
            f"error-bounded payload is truncated: a stream has {stream.numel()} of {size} bytes"
        )
    return stream, at + size
