"""Compiled CPU kernels (csrc/dct_kernels.c) through ctypes, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_uint64
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..codecs.changes import BANDS, changes_bound
from ..codecs.index import check_positions, check_section, index_form
from ..codecs.message import Key, MessageWriter
from ..codecs.payload import Payload, naming_message, open_payload, split_message, verify_checksum
from ..codecs.stats import Stats
from .backend import Backend, scales_first
from .displacement import Displacement, Scratch, Squares, fresh, terms_of
from .job import GRAD_CODES, GRAD_DTYPES, OUT_CODES, Job, PartedJob, applied_tau, check_vector, check_vectors
from .library import WRONG_HEADER, Library, check, fields, passed

ENTRIES_PER_THREAD = 1 << 20  # a thread is worth starting for this many entries
#: Instruction sets that the library has branches for on this architecture, from the least to the most.
ISA_NAMES = (
    ("portable", "neon") if platform.machine() in ("aarch64", "arm64") else ("portable", "avx2", "avx512")
)
_MAX_THREADS = 64


class _Compress(ctypes.Structure):
    _fields_ = [
        *fields("P", "grad residual left out"),
        *fields("Q", "numel capacity start"),
        *fields("f", "tau"),
        *fields("i", "grad_dtype value_dtype dense threads clear nonfinite"),
        *fields("Q", "nbytes nnz above select_ns encode_ns"),
    ]


class _Message(ctypes.Structure):
    _fields_ = [*fields("P", "data"), *fields("Q", "nbytes")]


class _Target(ctypes.Structure):
    _fields_ = [*fields("P", "out"), *fields("Q", "numel"), *fields("i", "dtype")]


_SIGNATURES = {
    "dct_isa": "i",
    "dct_compress": "Pi",
    "dct_decode_add": "PP",
    "dct_positions": "PP",
    "dct_sum_messages": "PiPifPP",
    "dct_encode_indices": "PQQP",
    "dct_decode_indices": "PQQP",
    "dct_sample_threshold": "PiPQdQQP",
    "dct_exact_threshold": "PiPQQP",
    "dct_pack": "PPPQIiii",
    "dct_encode_changes": "PPQPQPP",
    "dct_add_squares": "PiPPQQi",
    "dct_displace": "PPiPPPQQQfffi",
}


#: Capacity, start, threshold, type of the values, and whether zeros are left.
_Numbers: TypeAlias = tuple[int, int, float, int, bool]


def _threads_for(threads: int | None, numel: int) -> int:
    """Return the threads of a call for so many entries; ``threads``: see :class:`CpuBackend`."""
    if threads is None:
        most = numel // ENTRIES_PER_THREAD
        threads = min(torch.get_num_threads(), most) if most > 1 else 1
    return max(1, min(threads, _MAX_THREADS))


def _stats(call: _Compress) -> Stats:
    """Return the statistics of a compression that was made."""
    ns = call.select_ns, call.encode_ns
    return Stats(call.nbytes, call.nnz, call.above, bool(call.nonfinite), tau=call.tau, ns=ns)


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

    codes_entropy = True

    def __init__(self, threads: int | None = None) -> None:
        self._library = Library(_SIGNATURES)
        self._call, self.path = self._library.call, self._library.path
        self.threads = threads
        self._local = threading.local()

    @property
    def isa(self) -> str:
        return ISA_NAMES[self._library.status("dct_isa", -1)]

    def set_isa(self, name: str) -> str:
        """Ask for an instruction set, process-wide (tests, benchmarks); return the one used from now on."""
        return ISA_NAMES[self._library.status("dct_isa", ISA_NAMES.index(name))]

    def compress(self, job: Job) -> Stats:
        numbers = job.capacity, job.start, float(applied_tau(job.tau)), job.value_dtype, job.clear
        return _stats(self._compress(job.grad, job.residual, job.residual_out, job.out, numbers))

    def _compress(
        self, grad: Tensor, residual: Tensor | None, left: Tensor | None, out: Tensor, numbers: _Numbers
    ) -> _Compress:
        """Compress vectors that were checked. Every call counts here: a model has hundreds of tensors."""
        if not grad.is_cpu:
            passed(grad)  # raises
        numel, (capacity, start, tau, value_dtype, clear) = grad.numel(), numbers
        threads = _threads_for(self.threads, numel)
        call = _Compress(
            *(grad.data_ptr(), residual.data_ptr() if residual is not None else None),
            *(left.data_ptr() if left is not None else None, out.data_ptr(), numel, capacity, start, tau),
            *(GRAD_CODES[grad.dtype], value_dtype, tau == 0.0, threads, clear),
        )
        if status := self._library.functions.dct_compress(byref(call), 1):
            check(status)
        return call

    def compress_parts(self, job: PartedJob, writer: MessageWriter, receivers: Key) -> list[Stats]:
        check_vector("grad", job.grad, GRAD_DTYPES)
        tau = 0.0 if job.dense else float(applied_tau(job.tau))
        left = job.residual if job.residual_out is None else job.residual_out
        if len(receivers) == 1:
            parts, numel = job.parts, job.grad.numel()
            most = numel if tau == 0.0 else min(parts.capacities[0], numel)
            out = writer.reserve(parts.nbytes[0], receivers[0])
            numbers = most, job.turn % max(numel, 1), tau, parts.value_dtype, job.clear
            call = self._compress(job.grad, job.residual, left, out, numbers)
            writer.advance(call.nbytes, receivers[0])
            return [_stats(call)]
        if len(set(receivers)) < len(receivers):  # two parts of a message need the size of the first
            return super().compress_parts(job, writer, receivers)
        start, numel, most = job.parts.numbers.T
        calls = np.zeros(len(numel), np.dtype(_Compress))
        for name, tensor in (("grad", job.grad), ("residual", job.residual), ("left", left)):
            if tensor is not None:
                calls[name] = passed(tensor) + start * tensor.element_size()
        reserved = zip(job.parts.nbytes, receivers, strict=True)
        calls["out"] = [writer.reserve(nbytes, receiver).data_ptr() for nbytes, receiver in reserved]
        calls["numel"], calls["capacity"] = numel, numel if tau == 0.0 else np.minimum(most, numel)
        calls["start"], calls["tau"] = job.turn % np.maximum(numel, 1), tau
        calls["grad_dtype"], calls["value_dtype"] = GRAD_CODES[job.grad.dtype], job.parts.value_dtype
        calls["dense"], calls["clear"] = tau == 0.0, job.clear
        calls["threads"] = [_threads_for(self.threads, each) for each in numel.tolist()]
        self._call("dct_compress", calls, len(calls))
        sizes = calls["nbytes"].tolist()
        for receiver, nbytes in zip(receivers, sizes, strict=True):
            writer.advance(nbytes, receiver)
        names = ("nbytes", "nnz", "above", "nonfinite", "select_ns", "encode_ns")
        nbytes, nnz, above, flagged, *ns = (int(calls[name].sum()) for name in names)
        tau = float(calls["tau"][0])
        return [Stats(nbytes, nnz, above, flagged > 0, tau=tau, ns=(ns[0], ns[1]), sizes=sizes)]

    def decode_add(self, payload: Payload | Tensor, out: Tensor) -> int:
        check_vector("out", out, (torch.float32,))
        opened = open_payload(payload, out.numel(), verify=False)
        if opened.nonfinite:
            verify_checksum(opened.header, opened.data)
            out.fill_(float("nan"))
            return 0
        self._call("dct_decode_add", opened, out)
        return opened.nnz

    def sum_messages(self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float = 1.0) -> None:
        check_vectors("out", outs, tuple(OUT_CODES))
        check_vectors("message", messages, (torch.uint8,))
        for tensor in (*outs, *messages):
            if not tensor.is_cpu:
                passed(tensor)  # raises
        which = c_int32()
        in_place = scales_first(len(messages), scale)
        unrounded = (torch.int16, torch.float32) if in_place else (torch.int16,)
        apart = [out.numel() for out in outs if out.dtype not in unrounded]
        scratch = self._memory(max(apart), torch.float32) if apart else None
        arrived = (_Message * len(messages))(*[_Message(m.data_ptr(), m.numel()) for m in messages])
        targets = (_Target * len(outs))(*[_Target(o.data_ptr(), o.numel(), OUT_CODES[o.dtype]) for o in outs])
        status = self._library.status(
            "dct_sum_messages", arrived, len(messages), targets, len(outs), scale, scratch, byref(which)
        )
        if status == WRONG_HEADER:
            split_message(messages, which.value, outs)  # tells what is wrong
        if status:
            with naming_message(which.value):
                check(status)

    def _memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory of this thread: zeros, which the kernels put back, or bytes to overwrite."""
        kept: dict[Any, Tensor] = self._local.__dict__
        if dtype not in kept or kept[dtype].numel() < numel:
            kept[dtype] = torch.zeros(numel, dtype=dtype, device="cpu")
        return kept[dtype]

    def positions(self, payload: Payload | Tensor, numel: int) -> Tensor:
        opened = open_payload(payload, numel, verify=False)
        found = np.empty(opened.nnz, dtype=np.uint32)
        self._call("dct_positions", opened, found)
        return torch.from_numpy(found.astype(np.int64))

    def sample_threshold(
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> float:
        tau, wanted = c_float(), (keep_fraction, num_samples, seed & (2**64 - 1))
        entries = grad, GRAD_CODES[grad.dtype], residual, grad.numel()
        self._call("dct_sample_threshold", *entries, *wanted, byref(tau))
        return tau.value

    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> float:
        tau, entries = c_float(), (grad, GRAD_CODES[grad.dtype], residual, grad.numel())
        self._call("dct_exact_threshold", *entries, k, byref(tau))
        return tau.value

    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        numbers = values.numel(), seed & 0xFFFFFFFF, exponents is not None, True
        self._call("dct_pack", values, out, exponents, *numbers, _threads_for(self.threads, values.numel()))

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        numbers = out.numel(), 0, exponents is not None, False
        self._call("dct_pack", out, packed, exponents, *numbers, _threads_for(self.threads, out.numel()))

    def add_squares(self, jobs: Sequence[Squares], scratch: Scratch = fresh) -> None:
        for job in jobs:
            if (gradient := job.gradient).dtype not in GRAD_CODES or job.entries is not None:
                super().add_squares([job], scratch)
                continue
            numel, width = gradient.numel(), job.columns.numel()
            columns, width = (None, numel) if width == 1 else (job.columns, width)
            sizes = job.rows.numel(), width, _threads_for(self.threads, numel)
            self._call("dct_add_squares", gradient, GRAD_CODES[gradient.dtype], job.rows, columns, *sizes)

    def displace(self, jobs: Sequence[Displacement], scratch: Scratch = fresh) -> None:
        for job in jobs:
            weight, residual, moment = job.weight, job.residual, job.moment
            if weight.dtype not in GRAD_CODES or residual is None or job.pending is not None:
                super().displace([job], scratch)
                continue
            numel, factors, roots, eps = weight.numel(), None, None, 0.0
            columns, first = 1, 0
            if moment is not None:
                factors, roots, eps = terms_of(moment, numel)
                columns, first = moment.columns.numel(), moment.first
            tensors = weight, job.out, GRAD_CODES[weight.dtype], residual, factors, roots
            numbers = eps, job.limit, job.scale, _threads_for(self.threads, numel)
            self._call("dct_displace", *tensors, numel, columns, first, *numbers)

    def encode_changes(self, wanted: Tensor, held: Tensor, writer: MessageWriter) -> list[Stats]:
        began, sizes, numel = time.perf_counter_ns(), (c_uint64 * (len(BANDS) + 2))(), wanted.numel()
        out, scratch = writer.reserve(changes_bound(numel)), self._memory(14 * numel, torch.uint8)
        self._call("dct_encode_changes", wanted, held, numel, out, out.numel(), scratch, sizes)
        *nbytes, sent, changed = sizes
        writer.advance(sum(nbytes))
        elapsed = time.perf_counter_ns() - began
        return [Stats(sum(nbytes), sent, changed, False, ns=(0, elapsed), sizes=nbytes)]

    def encode_indices(self, idx: Tensor, numel: int) -> Tensor:
        check_positions(idx, numel)
        positions = idx.numpy().astype(np.uint32)
        data = torch.empty(index_form(positions.size, numel).nbytes, dtype=torch.uint8, device="cpu")
        self._call("dct_encode_indices", positions, positions.size, numel, data)
        return data

    def decode_indices(self, data: Tensor, nnz: int, numel: int) -> Tensor:
        check_vector("data", data, (torch.uint8,))
        check_section(data, nnz, numel)
        positions = np.empty(nnz, dtype=np.uint32)
        self._call("dct_decode_indices", data, nnz, numel, positions)
        return torch.from_numpy(positions.astype(np.int64))
