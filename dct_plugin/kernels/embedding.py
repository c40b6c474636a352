"""The hot loops of the embedding exchange: all messages of a step, to or from all peers, in one call.

They work on the host; what is on an accelerator is copied there first, except for packed codes on CUDA
(:func:`get_device_codec`). :func:`get_embedding_kernels` gives the compiled ones (csrc/dct_embedding.c) or,
without a compiler, those of :mod:`~dct_plugin.kernels.embedding_reference`, which define the results.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int32, c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import build
from .backend import Backend
from .cpu import CpuBackend
from .embedding_format import (
    RICE_COST,
    EmbeddingKernels,
    Encoded,
    FloatArray,
    IntArray,
    Opened,
    Outgoing,
    OutOfRange,
    fault_text,
)
from .embedding_reference import ReferenceEmbeddingKernels

if TYPE_CHECKING:
    from .triton.embedding import TritonEmbeddingKernels
    from .triton.requests import TritonRequests

__all__ = [
    "CompiledEmbeddingKernels",
    "get_device_codec",
    "get_device_requests",
    "get_embedding_kernels",
    "say_once",
]

logger = logging.getLogger("dct_plugin.kernels")


class _Outgoing(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("decoded", c_void_p),
        ("out", c_void_p),
        ("codes", c_void_p),
        ("numel", c_uint64),
        ("first", c_uint64),
        ("segments", c_uint64),
        ("nbytes", c_uint64),
        ("kind", c_int32),
        ("status", c_int32),
    ]


class _Encode(ctypes.Structure):
    _fields_ = [
        ("messages", c_void_p),
        ("lengths", c_void_p),
        ("bounds", c_void_p),
        ("bit_cost", c_uint64),
        ("rice_cost", c_uint64),
    ]


class _Incoming(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("out", c_void_p),
        ("nbytes", c_uint64),
        ("numel", c_uint64),
        ("first", c_uint64),
        ("segments", c_uint64),
        ("found", c_int64),
        ("status", c_int32),
        ("reserved", c_int32),
    ]


class _Decode(ctypes.Structure):
    _fields_ = [("messages", c_void_p), ("lengths", c_void_p)]


_SIGNATURES = {
    "dct_mean_squares": [POINTER(_Encode), c_int32, c_void_p],
    "dct_embedding_encode": [POINTER(_Encode), c_int32, c_int32],
    "dct_embedding_decode": [POINTER(_Decode), c_int32, c_int32],
    "dct_distinct_rows": [
        *[c_void_p, c_uint64, c_uint64, c_void_p, c_void_p],
        *[c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ],
    "dct_add_rows": [c_void_p, c_void_p, c_void_p, c_uint64, c_uint64],
}
_OUT_OF_RANGE = -5
_IS_DEFLATED, _IS_NONFINITE = 14, 15


class CompiledEmbeddingKernels:
    """See :class:`~dct_plugin.kernels.embedding_format.EmbeddingKernels`.

    Args:
        threads: Threads per call, at most one per message; None: as many as torch uses.

    Raises:
        OSError: the library can be neither loaded nor built.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._library, _ = build.load()
        for function, arguments in _SIGNATURES.items():
            getattr(self._library, function).argtypes = arguments
            getattr(self._library, function).restype = c_int32
        self._bound = self._library.dct_embedding_bound
        self._bound.argtypes, self._bound.restype = [c_uint64, c_uint64], c_int64
        self._threads = threads

    def mean_squares(self, parts: Sequence[Outgoing]) -> list[FloatArray]:
        call, _, kept = self._call(parts, 0)
        out = np.empty(sum(len(part.lengths) for part in parts))
        self._library.dct_mean_squares(byref(call), len(parts), out.ctypes.data)
        del kept
        return np.split(out, np.cumsum([len(part.lengths) for part in parts])[:-1])

    def encode(
        self, parts: Sequence[Outgoing], bit_cost: int, *, decoded: bool = False, codes: bool = False
    ) -> list[Encoded]:
        call, messages, kept = self._call(parts, bit_cost)
        room = [self._bound(p.x.numel(), len(p.lengths)) if p.send else 0 for p in parts]
        buffer = torch.empty(sum(room), dtype=torch.uint8)
        results, starts, at = [], [], buffer.data_ptr()
        for part, message, size in zip(parts, messages, room, strict=True):
            numel = part.x.numel()
            result = Encoded(None, None, None, True)
            if decoded or not part.send:
                result.decoded = torch.empty(numel)
                message.decoded = result.decoded.data_ptr()
            if codes:
                result.codes = np.empty(numel, dtype=np.int16)
                message.codes = result.codes.ctypes.data
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
                result.decoded = result.codes = None
        return results

    def decode(
        self, payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
    ) -> list[Opened]:
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
        return [_opened(m.status, m.found, m.numel, m.segments) for m in messages]

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
        """Threads: as many as torch uses, none for a single message."""
        return min(self._threads or torch.get_num_threads(), messages)

    @staticmethod
    def _call(parts: Sequence[Outgoing], bit_cost: int) -> tuple[_Encode, ctypes.Array[_Outgoing], object]:
        """The argument, its messages, and what has to live until the call is over."""
        messages = (_Outgoing * len(parts))()
        first = 0
        for message, part in zip(messages, parts, strict=True):
            message.x, message.numel, message.kind = part.x.data_ptr(), part.x.numel(), part.kind
            message.first, message.segments = first, len(part.lengths)
            first += len(part.lengths)
        lengths, bounds = _flat([part.lengths for part in parts]), _flat([part.bounds for part in parts])
        where = (ctypes.addressof(messages), lengths.ctypes.data, bounds.ctypes.data)
        return _Encode(*where, bit_cost, RICE_COST), messages, (lengths, bounds)


