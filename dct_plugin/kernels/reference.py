"""Kernels in plain torch, for any device: they define the results of compiled ones, and are the fallback."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..codecs.changes import move
from ..codecs.copies import to_device
from ..codecs.payload import (
    HEADER_NBYTES,
    OVERFLOW_MAGNITUDE,
    Header,
    Payload,
    naming_message,
    open_payload,
    split_message,
    write_payload,
)
from ..codecs.splitmix import shift_right, signed, splitmix64
from ..codecs.stats import KERNEL_ERRORS, Stats
from ..codecs.values import FLOAT32_MAX, decode_values, encode_values
from ..errors import PayloadError
from .backend import PACK_BLOCK, PACK_EXPONENTS, Backend
from .job import SMALLEST_TAU, Job, Tau, applied_tau, check_vector

#: Entries that the reference packs at once: its temporaries take 40 bytes each.
_PACKED_AT_ONCE = 1 << 20
#: Largest magnitude that int8 with an exponent holds.
_PACK_LARGEST = 127 * 2.0 ** PACK_EXPONENTS[1]


def sample_positions(numel: int, num_samples: int, seed: int, device: torch.device) -> Tensor:
    """Return random positions with replacement, int64 [num_samples].

    SplitMix64 over a counter, its upper half scaled to ``numel``.
    """
    counter = torch.arange(1, num_samples + 1, dtype=torch.int64, device=device)
    return shift_right(shift_right(splitmix64(counter, signed(seed)), 32) * numel, 32)


def _mixed(counter: Tensor, seed: int) -> Tensor:
    """Return 32 random bits each, int64: the hash "lowbias32" (C. Wellons) of a counter (int64) plus a hashed
    seed.

    In 64 bits, of which a product's lower 32 are those of the 32-bit product.
    """

    def mixed(x: Tensor) -> Tensor:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return x ^ (x >> 16)

    start = mixed(torch.tensor(seed & 0xFFFFFFFF, dtype=torch.int64, device=counter.device))
    return mixed((counter + start) & 0xFFFFFFFF)


def _power(exponent: Tensor) -> Tensor:
    """Return ``2**exponent``, fp32, of int32 exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)


def rank_of(keep_fraction: float, count: int) -> int:
    """Return how many of ``count`` entries ``keep_fraction`` keeps: rounded half up, at least 1."""
    return max(1, min(count, int(keep_fraction * count + 0.5)))


def _kth_largest(grad: Tensor, residual: Tensor | None, k_of: Callable[[int], int]) -> float:
    """Return the ``k_of(number)``-th largest finite magnitude of ``grad + residual``."""
    magnitude = (grad.to(torch.float32) if residual is None else residual + grad).abs()
    finite = torch.isfinite(magnitude)
    if not bool(finite.all()):
        magnitude = magnitude[finite]
    count = magnitude.numel()
    if not count:
        return SMALLEST_TAU
    return max(float(torch.kthvalue(magnitude, count - k_of(count) + 1).values), SMALLEST_TAU)


def has_overflow(x: Tensor) -> bool:
    """Return whether an entry is non-finite or of magnitude >= 2**126 (one read pass, no temporary)."""
    if x.numel() == 0:
        return False
    low, high = torch.stack(torch.aminmax(x)).tolist()  # NaN propagates
    return not -OVERFLOW_MAGNITUDE < low <= high < OVERFLOW_MAGNITUDE


def overflow_flags(tensors: Sequence[Tensor]) -> Tensor:
    """Return :func:`has_overflow` of each, bool [tensors] on their device; the host does not wait for it."""
    where = tensors[0].device
    flags = torch.zeros(len(tensors), dtype=torch.bool, device=where)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        which = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype and tensor.numel()]
        if not which:
            continue
        if where.type == "cuda":  # a launch for many tensors; NaN propagates
            largest = torch.stack(torch._foreach_norm([tensors[i] for i in which], math.inf))
        else:  # where that takes twenty times longer
            ends = [torch.stack(torch.aminmax(tensors[i])) for i in which]
            largest = torch.stack(ends).abs().amax(1)
        at = to_device(torch.tensor(which, device="cpu"), where)
        flags[at] = ~(largest.to(torch.float32) < OVERFLOW_MAGNITUDE)
    return flags


