"""The arguments of one compression: what is compressed, and how the payload is written."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..codecs.index import MAX_NUMEL
from ..codecs.message import Key
from ..codecs.payload import payload_bound
from ..codecs.values import ValueDtype
from ..errors import DCTError

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The compiled kernels' numbers of these types.
GRAD_CODES = {dtype: code for code, dtype in enumerate(GRAD_DTYPES)}
#: The same of types that payloads are added to; int16 has the bits of 16-bit floats.
OUT_CODES = {**GRAD_CODES, torch.int16: 3}
SMALLEST_TAU = float(torch.finfo(torch.float32).tiny)  # smallest positive normal fp32
Tau: TypeAlias = float | Tensor
"""A threshold: on the host, or fp32 [] on the gradient's device."""


@dataclass(frozen=True, slots=True)
class Job:
    """One compression, see :meth:`.backend.Backend.compress`.

    All tensors are 1-D, contiguous and on one device. The arguments are checked and normalised when the job
    is made.

    Args:
        grad: fp32, bf16 or fp16 [numel]; left alone, unless ``clear``.
        residual: fp32 [numel], finite; None: no error feedback (zeros).
        tau: The threshold, > 0, may be inf; the number 0 sends every entry (dense, ``capacity`` ignored). A
            number is rounded to fp32. A tensor is not read: it is taken to be positive and raised to
            :data:`SMALLEST_TAU`.
        out: uint8, at least ``payload_bound(numel, capacity, value_dtype, dense=tau is 0)`` bytes.
        residual_out: fp32 [numel] that becomes the new residual: ``residual`` itself (default), or apart from
            it.
        capacity: The most entries that the payload may hold.
        start: The position from which on entries are kept if more than ``capacity`` pass the threshold.
        value_dtype: The type of the values in the payload.
        clear: Leave zeros in ``grad``, where the sum of all ranks can be added up then
            (:meth:`.backend.Backend.sum_messages`).

    Raises:
        ValueError, TypeError: Arguments do not fit each other.
    """

    grad: Tensor
    residual: Tensor | None
    tau: Tau
    out: Tensor
    residual_out: Tensor | None = None
    capacity: int = MAX_NUMEL
    start: int = 0
    value_dtype: ValueDtype = ValueDtype.FP32
    clear: bool = False

    def __post_init__(self) -> None:
        grad, residual, residual_out = self.grad, self.residual, self.residual_out
        numel = grad.numel()
        check_vector("grad", grad, GRAD_DTYPES)
        if residual is not None:
            check_vector("residual", residual, (torch.float32,), numel)
        if numel > MAX_NUMEL:
            raise ValueError(f"grad has {numel} entries, a payload holds at most {MAX_NUMEL}")
        if residual_out is None:
            residual_out = residual
        elif residual_out is not residual:
            check_vector("residual_out", residual_out, (torch.float32,), numel)
        tau = _check_tau(self.tau)
        value_dtype = ValueDtype.parse(self.value_dtype)
        if self.capacity < 0:
            raise ValueError(f"capacity is {self.capacity}; it must be at least 0")
        dense = _is_dense(tau)
        capacity = numel if dense else min(int(self.capacity), numel)
        check_vector("out", self.out, (torch.uint8,))
        needed = payload_bound(numel, capacity, value_dtype, dense=dense)
        if self.out.numel() < needed:
            raise ValueError(f"out has {self.out.numel()} bytes, this payload may need {needed}")
        device = grad.device
        for other in (residual, residual_out, self.out, tau):
            if isinstance(other, Tensor) and other.device != device:
                raise ValueError(f"grad is on {device}, another argument on {other.device}")
        assign = object.__setattr__
        assign(self, "residual_out", residual_out)
        assign(self, "tau", tau)
        assign(self, "capacity", capacity)
        assign(self, "start", int(self.start) % max(numel, 1))
        assign(self, "value_dtype", value_dtype)

    @property
    def numel(self) -> int:
        return self.grad.numel()

    @property
    def dense(self) -> bool:
        """True if every entry is sent."""
        return _is_dense(self.tau)


class Parts:
    """Parts of a tensor that become a payload each, with the room that those need.

    Args:
        bounds: First entry of each part, and the one behind it; together they cover the tensor once.
        capacities: The most entries that each payload may hold; all, where the threshold is 0.
        value_dtype: The type of the values in the payloads.
        dense: The threshold is 0.
    """

    def __init__(
        self,
        bounds: Sequence[tuple[int, int]],
        capacities: Sequence[int],
        value_dtype: ValueDtype,
        *,
        dense: bool = False,
    ) -> None:
        self.bounds, self.capacities, self.value_dtype, self.dense = bounds, capacities, value_dtype, dense
        sizes = [(stop - start, most) for (start, stop), most in zip(bounds, capacities, strict=True)]
        self.nbytes = Key([payload_bound(numel, most, value_dtype, dense=dense) for numel, most in sizes])
        """The most that each payload needs."""
        self.total, self.numel = sum(self.nbytes), sum([numel for numel, _ in sizes])

    @staticmethod
    @lru_cache(maxsize=4096)
    def whole(numel: int, capacity: int, value_dtype: ValueDtype) -> Parts:
        """Return one part, which is all of a tensor."""
        return Parts([(0, numel)], [capacity], value_dtype)

    @cached_property
    def aligned(self) -> bool:
        """True if each part begins at a multiple of 16 bytes, whatever the type, if the tensor does."""
        return not any(start % 8 for start, _ in self.bounds)

    @cached_property
    def numbers(self) -> np.ndarray:
        """int64 [parts, 3]: first entry, entries, and the most in the payload."""
        bounds = np.array(self.bounds, dtype=np.int64).reshape(-1, 2)
        return np.stack([bounds[:, 0], bounds[:, 1] - bounds[:, 0], np.array(self.capacities)], axis=1)


