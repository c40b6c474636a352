"""Error-bounded codes in plain Python, bit by bit: the oracle of the compiled kernels.

The public functions have the names, arguments and results of those in :mod:`dct_plugin.kernels.embedding`,
whose docstring has the format.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dct_plugin.codecs.payload import OVERFLOW_MAGNITUDE
from dct_plugin.kernels import embedding
from dct_plugin.kernels.embedding import RICE_COST, Encoded, FloatArray, IntArray, Outgoing

_HEADER = struct.Struct("<HBBIHHII")
_MAGIC, _VERSION, _NONFINITE = 0xDC7B, 2, 1
_MAX_RICE, _SPARSE, _RAW, _ZERO, _PACKED = 12, 13, 14, 15, 16
_ESCAPE = 24  # a quotient from here on is written as that many zeros and the whole code
_CODE_BITS, _GAP_BITS = 16, 32  # after an escape
#: Codes are below this, so that code times step width (8 significant bits) is exact in fp32.
_MAX_CODE = 1 << 15


def mean_squares(parts: Sequence[Outgoing]) -> list[FloatArray]:
    """Return the mean of the squares of every segment, summed in fp32 from first to last."""
    found = []
    for part in parts:
        sizes = torch.from_numpy(part.lengths)
        mean = torch.segment_reduce(part.x.square(), "mean", lengths=sizes, initial=0.0)
        found.append(torch.where(sizes > 0, mean, 0.0).double().numpy())
    return found


def encode(parts: Sequence[Outgoing], bit_cost: int, *, decoded: bool = False) -> list[Encoded]:
    """Quantise, choose a method for every segment, and write the messages."""
    return [_encode(part, bit_cost, decoded or not part.send) for part in parts]


def decode(
    payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
) -> list[str | None]:
    """Do the inverse of :func:`encode`; return what is wrong with each payload, None for nothing."""
    found: list[str | None] = []
    for payload, sizes, out in zip(payloads, lengths, outs, strict=True):
        try:
            _decode(payload.numpy().tobytes(), sizes, out.numpy())
            found.append(None)
        except _Fault as fault:
            number, value = fault.args
            text = embedding._FAULTS[number]
            text = text.format(found=value, numel=out.numel(), segments=len(sizes))
            found.append(f"error-bounded payload {text}")
    return found


def half_step(bound: float) -> float:
    """Return half of the step width for a bound: the largest bf16 number safely below it; 0: too small."""
    target = np.array([bound * (1.0 - 2.0**-12)], dtype=np.float32).view(np.uint32)
    half = float((target & 0xFFFF0000).view(np.float32)[0])
    return half if half >= 2.0**-100 else 0.0


# -- encode ---


def _encode(part: Outgoing, bit_cost: int, decoded: bool) -> Encoded:
    x = part.x.numpy()
    if not bool((np.abs(x) < OVERFLOW_MAGNITUDE).all()):
        return Encoded(_message(part, _NONFINITE, b"") if part.send else None, None)
    methods, steps, raw, bits = bytearray(), b"", b"", ""
    out = x.copy()
    for entries, rounded, bound in zip(
        _split(x, part.lengths), _split(out, part.lengths), part.bounds, strict=True
    ):
        largest = float(np.abs(entries).max(initial=0.0))
        half = half_step(float(bound) if largest else 1.0)
        if largest < half * 2.0 * (_MAX_CODE - 1):
            number = np.rint(entries.astype(np.float64) / (2.0 * half)).astype(np.int64)
            rounded[:] = number * (2.0 * half)
            method, written = _write_segment((2 * np.abs(number) - (number > 0)).tolist(), bit_cost)
            bits += written
        else:
            method, half = _RAW, 0.0
            raw += entries.tobytes()
        methods.append(method)
        steps += struct.pack("<f", half)[2:]
    codes = bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))
    message = _message(part, 0, bytes(methods) + steps + raw + codes) if part.send else None
    return Encoded(message, torch.from_numpy(out) if decoded else None)


def _message(part: Outgoing, flags: int, body: bytes) -> Tensor:
    fields = _MAGIC, _VERSION, flags, len(part.x), len(part.lengths), 0, len(body)
    check = zlib.crc32(body, zlib.crc32(_HEADER.pack(*fields, 0)[:16]))
    message = _HEADER.pack(*fields, check) + body + bytes([part.kind])
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _split(array: np.ndarray[Any, Any], lengths: IntArray) -> list[np.ndarray[Any, Any]]:
    return np.split(array, np.cumsum(lengths))[: len(lengths)]


def _write_segment(z: list[int], bit_cost: int) -> tuple[int, str]:
    """Return the cheapest method for a segment's codes, and its bits, "0" and "1"."""
    n, at = len(z), [i for i, code in enumerate(z) if code]
    if not at:
        return _ZERO, ""
    width = max(z).bit_length()
    choices = [(n * width * bit_cost, _PACKED + width, "".join(_bits(code, width) for code in z))]
    if bit_cost:
        k, size = _best_rice(z)
        bits = "".join(_rice(code, k, _CODE_BITS) for code in z)
        choices.append((size * bit_cost + n * RICE_COST, k, bits))
    if bit_cost and 4 * len(at) < n:
        size, bits = _sparse(n, at, [z[i] - 1 for i in at])
        choices.append((size * bit_cost + 2 * len(at) * RICE_COST, _SPARSE, bits))
    _, method, bits = min(choices, key=lambda choice: choice[0])  # the first of equals
    return method, bits