def _flat(parts: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts) if len(parts) != 1 else np.ascontiguousarray(parts[0])


def _opened(status: int, found: int, numel: int, segments: int) -> Opened:
    if status == _IS_DEFLATED:
        return Opened(raw=found)
    if status in (0, _IS_NONFINITE):
        return Opened()
    return Opened(fault_text(status, found, numel, segments))


def get_embedding_kernels(backend: Backend) -> EmbeddingKernels:
    """The kernels that go with a backend: compiled, unless that is plain torch or there is no compiler."""
    if backend.name != "reference":  # those of an accelerator, too: the codec runs on the host
        try:
            return CompiledEmbeddingKernels(backend.threads if isinstance(backend, CpuBackend) else None)
        except OSError:
            pass
    return ReferenceEmbeddingKernels()


def get_device_codec(backend: Backend, entropy: str) -> TritonEmbeddingKernels | None:
    """What writes and reads error-bounded codes on the device of a backend; None: the host does.

    ``entropy`` is that of the configuration: ``auto`` is packed there. Rice codes and deflate are serial.
    """
    if backend.name != "triton":
        return None
    if entropy in ("rice", "deflate"):
        say_once(f"dct.embedding.entropy = '{entropy}': a serial code, which the host writes and reads")
        return None
    from .triton.embedding import TritonEmbeddingKernels

    return TritonEmbeddingKernels()


def get_device_requests(
    backend: Backend, tables: Sequence[int], limits: Sequence[int], rank: int, where: torch.device
) -> TritonRequests | None:
    """What writes and reads requests for rows on the device of a backend; None: the host does.

    Args:
        tables: Of each rank.
        limits: Their rows.
        rank: This one.
        where: The device.
    """
    if backend.name != "triton":
        return None
    from .triton.requests import TritonRequests

    return TritonRequests(tables, limits, rank, where)


@functools.cache
def say_once(text: str) -> None:
    """Log why something is done on the host."""
    logger.warning("%s; vectors and gradients are copied there, 'packed' needs no copy", text)
