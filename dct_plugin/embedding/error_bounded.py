"""Error-bounded payloads: ``q = round(x / (2 * bound))`` per segment, then an entropy stage.

Source: dual-level adaptive lossy compression (Feng et al., SC 2024, arXiv:2407.04272). A payload holds the
segments of several embedding tables, each with its own bound; ``|x - decoded| <= bound`` holds for every
entry, in fp32, whatever the segment's scale. The kernels quantise and code
(:mod:`~dct_plugin.kernels.embedding_format` has the format); here is what deflate makes of the codes where
whole vectors may repeat.

A deflated payload has its flag in the header, all segments but the raw ones marked as zero, and behind the
raw entries a byte (1: codes of two bytes, 0: of one) and a raw deflate stream of all other codes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.embedding_format import (
    DEFLATED,
    HEADER_SIZE,
    MAX_CODE,
    RAW,
    ZERO,
    EmbeddingKernels,
    Encoded,
    IntArray,
    Outgoing,
    fault_text,
    payload_bytes,
)

#: Bit costs (see :meth:`~dct_plugin.kernels.embedding_format.EmbeddingKernels.encode`) of ``entropy``
#: settings that do not ask what the link is worth: the smallest code, and the one that takes least time.
BIT_COSTS = {"rice": 1 << 20, "deflate": 0, "packed": 0}


def encode_bounded(
    parts: Sequence[Outgoing],
    kernels: EmbeddingKernels,
    *,
    entropy: str = "rice",
    bit_cost: int = 0,
    decoded: bool = False,
    repeats: bool = False,
) -> list[Encoded]:
    """Quantise segments and write the messages of all ranks.

    Args:
        parts: Vectors or gradients for each rank.
        kernels: On the host.
        entropy: ``rice`` (smallest), ``packed`` (fastest), ``deflate``, or by ``bit_cost`` (``auto``).
        bit_cost: Picoseconds that a bit takes on the wire, for ``auto``.
        decoded: Whether :attr:`~dct_plugin.kernels.embedding_format.Encoded.decoded` is wanted.
        repeats: Whole vectors may occur more than once, so that ``auto`` tries deflate, too.
    """
    tries = entropy == "deflate" or (entropy == "auto" and repeats)
    cost = BIT_COSTS.get(entropy, bit_cost)
    results = kernels.encode(parts, cost, decoded=decoded, codes=tries)
    if tries:
        for part, result in zip(parts, results, strict=True):
            if result.message is not None and result.codes is not None:
                deflated = _deflated(part, result.message, result.codes)
                if entropy == "deflate" or len(deflated) < len(result.message):
                    result.message = deflated
    return results


def relative_parts(parts: Sequence[Outgoing], relative: float, kernels: EmbeddingKernels) -> list[Outgoing]:
    """Return ``parts`` with bounds relative to the root mean square of each segment."""
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = [relative * square**0.5 for square in kernels.mean_squares(parts)]
    return [part._replace(bounds=each) for part, each in zip(parts, bounds, strict=True)]


def decode_bounded(
    payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor], kernels: EmbeddingKernels
) -> list[str | None]:
    """Decode payloads; the inverse of :func:`encode_bounded`.

    Args:
        payloads: uint8 on the host, without the byte behind the payload.
        lengths: Entries of each of their segments, int64.
        outs: fp32 [numel] on the host, filled: all NaN if the sender met a non-finite entry.

    Returns:
        The error of each of them (truncated, corrupted, not of these segments); None if there is none.
    """
    found = kernels.decode(payloads, lengths, outs)
    faults = [opened.fault for opened in found]
    for at, opened in enumerate(found):
        if opened.raw is not None:
            faults[at] = _inflate(payloads[at].numpy(), lengths[at], opened.raw, outs[at].numpy())
    return faults


def _deflated(part: Outgoing, message: Tensor, codes: npt.NDArray[np.int16]) -> Tensor:
    """Return the message with its codes deflated; headers, step widths and raw entries stay."""
    body = message[HEADER_SIZE:-1].numpy().tobytes()
    segments = len(part.lengths)
    raw = np.frombuffer(body, dtype=np.uint8, count=segments) == RAW
    coded = codes[~np.repeat(raw, part.lengths)]
    wide = bool(len(coded)) and int(np.abs(coded).max()) > 127
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    stream = packer.compress(coded.astype("<i2" if wide else np.int8).tobytes()) + packer.flush()
    end = 3 * segments + 4 * int(part.lengths[raw].sum())
    methods = np.where(raw, RAW, ZERO).astype(np.uint8).tobytes()
    whole = methods + body[segments:end] + bytes([wide]) + stream
    data = payload_bytes(DEFLATED, part.x.numel(), segments, whole) + bytes([part.kind])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _inflate(
    data: npt.NDArray[np.uint8], lengths: IntArray, raw: int, out: npt.NDArray[np.float32]
) -> str | None:
    """Fill ``out`` from a deflated payload whose header and methods are right; return an error, or None."""
    segments = len(lengths)
    body = data.tobytes()[HEADER_SIZE:]
    methods = np.frombuffer(body, dtype=np.uint8, count=segments)
    words = np.frombuffer(body, dtype="<u2", count=segments, offset=segments).astype(np.uint32)
    at = 3 * segments
    stream = body[at + 4 * raw :]
    if not stream or stream[0] > 1:
        return "error-bounded payload is truncated, or its deflate stream has an unknown width"
    width = 1 + stream[0]
    is_raw = np.repeat(methods == RAW, lengths)
    count = len(out) - raw
    unpacker = zlib.decompressobj(-15)
    try:
        # One byte more than expected tells a stream that is too long, without unpacking all of it.
        unpacked = unpacker.decompress(stream[1:], count * width + 1)
    except zlib.error as error:
        return f"error-bounded payload's deflate stream is damaged: {error}"
    if len(unpacked) != count * width or not unpacker.eof or unpacker.unused_data:
        return f"error-bounded payload's deflate stream holds {len(unpacked)} bytes, expected {count * width}"
    codes = np.frombuffer(unpacked, dtype="<i2" if width == 2 else np.int8).astype(np.float32)
    if bool((np.abs(codes) >= MAX_CODE).any()):
        return fault_text(11, 0, len(out), segments)
    steps = np.float32(2) * (words << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        out[~is_raw] = codes * np.repeat(steps, lengths)[~is_raw]
    out[is_raw] = np.frombuffer(body, dtype="<f4", count=raw, offset=at)
    return None if bool(np.isfinite(out).all()) else fault_text(12, 0, len(out), segments)
