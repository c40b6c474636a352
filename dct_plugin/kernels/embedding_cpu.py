"""The compiled kernels of the embedding exchange (csrc/dct_embedding.c): all messages in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .build import fields, load_functions
from .embedding_format import (
    RICE_COST,
    EmbeddingKernels,
    Encoded,
    FloatArray,
    IntArray,
    Outgoing,
    OutOfRange,
    fault_text,
)
from .embedding_reference import ReferenceEmbeddingKernels


class _Outgoing(ctypes.Structure):
    _fields_ = [
        *fields("x decoded out", c_void_p),
        *fields("numel first segments nbytes", c_uint64),
        *fields("kind status", c_int32),
    ]


class _Encode(ctypes.Structure):
    _fields_ = [*fields("messages lengths bounds", c_void_p), *fields("bit_cost rice_cost", c_uint64)]


class _Incoming(ctypes.Structure):
    _fields_ = [
        *fields("data out", c_void_p),
        *fields("nbytes numel first segments", c_uint64),
        *fields("found", c_int64),
        *fields("status reserved", c_int32),
    ]


class _Decode(ctypes.Structure):
    _fields_ = fields("messages lengths", c_void_p)


_SIGNATURES: dict[str, list[Any]] = {
    "dct_mean_squares": [POINTER(_Encode), c_int32, c_void_p],
    "dct_embedding_encode": [POINTER(_Encode), c_int32, c_int32],
    "dct_embedding_decode": [POINTER(_Decode), c_int32, c_int32],
    "dct_distinct_rows": [*[c_void_p, c_uint64, c_uint64], *[c_void_p] * 7],
    "dct_add_rows": [c_void_p, c_void_p, c_void_p, c_uint64, c_uint64],
}
_OUT_OF_RANGE = -5
_IS_NONFINITE = 15


class CompiledEmbeddingKernels(EmbeddingKernels):
    """See :class:`~dct_plugin.kernels.embedding_format.EmbeddingKernels`.

    Args:
        threads: Threads per call, at most one per message; None: as many as torch uses.

    Raises:
        OSError: the library can be neither loaded nor built.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._library, _ = load_functions(_SIGNATURES)
        self._bound = self._library.dct_embedding_bound
        self._bound.argtypes, self._bound.restype = [c_uint64, c_uint64], c_int64
        self._threads = threads

    def mean_squares(self, parts: Sequence[Outgoing]) -> list[FloatArray]:
        call, _, kept = self._call(parts, 0)
        out = np.empty(sum(len(part.lengths) for part in parts))
        self._library.dct_mean_squares(byref(call), len(parts), out.ctypes.data)
        del kept
        return np.split(out, np.cumsum([len(part.lengths) for part in parts])[:-1])

    def encode(self, parts: Sequence[Outgoing], bit_cost: int, *, decoded: bool = False) -> list[Encoded]:
        call, messages, kept = self._call(parts, bit_cost)
        room = [self._bound(p.x.numel(), len(p.lengths)) if p.send else 0 for p in parts]
        buffer = torch.empty(sum(room), dtype=torch.uint8)
        results, starts, at = [], [], buffer.data_ptr()
        for part, message, size in zip(parts, messages, room, strict=True):
            numel = part.x.numel()
            result = Encoded(None, None, True)
            if decoded or not part.send:
                result.decoded = torch.empty(numel)
                message.decoded = result.decoded.data_ptr()
            message.out = at if size else None
            starts.append(at - buffer.data_ptr())
            at += size
            results.append(result)
        if self._library.dct_embedding_encode(byref(call), len(parts), self._workers(len(parts))):
            raise MemoryError("compiled kernels: out of memory")
        del kept
        for part, message, result, start in zip(parts, messages, results, starts, strict=True):
            result.finite = message.status == 0
            if part.send:
                result.message = buffer[start : start + message.nbytes]
            if not result.finite:
                result.decoded = None
        return results

    def decode(
        self, payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
    ) -> list[str | None]:
        if not payloads:
            return []
        messages = (_Incoming * len(payloads))()
        first = 0
        for message, payload, sizes, out in zip(messages, payloads, lengths, outs, strict=True):
            message.data, message.nbytes = payload.data_ptr(), payload.numel()
            message.out, message.numel = out.data_ptr(), out.numel()
            message.first, message.segments = first, len(sizes)
            first += len(sizes)
        flat = _flat(lengths)
        call = _Decode(ctypes.addressof(messages), flat.ctypes.data)
        if self._library.dct_embedding_decode(byref(call), len(payloads), self._workers(len(payloads))):
            raise MemoryError("compiled kernels: out of memory")
        return [_fault(m.status, m.found, m.numel, m.segments) for m in messages]

    def distinct_rows(
        self, ids: Tensor, order: IntArray, limits: IntArray, base: IntArray
    ) -> tuple[Tensor, IntArray, Tensor]:
        samples, columns = ids.shape
        rows = torch.empty(samples * columns, dtype=torch.int64)
        counts, fault = np.empty(columns, dtype=np.int64), np.zeros(2, dtype=np.int64)
        positions = torch.empty(samples, columns, dtype=torch.int64)
        arrays = (order.ctypes.data, limits.ctypes.data, base.ctypes.data)
        results = (rows.data_ptr(), counts.ctypes.data, positions.data_ptr(), fault.ctypes.data)
        status = self._library.dct_distinct_rows(ids.data_ptr(), samples, columns, *arrays, *results)
        if status == _OUT_OF_RANGE:
            raise OutOfRange(*fault.tolist())
        if status:
            raise MemoryError("compiled kernels: out of memory")
        return rows[: int(counts.sum())], counts, positions

    def add_rows(self, out: Tensor, rows: Tensor, x: Tensor) -> None:
        self._library.dct_add_rows(out.data_ptr(), rows.data_ptr(), x.data_ptr(), len(x), x.shape[1])

    def _workers(self, messages: int) -> int:
        """Return the number of threads: as many as torch uses, at most one per message."""
        return min(self._threads or torch.get_num_threads(), messages)

    @staticmethod
    def _call(parts: Sequence[Outgoing], bit_cost: int) -> tuple[_Encode, ctypes.Array[_Outgoing], object]:
        """Return the argument, its messages, and the arrays that have to live until the call is over."""
        messages = (_Outgoing * len(parts))()
        first = 0
        for message, part in zip(messages, parts, strict=True):
            message.x, message.numel, message.kind = part.x.data_ptr(), part.x.numel(), part.kind
            message.first, message.segments = first, len(part.lengths)
            first += len(part.lengths)
        lengths, bounds = (
            _flat([part.lengths for part in parts]),
            _flat([np.asarray(part.bounds) for part in parts]),
        )
        where = (ctypes.addressof(messages), lengths.ctypes.data, bounds.ctypes.data)
        return _Encode(*where, bit_cost, RICE_COST), messages, (lengths, bounds)


def _flat(parts: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts) if len(parts) != 1 else np.ascontiguousarray(parts[0])


def _fault(status: int, found: int, numel: int, segments: int) -> str | None:
    return None if status in (0, _IS_NONFINITE) else fault_text(status, found, numel, segments)


def host_embedding_kernels() -> EmbeddingKernels:
    """Return the kernels of the host: compiled, or, without a compiler, those in plain torch."""
    try:
        return CompiledEmbeddingKernels()
    except OSError:
        return ReferenceEmbeddingKernels()
