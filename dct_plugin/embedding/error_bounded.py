"""Error-bounded codes: ``q = round(x / (2 * bound))`` per segment, then an entropy stage.

Source: dual-level adaptive lossy compression (Feng et al., SC 2024, arXiv:2407.04272). A message holds the
segments of several embedding tables, each with its own bound; ``|x - decoded| <= bound`` holds for every
entry, in fp32, whatever the segment's scale.

A segment's code is chosen by size. Measured on one rank's message of trained Criteo embeddings (batch 256 on
2 ranks, distinct rows of 26 tables, bound 0.01; ``benchmarks/embedding_codecs.py``): order-0 entropy 6.0 kB,
Rice 7.0 kB, zstandard 6.9 (level 19) to 7.5 kB, zlib 7.9 kB, lz4 11.3 kB. zstandard at level 1 is the
fastest, 0.05 ms against about 1 ms, but a dependency, and a quarter larger at a bound of 0.03. Where whole
vectors repeat (rows that were not de-duplicated) deflate wins, which is why it is one of the choices.

Layout (little endian): a 20-byte header (magic, version, flags, entries, segments, body bytes, CRC-32), per
segment one byte of method and two of step width (bf16), then one stream per method in use, in ascending order
of method, all but ``ZERO`` with a u32 length in front. Segments of one method share a stream. Their lengths
are not in the payload: both sides know which rows were asked for.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..codecs.index import MAX_NUMEL, IndexEncoding
from ..codecs.payload import OVERFLOW_MAGNITUDE
from ..errors import PayloadError
from ..kernels.backend import Backend

__all__ = ["ENTROPY", "Codes", "decode_bounded", "encode_bounded", "quantise", "step_width"]

ENTROPY = ("auto", "rice", "deflate")

MAGIC = 0xDC7B
FORMAT_VERSION = 1
_HEADER = struct.Struct("<HBBIHHII")
_FLAG_NONFINITE = 1

# Methods; 0..MAX_RICE are Rice codes of that parameter.
MAX_RICE = 12
SPARSE = 13
DEFLATE = 14
RAW = 15
ZERO = 16
#: Codes are below this, so that code times step width (8 significant bits) is exact in fp32.
_MAX_CODE = 1 << 15
_SPARSE_HEAD = struct.Struct("<BBIIB")
#: Step widths are this much below twice the bound, for the rounding of the quotient.
_SLACK = 1.0 - 2.0**-12
_SMALLEST_STEP = 2.0**-100

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


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
    """The payload of quantised segments, uint8 on the CPU.

    Args:
        codes: From :func:`quantise`.
        lengths: Entries of each segment.
        entropy: ``rice``, ``deflate``, or the smaller one for each segment (``auto``).
        repeats: Whole vectors may occur more than once, so that ``auto`` tries deflate, too.
    """
    q = codes.q.cpu().numpy()
    sizes = np.asarray(lengths, dtype=np.int64)
    half = codes.half_steps.cpu().numpy()
    if not bool(torch.isfinite(codes.decoded).all()) or _overflows(codes.decoded):
        return _finish(q.size, len(sizes), b"", nonfinite=True)
    method = _choose(q, sizes, half, entropy, repeats)
    bf16 = (half.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    parts = [method.astype(np.uint8).tobytes(), bf16.tobytes()]
    per_entry = method.astype(np.uint8).repeat(sizes)
    for value in np.unique(method[sizes > 0]):
        if value == ZERO:
            continue
        where = per_entry == value
        if value == RAW:
            stream = codes.decoded.cpu().numpy()[where].astype("<f4").tobytes()
        elif value == DEFLATE:
            stream = _deflate(q[where])
        elif value == SPARSE:
            stream = _encode_sparse(q[where], kernels)
        else:
            stream = _encode_rice(_zigzag(q[where]), kernels)
        parts += [struct.pack("<I", len(stream)), stream]
    return _finish(q.size, len(sizes), b"".join(parts), nonfinite=False)


def decode_bounded(payload: Tensor, lengths: Sequence[int], kernels: Backend) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`encode_bounded`.

    Returns:
        decoded fp32 [numel] (all NaN if the sender met a non-finite entry), and q int64 [numel] with 1 for
        non-zero entries of segments that were sent raw. Both on the CPU.

    Raises:
        PayloadError: truncated, corrupted, or not of these segments.
    """
    data = payload.cpu().numpy().tobytes()
    sizes = np.asarray(lengths, dtype=np.int64)
    numel = int(sizes.sum())
    nonfinite, body = _open(data, numel, len(sizes))
    if nonfinite:
        return torch.full((numel,), math.nan), torch.ones(numel, dtype=torch.int64)
    count = len(sizes)
    if len(body) < 3 * count:
        raise PayloadError(f"error-bounded payload is truncated: {len(body)} bytes for {count} segments")
    method = np.frombuffer(body, np.uint8, count)
    half = (np.frombuffer(body, "<u2", count, count).astype(np.uint32) << 16).view(np.float32)
    if count and (int(method.max()) > ZERO or not np.isfinite(half).all() or float(half.min()) < 0):
        raise PayloadError("error-bounded payload has an unknown method or a step width that is not one")
    q = np.zeros(numel, dtype=np.int64)
    raw = np.zeros(numel, dtype=np.float32)
    per_entry = method.repeat(sizes)
    at = 3 * count
    for value in np.unique(method[sizes > 0]):
        if value == ZERO:
            continue
        if len(body) < at + 4:
            raise PayloadError("error-bounded payload is truncated: a stream's length is missing")
        (size,) = struct.unpack_from("<I", body, at)
        stream = body[at + 4 : at + 4 + size]
        at += 4 + size
        if len(stream) != size:
            raise PayloadError(
                f"error-bounded payload is truncated: a stream has {len(stream)} of {size} bytes"
            )
        where = per_entry == value
        expected = int(where.sum())
        if value == RAW:
            if size != 4 * expected:
                raise PayloadError(f"raw stream has {size} bytes for {expected} entries")
            raw[where] = np.frombuffer(stream, "<f4")
        elif value == DEFLATE:
            q[where] = _inflate(stream, expected)
        elif value == SPARSE:
            q[where] = _decode_sparse(stream, expected, kernels)
        else:
            q[where] = _unzigzag(_decode_rice(stream, expected, kernels))
    if at != len(body):
        raise PayloadError(f"error-bounded payload has {len(body) - at} bytes too many")
    if numel and max(int(q.max()), -int(q.min())) >= _MAX_CODE:
        raise PayloadError("error-bounded payload holds a code out of range")
    decoded = (q * (2.0 * half.astype(np.float64)).repeat(sizes)).astype(np.float32)
    is_raw = per_entry == RAW
    decoded[is_raw] = raw[is_raw]
    if not np.isfinite(decoded).all():
        raise PayloadError("error-bounded payload holds a value that is not finite")
    q[is_raw] = raw[is_raw] != 0
    return torch.from_numpy(decoded), torch.from_numpy(q)


