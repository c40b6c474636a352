"""Entropy stages of quantised values: Rice codes, positions and values, deflate, and the choice between them.

A segment's code is chosen by size. Measured on one rank's message of trained Criteo embeddings (batch 256 on
2 ranks, distinct rows of 26 tables, bound 0.01; ``benchmarks/embedding_codecs.py``): order-0 entropy 6.0 kB,
Rice 7.0 kB, zstandard 6.9 (level 19) to 7.5 kB, zlib 7.9 kB, lz4 11.3 kB. zstandard at level 1 is the
fastest, 0.05 ms against about 1 ms, but a dependency, and a quarter larger at a bound of 0.03. Where whole
vectors repeat (rows that were not de-duplicated) deflate wins, which is why it is one of the choices.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..codecs.index import MAX_NUMEL, IndexEncoding
from ..errors import PayloadError
from ..kernels import Backend

__all__ = ["choose_methods", "decode_stream", "encode_stream"]

# Methods; 0..MAX_RICE are Rice codes of that parameter.
MAX_RICE = 12
SPARSE = 13
DEFLATE = 14
RAW = 15
ZERO = 16
_SPARSE_HEAD = struct.Struct("<BBIIB")

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def to_bytes(data: bytes, device: torch.device) -> Tensor:
    """uint8 on ``device``."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def host_bytes(data: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy if it is on the CPU."""
    return data.cpu().numpy().data.cast("B")


# -- choice ---


def choose_methods(
    codes: Tensor, half_steps: Tensor, lengths: Sequence[int], entropy: str, repeats: bool
) -> list[int]:
    """Method of each segment, by (for SPARSE estimated) size.

    On the host, where sums over segments of a few hundred entries are cheapest: one copy of the codes from an
    accelerator, none from the CPU.
    """
    q, half = codes.cpu().numpy(), half_steps.cpu().numpy()
    sizes = np.asarray(lengths, dtype=np.int64)
    method = np.full(len(sizes), ZERO, dtype=np.int64)
    filled = np.flatnonzero(sizes)
    if not len(filled):
        return [ZERO] * len(sizes)
    starts = (np.cumsum(sizes) - sizes)[filled]
    n = sizes[filled].astype(np.float64)

    def sums(values: IntArray) -> FloatArray:
        return np.add.reduceat(values, starts).astype(np.float64)

    zigzag = 2 * np.abs(q) - (q > 0)
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
            if 8 * len(_deflate(torch.from_numpy(part))) < small[i]:
                chosen[i] = DEFLATE
    chosen = np.where(nnz == 0, ZERO, chosen)
    method[filled] = np.where(half[filled] == 0, RAW, chosen)
    return method.tolist()


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


def _zigzag(q: Tensor) -> Tensor:
    """0, 1, -1, 2, -2, ... to 0, 1, 2, 3, 4, ..."""
    return (-q << 1) ^ (-q >> 63)


def _unzigzag(z: Tensor) -> Tensor:
    return -((z >> 1) ^ -(z & 1))


# -- streams ---


def encode_stream(method: int, q: Tensor, kernels: Backend) -> Tensor:
    """The stream of codes, int64, under a method other than RAW and ZERO; uint8 on their device."""
    if method == DEFLATE:
        return to_bytes(_deflate(q), q.device)
    return _encode_sparse(q, kernels) if method == SPARSE else _encode_rice(_zigzag(q), kernels)


def decode_stream(method: int, stream: Tensor, count: int, kernels: Backend) -> Tensor:
    """Inverse of :func:`encode_stream`: ``count`` codes. Raises :class:`PayloadError`."""
    if method == DEFLATE:
        return _inflate(stream, count)
    if method == SPARSE:
        return _decode_sparse(stream, count, kernels)
    return _unzigzag(_decode_rice(stream, count, kernels))


def _encode_rice(values: Tensor, kernels: Backend) -> Tensor:
    """Non-negative integers as the gaps of ascending positions, which the index encoder writes."""
    ascending = (values + 1).cumsum(0) - 1
    # The kernels find the parameter for the stream as a whole, which is that of its segments.
    _, param, data = kernels.encode_indices(ascending, int(ascending[-1]) + 1, IndexEncoding.RICE)
    return torch.cat([to_bytes(bytes([param]), data.device), data])


def _decode_rice(stream: Tensor, count: int, kernels: Backend) -> Tensor:
    if not stream.numel():
        raise PayloadError("rice stream is empty")
    ascending = kernels.decode_indices(
        IndexEncoding.RICE, int(stream[0]), stream[1:].clone(), count, MAX_NUMEL
    )
    return ascending.diff(prepend=ascending.new_full((1,), -1)) - 1


def _encode_sparse(q: Tensor, kernels: Backend) -> Tensor:
    at = q.nonzero().view(-1)
    encoding, param, index = kernels.encode_indices(at, q.numel())
    head = _SPARSE_HEAD.pack(encoding, param, len(at), index.numel(), 0)
    return torch.cat(
        [to_bytes(head, q.device), index, *([_encode_rice(_zigzag(q[at]) - 1, kernels)] if len(at) else [])]
    )


def _decode_sparse(stream: Tensor, count: int, kernels: Backend) -> Tensor:
    if stream.numel() < _SPARSE_HEAD.size:
        raise PayloadError("sparse stream is truncated")
    encoding, param, nnz, size, reserved = _SPARSE_HEAD.unpack(host_bytes(stream[: _SPARSE_HEAD.size]))
    index = stream[_SPARSE_HEAD.size : _SPARSE_HEAD.size + size]
    if index.numel() != size or reserved or encoding >= IndexEncoding.SHARED_MASK or nnz > count:
        raise PayloadError("sparse stream is truncated or has an unknown encoding")
    at = kernels.decode_indices(encoding, param, index.clone(), nnz, count)
    out = torch.zeros(count, dtype=torch.int64, device=stream.device)
    if nnz:
        out[at] = _unzigzag(_decode_rice(stream[_SPARSE_HEAD.size + size :], nnz, kernels) + 1)
    elif stream.numel() != _SPARSE_HEAD.size + size:
        raise PayloadError("sparse stream has bytes too many")
    return out


def _deflate(q: Tensor) -> bytes:
    wide = bool(q.numel()) and int(q.abs().max()) > 127
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = host_bytes(q.to(torch.int16 if wide else torch.int8))
    return bytes([wide]) + packer.compress(raw) + packer.flush()


def _inflate(stream: Tensor, count: int) -> Tensor:
    data = host_bytes(stream)
    if not data or data[0] > 1:
        raise PayloadError("deflate stream has an unknown width")
    width = 1 + data[0]
    unpacker = zlib.decompressobj(-15)
    try:
        # One byte more than expected tells a stream that is too long, without unpacking all of it.
        raw = unpacker.decompress(data[1:], count * width + 1)
    except zlib.error as error:
        raise PayloadError(f"deflate stream is damaged: {error}") from error
    if len(raw) != count * width or not unpacker.eof or unpacker.unused_data:
        raise PayloadError(f"deflate stream holds {len(raw)} bytes, expected {count * width}")
    return to_bytes(raw, stream.device).view(torch.int16 if width == 2 else torch.int8).to(torch.int64)