class ReferenceBackend(Backend):
    """Plain torch kernels; see :class:`~dct_plugin.kernels.backend.Backend`."""

    name = "reference"

    def compress(self, job: Job) -> Stats:
        grad, residual, numel, tau = job.grad, job.residual, job.numel, applied_tau(job.tau)
        began = time.perf_counter_ns()
        if has_overflow(grad):
            if job.residual_out is not None:
                _keep_residual(residual, job.residual_out)
            if job.clear:
                grad.zero_()
            selected = time.perf_counter_ns()
            nbytes = write_payload(job.out, Header(job.value_dtype, True, numel, 0))
            return _stats(nbytes, 0, 0, True, tau, began, selected)

        acc = self._accumulate(grad, residual, job.residual_out)
        if job.dense:
            idx = None
            above = nnz = numel
            values = acc
        else:
            idx = (acc.abs() >= tau).nonzero().reshape(-1)
            above = idx.numel()
            idx = _limit(idx, job.capacity, job.start)
            nnz = idx.numel()
            values = acc[idx]
        # Only the residual can have made this infinite; FLT_MAX is sent then and the excess is lost.
        values = values.clamp(-FLOAT32_MAX, FLOAT32_MAX)
        selected = time.perf_counter_ns()

        body, decoded = encode_values(values, job.value_dtype)
        if job.residual_out is not None:
            left = values - decoded
            if idx is None:
                job.residual_out.copy_(left)
            else:
                job.residual_out[idx] = left
        index = body[:0] if idx is None else self.encode_indices(idx, numel)
        nbytes = write_payload(job.out, Header(job.value_dtype, False, numel, nnz), index, body)
        if job.clear:
            grad.zero_()
        return _stats(nbytes, nnz, above, False, tau, began, selected)

    def _accumulate(self, grad: Tensor, residual: Tensor | None, residual_out: Tensor | None) -> Tensor:
        """Return fp32(grad) + residual, in ``residual_out`` if there is one; else it must not be written."""
        if residual is not None:
            return torch.add(residual, grad, out=residual_out)
        return grad.to(torch.float32) if residual_out is None else residual_out.copy_(grad)

    def decode_add(self, payload: Payload | Tensor, out: Tensor) -> int:
        check_vector("out", out, (torch.float32,))
        opened = open_payload(payload, out.numel())
        if opened.nonfinite:
            out.fill_(float("nan"))
            return 0
        header = opened.header
        section = opened.data[HEADER_NBYTES + header.index_nbytes : header.nbytes]
        values = decode_values(section, header.nnz, header.value_dtype)
        if header.nnz == header.numel:
            out.add_(values)
        else:
            index = self.positions(opened, out.numel())
            out[index] = out[index] + values
        return opened.nnz

    def sum_messages(self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float = 1.0) -> None:
        split = [split_message(messages, which, outs) for which in range(len(messages))]
        for position, out in enumerate(outs):
            in_place = out.dtype == torch.float32
            total = out if in_place else torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
            for which, payloads in enumerate(split):
                with naming_message(which):
                    self.decode_add(payloads[position], total)
            if scale != 1.0:
                total.mul_(scale)
            if out.dtype == torch.int16:
                if len(split) > 1 or bool(total.isnan().any()):
                    raise PayloadError(KERNEL_ERRORS[2])
                move(out, total)
            elif not in_place:
                out.copy_(total)

    def sample_threshold(
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> float:
        if num_samples < grad.numel():
            where = sample_positions(grad.numel(), num_samples, seed, grad.device)
            grad = grad[where]
            residual = None if residual is None else residual[where]
        return _kth_largest(grad, residual, partial(rank_of, keep_fraction))

    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> float:
        return _kth_largest(grad, residual, partial(min, k))

    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        for lo in range(0, values.numel(), _PACKED_AT_ONCE):
            part = values[lo : lo + _PACKED_AT_ONCE].clamp(-_PACK_LARGEST, _PACK_LARGEST)
            random = _mixed(torch.arange(lo, lo + part.numel(), device=part.device), seed)
            if exponents is None:
                rounded = (part.view(torch.int32).to(torch.int64) + (random & 0xFFFF)) >> 16
                out[lo : lo + _PACKED_AT_ONCE] = rounded.to(torch.int16).view(torch.bfloat16)
                continue
            blocks = torch.nn.functional.pad(part, (0, -part.numel() % PACK_BLOCK)).view(-1, PACK_BLOCK)
            bits = blocks.abs().amax(1).view(torch.int32)
            exponent = (bits >> 23) - 133 + ((bits & 0x7FFFFF) > 0x7E0000).to(torch.int32)
            exponent.clamp_(min=PACK_EXPONENTS[0])
            # 2**15 steps to the unit: integers below 2**22.
            fixed = (blocks * _power(15 - exponent)[:, None]).round_().to(torch.int64)
            steps = (fixed.view(-1)[: part.numel()] + (random & 0x7FFF)) >> 15
            out[lo : lo + _PACKED_AT_ONCE] = steps.to(torch.int8)
            first = lo // PACK_BLOCK
            exponents[first : first + exponent.numel()] = exponent.to(torch.int8)

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        out.copy_(packed)
        if exponents is None:
            return
        steps = _power(exponents.to(torch.int32))
        whole = out.numel() // PACK_BLOCK * PACK_BLOCK
        out[:whole].view(-1, PACK_BLOCK).mul_(steps[: whole // PACK_BLOCK, None])
        out[whole:].mul_(steps[whole // PACK_BLOCK :])


def _keep_residual(residual: Tensor | None, residual_out: Tensor) -> None:
    if residual is None:
        residual_out.zero_()
    elif residual_out.data_ptr() != residual.data_ptr():
        residual_out.copy_(residual)


def _limit(idx: Tensor, capacity: int, start: int) -> Tensor:
    """Return at most ``capacity`` of the ascending ``idx``, from the first one >= start on and wrapping
    around.
    """
    if idx.numel() <= capacity:
        return idx
    return idx.roll(-int(torch.searchsorted(idx, start)))[:capacity].sort().values


def _stats(nbytes: int, nnz: int, above: int, nonfinite: bool, tau: Tau, began: int, selected: int) -> Stats:
    encode_ns = time.perf_counter_ns() - selected
    select_ns = selected - began
    return Stats(nbytes, nnz, above, nonfinite, tau=float(tau), ns=(select_ns, encode_ns))