def _overflows(x: Tensor) -> bool:
    return bool(x.numel()) and float(x.abs().max()) >= OVERFLOW_MAGNITUDE


def _finish(numel: int, segments: int, body: bytes, *, nonfinite: bool) -> Tensor:
    fields = (MAGIC, FORMAT_VERSION, _FLAG_NONFINITE if nonfinite else 0, numel, segments, 0, len(body))
    check = zlib.crc32(body, zlib.crc32(_HEADER.pack(*fields, 0)))
    return torch.frombuffer(bytearray(_HEADER.pack(*fields, check) + body), dtype=torch.uint8)


def _open(data: bytes, numel: int, segments: int) -> tuple[bool, bytes]:
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
    return bool(flags), body


# -- choice ---


def _choose(q: IntArray, sizes: IntArray, half: FloatArray, entropy: str, repeats: bool) -> IntArray:
    """Method of each segment, by (for SPARSE estimated) size."""
    method = np.full(len(sizes), ZERO, dtype=np.int64)
    filled = np.flatnonzero(sizes)
    if not len(filled):
        return method
    starts = (np.cumsum(sizes) - sizes)[filled]
    n = sizes[filled].astype(np.float64)

    def sums(values: IntArray) -> FloatArray:
        return np.add.reduceat(values, starts).astype(np.float64)

    zigzag = _zigzag(q)
    best, least = _best_rice(zigzag, n, MAX_RICE + 1, sums)
    nonzero = zigzag > 0
    nnz = sums(nonzero.astype(np.int64))
    density = np.clip(nnz / n, 1e-9, 1 - 1e-9)
    positions = -n * (density * np.log2(density) + (1 - density) * np.log2(1 - density)) * 1.03 + 8
    # Sign, and a Rice code of magnitude - 1 that shares its parameter with other segments: estimated.
    values = nnz + _best_rice(np.abs(q) - nonzero, nnz, MAX_RICE, sums)[1]
    sparse = positions + values
    chosen = np.where(sparse < least, SPARSE, best)
    # Rice streams run over the positions of an index section, which end at 32 bits.
    if entropy == "deflate" or int(zigzag.sum()) + q.size >= MAX_NUMEL:
        chosen[:] = DEFLATE
    elif entropy == "auto" and repeats:
        small = np.minimum(sparse, least)
        for i, segment in enumerate(filled):
            part = q[starts[i] : starts[i] + sizes[segment]]
            if 8 * len(_deflate(part)) < small[i]:
                chosen[i] = DEFLATE
    chosen = np.where(nnz == 0, ZERO, chosen)
    method[filled] = np.where(half[filled] == 0, RAW, chosen)
    return method