def _sparse(n: int, at: list[int], values: list[int]) -> tuple[int, str]:
    """Return the number of bits, as if no quotient was escaped, and the bits."""
    gaps = [i - before - 1 for before, i in zip([-1, *at[:-1]], at, strict=True)]
    gap_param = min(max(((n - len(at)) // len(at)).bit_length() - 1, 0), _MAX_RICE)
    value_param, size = _best_rice(values)
    size += n.bit_length() + 8 + sum((gap >> gap_param) + gap_param + 1 for gap in gaps)
    bits = _bits(len(at), n.bit_length()) + _bits(gap_param, 4) + _bits(value_param, 4)
    for gap, value in zip(gaps, values, strict=True):
        bits += _rice(gap, gap_param, _GAP_BITS) + _rice(value, value_param, _CODE_BITS)
    return size, bits


def _best_rice(v: list[int]) -> tuple[int, int]:
    """Return the best parameter (the smallest of equals), and the number of bits, as if no quotient was
    escaped.
    """
    bits = [sum((code >> k) + k + 1 for code in v) for k in range(_MAX_RICE + 1)]
    return bits.index(min(bits)), min(bits)


def _bits(value: int, width: int) -> str:
    """Return the bits of a value, the least significant one first."""
    return f"{value:0{width}b}"[::-1] if width else ""


def _rice(value: int, k: int, escaped_bits: int) -> str:
    quotient = value >> k
    if quotient >= _ESCAPE:
        return "0" * _ESCAPE + _bits(value, escaped_bits)
    return "0" * quotient + "1" + _bits(value & ((1 << k) - 1), k)


# -- decode ---


class _Fault(Exception):
    """A fault of a payload: its number, and what was found."""


def _decode(payload: bytes, lengths: IntArray, out: np.ndarray[Any, Any]) -> None:
    """Fill ``out``."""
    if len(payload) < _HEADER.size:
        raise _Fault(1, len(payload))
    magic, version, flags, numel, segments, reserved, size, check = _HEADER.unpack_from(payload)
    body = payload[_HEADER.size :]
    for number, wrong, found in (
        (2, magic != _MAGIC, magic),
        (3, version != _VERSION, version),
        (4, flags > _NONFINITE or reserved, flags),
        (5, numel != len(out), numel),
        (5, segments != len(lengths), segments),
        (6, size != len(body) or (flags == _NONFINITE and size), len(payload)),
        (7, check != zlib.crc32(body, zlib.crc32(payload[:16])), 0),
    ):
        if wrong:
            raise _Fault(number, found)
    if flags == _NONFINITE:
        out[:] = np.nan
        return
    if size < 3 * segments:
        raise _Fault(10, 0)
    methods, sizes = body[:segments], lengths.tolist()
    words = struct.unpack_from(f"<{segments}H", body, segments)
    for method, word, n in zip(methods, words, sizes, strict=True):
        if method > _PACKED + 16 or method == _PACKED:
            raise _Fault(8, method)
        if word >= 0x7F80 or (n and (method == _RAW) != (word == 0)):
            raise _Fault(9, 0)
    body = body[3 * segments :]
    raw = 4 * sum(n for method, n in zip(methods, sizes, strict=True) if method == _RAW)
    if raw > len(body):
        raise _Fault(10, 0)
    values, bits, at = body[:raw], "".join(_bits(byte, 8) for byte in body[raw:]), 0
    for part, method, word in zip(_split(out, lengths), methods, words, strict=True):
        if method == _RAW:
            part[:] = np.frombuffer(values, dtype="<f4", count=len(part))
            values = values[4 * len(part) :]
        else:
            z, at = _read_segment(bits, at, method, len(part))
            (half,) = struct.unpack("<f", struct.pack("<I", word << 16))
            number = np.array([(code + 1) // 2 if code % 2 else -(code // 2) for code in z])
            with np.errstate(over="ignore", invalid="ignore"):
                part[:] = number * (np.float32(2.0) * np.float32(half))
    if not bool(np.isfinite(out).all()):
        raise _Fault(12, 0)
    if len(bits) - at >= 8 or "1" in bits[at:]:
        raise _Fault(13, 0)


def _read_segment(bits: str, at: int, method: int, n: int) -> tuple[list[int], int]:
    """Return the codes of ``n`` entries, and where the next segment begins."""
    z = [0] * n
    if method <= _MAX_RICE:
        if n > len(bits):
            raise _Fault(10, 0)
        for i in range(n):
            z[i], at = _take_rice(bits, at, method, _CODE_BITS)
    elif method == _SPARSE:
        nnz, at = _take(bits, at, n.bit_length())
        gap_param, at = _take(bits, at, 4)
        value_param, at = _take(bits, at, 4)
        if gap_param > _MAX_RICE or value_param > _MAX_RICE:
            raise _Fault(11, 0)
        if nnz > n or nnz > len(bits):
            raise _Fault(10, 0)
        i = -1
        for _ in range(nnz):
            gap, at = _take_rice(bits, at, gap_param, _GAP_BITS)
            code, at = _take_rice(bits, at, value_param, _CODE_BITS)
            i += gap + 1
            if i >= n:
                raise _Fault(11, 0)
            if at > len(bits):
                raise _Fault(10, 0)
            z[i] = code + 1
    elif method > _PACKED:
        if n * (method - _PACKED) > len(bits) - at:
            raise _Fault(10, 0)
        for i in range(n):
            z[i], at = _take(bits, at, method - _PACKED)
    if at > len(bits):
        raise _Fault(10, 0)
    if max(z, default=0) > 2 * (_MAX_CODE - 1):
        raise _Fault(11, 0)
    return z, at


def _take(bits: str, at: int, width: int) -> tuple[int, int]:
    """Return a value and the position behind it; bits past the end are zeros, which the caller notices."""
    return int(bits[at : at + width][::-1] or "0", 2), at + width


def _take_rice(bits: str, at: int, k: int, escaped_bits: int) -> tuple[int, int]:
    one = bits.find("1", at, at + _ESCAPE)
    if one < 0:
        return _take(bits, at + _ESCAPE, escaped_bits)
    low, behind = _take(bits, one + 1, k)
    return (one - at) << k | low, behind