class Spans:
    """The parts of tensors that messages have payloads for.

    Args:
        of: By message, the tensor's number, the first entry, and the one behind the last, of each payload.

    Attributes:
        numbers: int64 [messages, most payloads of one, 3]: ``of``, with -1 behind the payloads of a message.
    """

    def __init__(self, of: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        self.of, self.numbers = of, np.full((len(of), max(map(len, of)), 3), -1)
        for row, payloads in zip(self.numbers, of, strict=True):
            row[: len(payloads)] = np.array(payloads).reshape(-1, 3)

    @staticmethod
    @lru_cache(maxsize=4096)
    def whole(numels: tuple[int, ...]) -> Spans:
        """Return the spans of messages that hold all of each tensor."""
        return Spans([[(which, 0, numel) for which, numel in enumerate(numels)]])


class PartedJob(NamedTuple):
    """The compressions of the parts of a tensor; see :class:`Job` for what is not said here.

    Args:
        turn: A number that changes from step to step: each part is filled from its position ``turn`` on,
            modulo its entries.
    """

    grad: Tensor
    residual: Tensor | None
    tau: Tau
    residual_out: Tensor | None
    parts: Parts
    turn: int = 0
    clear: bool = False

    @property
    def dense(self) -> bool:
        """True if every entry is sent.

        Raises:
            ValueError: The parts are for another kind of threshold.
        """
        dense = _is_dense(self.tau)
        if dense != self.parts.dense:
            kind = "all entries" if self.parts.dense else "entries that reach a threshold"
            raise ValueError(f"tau is {self.tau}, the parts are for {kind}")
        return dense

    def part(self, which: int, out: Tensor) -> Job:
        """Return the compression of a part."""
        start, stop = self.parts.bounds[which]
        residuals = self.residual, self.residual_out
        before, after = (None if each is None else part_of(each, start, stop) for each in residuals)
        grad, first = part_of(self.grad, start, stop), self.turn % max(stop - start, 1)
        filled = self.parts.capacities[which], first, self.parts.value_dtype
        return Job(grad, before, self.tau, out, after, *filled, clear=self.clear)


def part_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return ``tensor[start:stop]``; most often that is all of it, and making a view takes microseconds."""
    return tensor if start == 0 and stop == tensor.numel() else tensor[start:stop]


def _is_dense(tau: Tau) -> bool:
    """Return whether a threshold sends every entry; a tensor is not read."""
    return not isinstance(tau, Tensor) and tau == 0.0


def _check_tau(tau: Tau) -> Tau:
    """Return the threshold, a number rounded to fp32; a tensor is not read."""
    if isinstance(tau, Tensor):
        if tau.dtype != torch.float32 or tau.dim():
            raise ValueError(f"tau must be a number or fp32 [], got {tau.dtype} of shape {tuple(tau.shape)}")
        return tau
    if not tau >= 0:
        raise ValueError(f"tau is {tau}; it must be 0 (send everything) or positive")
    return max(ctypes.c_float(tau).value, SMALLEST_TAU) if tau else 0.0


def applied_tau(tau: Tau) -> Tau:
    """Return the threshold that entries are compared with."""
    tau = _check_tau(tau)
    return tau.clamp(min=SMALLEST_TAU) if isinstance(tau, Tensor) else tau


def refuse_capture(device: torch.device) -> None:
    """Refuse what a CUDA graph cannot replay: tables of addresses, and residuals whose buffers alternate.

    Raises:
        DCTError: The current stream is recorded.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise DCTError(
            "a CUDA graph records the current stream: compression cannot be recorded, since a replay would "
            "send the residual of the recording again; make the reduction outside of the graph"
        )


def check_vector(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None
) -> None:
    """Raise unless ``tensor`` is a contiguous vector of one of ``dtypes`` (and of ``numel`` entries)."""
    check_vectors(name, (tensor,), dtypes)
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} entries, expected {numel}")


def check_vectors(name: str, tensors: Iterable[Tensor], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless all ``tensors`` are contiguous vectors of one of ``dtypes``."""
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            allowed = ", ".join(str(d) for d in dtypes)
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {allowed}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous and 1-D, got shape {tuple(tensor.shape)}")