def _best_rice(
    values: IntArray, coded: FloatArray, parameters: int, sums: Callable[[IntArray], FloatArray]
) -> tuple[IntArray, FloatArray]:
    """Parameter (the smallest one of equals) and bits of each segment's Rice code, ``coded`` values each."""
    best = np.zeros(len(coded), dtype=np.int64)
    least = sums(values) + coded
    for k in range(1, parameters):
        bits = sums(values >> k) + coded * (k + 1)
        better = bits < least
        # Bits are convex in the parameter: halving saves less each time, and always costs one per value.
        if not better.any():
            break
        best[better] = k
        least = np.minimum(bits, least)
    return best, least


def _zigzag(q: IntArray) -> IntArray:
    """0, 1, -1, 2, -2, ... to 0, 1, 2, 3, 4, ..."""
    return 2 * np.abs(q) - (q > 0)


def _unzigzag(z: IntArray) -> IntArray:
    half = (z + 1) >> 1
    return np.where(z & 1, half, -half)


# -- streams ---


def _encode_rice(values: IntArray, kernels: Backend) -> bytes:
    """Non-negative integers as the gaps of ascending positions, which the index encoder writes."""
    ascending = np.cumsum(values + 1) - 1
    numel = int(ascending[-1]) + 1
    # The kernels find the parameter for the stream as a whole, which is that of its segments.
    _, param, data = kernels.encode_indices(torch.from_numpy(ascending), numel, IndexEncoding.RICE)
    return bytes([param]) + data.cpu().numpy().tobytes()


def _decode_rice(stream: bytes, count: int, kernels: Backend) -> IntArray:
    if not stream:
        raise PayloadError("rice stream is empty")
    ascending = kernels.decode_indices(IndexEncoding.RICE, stream[0], _tensor(stream[1:]), count, MAX_NUMEL)
    return np.diff(ascending.numpy(), prepend=-1) - 1


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _encode_sparse(q: IntArray, kernels: Backend) -> bytes:
    at = np.flatnonzero(q)
    encoding, param, index = kernels.encode_indices(torch.from_numpy(at), q.size)
    values = q[at]
    signed = np.where(values > 0, 2 * values - 2, -2 * values - 1)
    body = _encode_rice(signed, kernels) if len(at) else b""
    head = _SPARSE_HEAD.pack(encoding, param, len(at), index.numel(), 0)
    return head + index.cpu().numpy().tobytes() + body


def _decode_sparse(stream: bytes, count: int, kernels: Backend) -> IntArray:
    if len(stream) < _SPARSE_HEAD.size:
        raise PayloadError("sparse stream is truncated")
    encoding, param, nnz, size, reserved = _SPARSE_HEAD.unpack_from(stream)
    index = stream[_SPARSE_HEAD.size : _SPARSE_HEAD.size + size]
    if len(index) != size or reserved or encoding >= IndexEncoding.SHARED_MASK or nnz > count:
        raise PayloadError("sparse stream is truncated or has an unknown encoding")
    at = kernels.decode_indices(encoding, param, _tensor(index), nnz, count).numpy()
    out = np.zeros(count, dtype=np.int64)
    if nnz:
        signed = _decode_rice(stream[_SPARSE_HEAD.size + size :], nnz, kernels)
        out[at] = np.where(signed & 1, -((signed + 1) >> 1), (signed >> 1) + 1)
    elif len(stream) != _SPARSE_HEAD.size + size:
        raise PayloadError("sparse stream has bytes too many")
    return out


def _deflate(q: IntArray) -> bytes:
    wide = bool(q.size) and int(np.abs(q).max()) > 127
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = q.astype("<i2" if wide else np.int8).tobytes()
    return bytes([wide]) + packer.compress(raw) + packer.flush()


def _inflate(stream: bytes, count: int) -> IntArray:
    if not stream or stream[0] > 1:
        raise PayloadError("deflate stream has an unknown width")
    width = 1 + stream[0]
    unpacker = zlib.decompressobj(-15)
    try:
        # One byte more than expected tells a stream that is too long, without unpacking all of it.
        raw = unpacker.decompress(stream[1:], count * width + 1)
    except zlib.error as error:
        raise PayloadError(f"deflate stream is damaged: {error}") from error
    if len(raw) != count * width or not unpacker.eof or unpacker.unused_data:
        raise PayloadError(f"deflate stream holds {len(raw)} bytes, expected {count * width}")
    return np.frombuffer(raw, "<i2" if width == 2 else np.int8).astype(np.int64)
