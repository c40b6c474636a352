"""Compiled CPU kernels (csrc/dct_kernels.c) through ctypes, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs.index import NO_POSITIONS, IndexEncoding, check_positions, check_section
from ..codecs.payload import Header, Payload, verify_checksum, write_payload
from ..codecs.stats import KERNEL_ERRORS, Stats
from ..errors import PayloadError
from .backend import Backend
from .build import fields, load_functions
from .checks import (
    check_changes,
    check_encode_shared,
    check_exact,
    check_pack,
    check_sample,
    naming_message,
    open_pair,
    open_positions,
    scales_first,
    split_message,
)
from .embedding_cpu import CompiledEmbeddingKernels
from .job import GRAD_CODES, GRAD_DTYPES, Job, check_vector

ENTRIES_PER_THREAD = 1 << 20  # a thread is worth starting for this many entries
#: Instruction sets that the library has branches for on this architecture, from the least to the most.
ISA_NAMES = (
    ("portable", "neon") if platform.machine() in ("aarch64", "arm64") else ("portable", "avx2", "avx512")
)
_MAX_THREADS = 64

_ERRORS = {
    **{-1 - number: text for number, text in KERNEL_ERRORS.items()},  # -1: out of memory
    -8: "index section has trailing bits or bytes",
    -9: "payload header is wrong",
}
_ERR_HEADER = -9


class _Compress(ctypes.Structure):
    _fields_ = [
        *fields("grad residual left out", c_void_p),
        *fields("numel capacity start", c_uint64),
        *fields("tau", c_float),
        *fields("grad_dtype value_dtype encoding dense threads clear nonfinite", c_int32),
        *fields("nbytes nnz above select_ns encode_ns", c_uint64),
    ]


class _Payload(ctypes.Structure):
    _fields_ = [
        *fields("data", c_void_p),
        *fields("nbytes numel nnz index_nbytes", c_uint64),
        *fields("encoding param value_dtype", c_int32),
        *fields("check1 check2", c_uint32),
    ]

    @classmethod
    def of(cls, payload: Payload) -> _Payload:
        header = payload.header
        return cls(payload.data.data_ptr(), *(getattr(header, field[0]) for field in cls._fields_[1:]))


class _Message(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("nbytes", c_uint64)]


class _Target(ctypes.Structure):
    _fields_ = [("out", c_void_p), ("numel", c_uint64), ("dtype", c_int32)]


_SIGNATURES: dict[str, list[Any]] = {
    "dct_isa": [c_int32],
    "dct_compress": [POINTER(_Compress)],
    "dct_decode_add": [POINTER(_Payload), POINTER(_Payload), c_void_p],
    "dct_sum_messages": [
        *[POINTER(_Message), c_int32, POINTER(_Target), c_int32],
        *[c_float, c_void_p, POINTER(c_int32)],
    ],
    "dct_decode_mask": [POINTER(_Payload), c_void_p],
    "dct_encode_shared": [c_void_p, c_int32, POINTER(_Payload), c_int32, c_void_p, POINTER(c_int32)],
    "dct_encode_indices": [c_void_p, c_uint64, c_uint64, POINTER(c_int64), c_void_p],
    "dct_decode_indices": [c_int32, c_int32, c_void_p, c_uint64, c_uint64, c_uint64, c_void_p],
    "dct_sample_threshold": [
        *[c_void_p, c_int32, c_void_p, c_uint64],
        *[c_double, c_uint64, c_uint64, POINTER(c_float)],
    ],
    "dct_pack": [c_void_p, c_void_p, c_void_p, c_uint64, c_uint32, *[c_int32] * 3],
    "dct_encode_changes": [c_void_p, c_void_p, c_uint64, c_void_p, c_void_p, POINTER(c_uint64)],
    "dct_apply_changes": [
        *[c_void_p, c_uint64, POINTER(c_void_p), POINTER(c_uint64)],
        *[c_int32, c_void_p],
    ],
    "dct_exact_threshold": [c_void_p, c_int32, c_void_p, c_uint64, c_uint64, POINTER(c_float)],
}


def _check(status: int) -> None:
    if status == 0:
        return
    if status == -1:
        raise MemoryError("compiled kernels: out of memory")
    raise PayloadError(_ERRORS[status])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _on_cpu(**tensors: Payload | Tensor | None) -> None:
    for name, tensor in tensors.items():
        tensor = tensor.data if isinstance(tensor, Payload) else tensor
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}, these kernels serve cpu tensors")


class CpuBackend(Backend):
    """Compiled kernels; see :class:`~dct_plugin.kernels.backend.Backend`.

    Args:
        threads: threads per call; None: as many as torch uses, at most one per 2**20 entries. Results do not
            depend on it.
    Attributes:
        path: the library's file.
        isa: the instruction set it uses on this machine: ``portable``, ``avx2``, ``avx512`` or ``neon``.
    Raises:
        OSError: the library can be neither loaded nor built.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._library, self.path = load_functions(_SIGNATURES)
        self.threads = threads
        self._local = threading.local()

    def __repr__(self) -> str:
        return f"CpuBackend(isa={self.isa!r}, path={str(self.path)!r})"

    @property
    def isa(self) -> str:
        return ISA_NAMES[self._library.dct_isa(-1)]

    def set_isa(self, name: str) -> str:
        """Ask for an instruction set, process-wide (tests, benchmarks); return the one used from now on."""
        return ISA_NAMES[self._library.dct_isa(ISA_NAMES.index(name))]

    def compress(self, job: Job) -> Stats:
        if job.grad.device.type != "cpu":
            _on_cpu(grad=job.grad)
        call = _Compress(
            _pointer(job.grad),
            _pointer(job.residual),
            _pointer(job.residual_out),
            _pointer(job.out),
            job.numel,
            job.capacity,
            job.start,
            float(job.applied_tau()),
            GRAD_CODES[job.grad.dtype],
            job.value_dtype,
            -1 if job.encoding is None else job.encoding,
            job.dense,
            self._threads_for(job.numel),
            job.clear,
        )
        _check(self._library.dct_compress(byref(call)))
        return Stats(
            call.nbytes,
            call.nnz,
            call.above,
            bool(call.nonfinite),
            tau=call.tau,
            select_ns=call.select_ns,
            encode_ns=call.encode_ns,
        )

    def _threads_for(self, numel: int) -> int:
        threads = self.threads
        if threads is None:
            most = numel // ENTRIES_PER_THREAD
            threads = min(torch.get_num_threads(), most) if most > 1 else 1
        return max(1, min(threads, _MAX_THREADS))

    def decode_add(
        self, payload: Payload | Tensor, out: Tensor, positions: Payload | Tensor | None = None
    ) -> int:
        check_vector("out", out, (torch.float32,))
        _on_cpu(payload=payload, positions=positions, out=out)
        opened, mask = open_pair(payload, positions, out.numel(), verify=False)
        if opened.nonfinite:
            verify_checksum(opened.header, opened.data)
            out.fill_(float("nan"))
            return 0
        own = _Payload.of(opened)
        other = own if mask is opened else _Payload.of(mask)
        _check(self._library.dct_decode_add(byref(own), byref(other), out.data_ptr()))
        return opened.nnz

    def sum_messages(self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float = 1.0) -> None:
        for out in outs:
            check_vector("out", out, GRAD_DTYPES)
            _on_cpu(out=out)
        for message in messages:
            check_vector("message", message, (torch.uint8,))
            _on_cpu(message=message)
        which = c_int32()
        in_place = scales_first(len(messages), scale)
        apart = [out.numel() for out in outs if not in_place or out.dtype != torch.float32]
        status = self._library.dct_sum_messages(
            (_Message * len(messages))(*[_Message(m.data_ptr(), m.numel()) for m in messages]),
            len(messages),
            (_Target * len(outs))(*[_Target(o.data_ptr(), o.numel(), GRAD_CODES[o.dtype]) for o in outs]),
            len(outs),
            scale,
            self._zeros(max(apart)).data_ptr() if apart else None,
            byref(which),
        )
        if status == _ERR_HEADER:
            split_message(messages, which.value, outs)  # tells what is wrong
        with naming_message(which.value):
            _check(status)

    def _zeros(self, numel: int) -> Tensor:
        """Return fp32 zeros, this thread's own; the kernel that writes there puts zeros back."""
        zeros: Tensor | None = getattr(self._local, "zeros", None)
        if zeros is None or zeros.numel() < numel:
            zeros = self._local.zeros = torch.zeros(numel, dtype=torch.float32)
        return zeros

    def decode_mask(self, payload: Payload | Tensor, numel: int) -> Tensor:
        _on_cpu(payload=payload)
        payload = open_positions(payload, numel, verify=False)
        mask = torch.zeros(numel, dtype=torch.bool)
        _check(self._library.dct_decode_mask(byref(_Payload.of(payload)), mask.data_ptr()))
        return mask

    def encode_shared(
        self, source: Tensor, index_payload: Payload | Tensor, value_dtype: int, out: Tensor
    ) -> Stats:
        _on_cpu(source=source, index_payload=index_payload, out=out)
        began = time.perf_counter_ns()
        mask, header = check_encode_shared(source, index_payload, value_dtype, out, verify=False)
        if header.nonfinite:
            verify_checksum(mask.header, mask.data)
            write_payload(out, header)
        else:
            flag, code, vt = c_int32(), GRAD_CODES[source.dtype], header.value_dtype
            arguments = (source.data_ptr(), code, byref(_Payload.of(mask)), vt, out.data_ptr(), byref(flag))
            _check(self._library.dct_encode_shared(*arguments))
            if flag.value:
                header = Header.flagged(vt, mask.numel)
        elapsed = time.perf_counter_ns() - began
        return Stats(header.nbytes, header.nnz, mask.nnz, header.nonfinite, encode_ns=elapsed)

    def sample_threshold(
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> float:
        check_sample(grad, residual, keep_fraction, num_samples)
        _on_cpu(grad=grad, residual=residual)
        tau = c_float()
        status = self._library.dct_sample_threshold(
            grad.data_ptr(),
            GRAD_CODES[grad.dtype],
            _pointer(residual),
            grad.numel(),
            keep_fraction,
            num_samples,
            seed & (2**64 - 1),
            byref(tau),
        )
        _check(status)
        return tau.value

    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> float:
        check_exact(grad, residual, k)
        _on_cpu(grad=grad, residual=residual)
        tau = c_float()
        code, numel = GRAD_CODES[grad.dtype], grad.numel()
        _check(
            self._library.dct_exact_threshold(grad.data_ptr(), code, _pointer(residual), numel, k, byref(tau))
        )
        return tau.value

    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        self._repack(values, out, exponents, seed, packing=True)

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        self._repack(out, packed, exponents, 0, packing=False)

    def _repack(
        self, wide: Tensor, packed: Tensor, exponents: Tensor | None, seed: int, *, packing: bool
    ) -> None:
        check_pack(wide, packed, exponents)
        _on_cpu(wide=wide, packed=packed, exponents=exponents)
        pointers = wide.data_ptr(), packed.data_ptr(), _pointer(exponents)
        numel, grouped = wide.numel(), exponents is not None
        call = (*pointers, numel, seed & 0xFFFFFFFF, grouped, packing, self._threads_for(numel))
        _check(self._library.dct_pack(*call))

    def encode_changes(self, wanted: Tensor, held: Tensor, out: Tensor) -> Stats:
        check_changes(wanted, held, out)
        _on_cpu(wanted=wanted, held=held, out=out)
        began, sizes = time.perf_counter_ns(), (c_uint64 * 2)()
        pointers = wanted.data_ptr(), held.data_ptr(), wanted.numel(), out.data_ptr()
        _check(self._library.dct_encode_changes(*pointers, self._scratch(6 * wanted.numel()), sizes))
        elapsed = time.perf_counter_ns() - began
        return Stats(sizes[0], sizes[1], sizes[1], False, encode_ns=elapsed)

    def apply_changes(self, message: Tensor, outs: Sequence[Tensor]) -> None:
        check_vector("message", message, (torch.uint8,))
        for out in outs:
            check_vector("out", out, (torch.bfloat16, torch.float16))
            _on_cpu(message=message, out=out)
        targets = (c_void_p * len(outs))(*[out.data_ptr() for out in outs])
        sizes = (c_uint64 * len(outs))(*[out.numel() for out in outs])
        scratch = self._scratch(10 * max((out.numel() for out in outs), default=0))
        arguments = message.data_ptr(), message.numel(), targets, sizes, len(outs), scratch
        _check(self._library.dct_apply_changes(*arguments))

    def _scratch(self, nbytes: int) -> int:
        """Return the address of memory of this thread, which the next call may use again."""
        memory: Tensor | None = getattr(self._local, "scratch", None)
        if memory is None or memory.numel() < nbytes:
            memory = self._local.scratch = torch.empty(nbytes, dtype=torch.uint8)
        return memory.data_ptr()

    def embedding_kernels(self) -> CompiledEmbeddingKernels:
        return CompiledEmbeddingKernels(self.threads)

    def encode_indices(
        self, idx: Tensor, numel: int, encoding: int | None = None
    ) -> tuple[IndexEncoding, int, Tensor]:
        _on_cpu(idx=idx)
        check_positions(idx, numel, encoding)
        positions = idx.numpy().astype(np.uint32)
        plan = (c_int64 * 3)(-1 if encoding is None else encoding, 0, 0)
        arguments = (positions.ctypes.data, positions.size, numel, plan)
        _check(self._library.dct_encode_indices(*arguments, None))
        data = torch.empty(plan[2], dtype=torch.uint8)
        _check(self._library.dct_encode_indices(*arguments, data.data_ptr() or None))
        return IndexEncoding(plan[0]), plan[1], data

    def decode_indices(self, encoding: int, param: int, data: Tensor, nnz: int, numel: int) -> Tensor:
        _on_cpu(data=data)
        check_vector("data", data, (torch.uint8,))
        enc = check_section(encoding, param, data.numel(), nnz, numel)
        if enc is IndexEncoding.SHARED_MASK:
            raise PayloadError(NO_POSITIONS)
        positions = np.empty(nnz, dtype=np.uint32)
        arguments = (data.data_ptr() or None, data.numel(), nnz, numel)
        _check(self._library.dct_decode_indices(enc, param, *arguments, positions.ctypes.data))
        return torch.from_numpy(positions.astype(np.int64))
