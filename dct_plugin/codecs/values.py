"""Value section of a payload: fp32, bf16, fp16, int8 with one scale per 256 values, 4 and 2 bits with two, or
4 bits on a logarithmic scale with one byte per 32, or signs with the mean magnitude of 256 values.

Rounding is to nearest, ties to even; what a type cannot hold is clamped to its largest finite value. Plain
torch, any device; the compiled kernels write the same bytes.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import PayloadError
from .quantised import pack, unpack

VALUE_GROUP = 256
"""Values that share scales, of int8, int4 and int2 alike."""
FLOAT32_MAX = torch.finfo(torch.float32).max


class ValueDtype(IntEnum):
    """Value type as written in the header."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    INT8 = 3
    INT4 = 4
    INT2 = 5
    LOG4 = 6
    SIGN = 7

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def bits(self) -> int:
        """Bits per value, without scales."""
        return VALUE_CODECS[self].bits

    @classmethod
    def parse(cls, value: int | str) -> ValueDtype:
        """Return the member for a name (``"bf16"``) or a number; ``ValueError`` names the allowed ones."""
        try:
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError):
            allowed = ", ".join(m.label for m in cls)
            raise ValueError(f"value dtype {value!r} is unknown; allowed: {allowed}") from None

    @classmethod
    @functools.lru_cache(maxsize=64)
    def lossless(cls, dtype: torch.dtype) -> ValueDtype:
        """Return the type that holds what the kernels read of a ``dtype`` tensor: fp32, bf16 and fp16 as they
        are, fp32 for all others (fp64), which are rounded to it first.
        """
        return _LOSSLESS.get(dtype, cls.FP32)


class _ValueCodec(ABC):
    """One way of writing values.

    Attributes:
        bits: per value.
        limit: magnitudes are clamped to it before rounding.
        scales: bytes of scales per group of values.
    """

    def __init__(self, bits: int, limit: float, scales: int = 0) -> None:
        self.bits, self.limit, self.scales = bits, limit, scales

    def nbytes(self, nnz: int) -> int:
        return self.scales * -(-nnz // VALUE_GROUP) + -(-nnz * self.bits // 8)

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return section, uint8, and decoded values, fp32 [nnz], of ``x``, fp32 [nnz] within the limit."""

    @abstractmethod
    def decode(self, scales: Tensor, codes: Tensor, nnz: int) -> Tensor:
        """Return the values, fp32 [nnz], of both parts of a section, uint8, which start aligned."""


class _Float(_ValueCodec):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(8 * dtype.itemsize, torch.finfo(dtype).max)
        self.dtype = dtype

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stored = x.to(self.dtype)
        return stored.contiguous().view(torch.uint8), stored.to(torch.float32)

    def decode(self, scales: Tensor, codes: Tensor, nnz: int) -> Tensor:
        values = codes.view(self.dtype).to(torch.float32)
        _refuse(~torch.isfinite(values), "a non-finite value")
        return values


class _ScaledInt8(_ValueCodec):
    """fp32 scales of all groups, then one byte per value."""

    def __init__(self) -> None:
        super().__init__(8, 2.0**127, scales=4)  # below fp32's maximum, so that 127 * fl(max / 127) is finite

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.numel()
        table = _in_groups(x, 0.0)
        groups = table.shape[0]
        # A tensor as divisor: CUDA divides by a Python number by multiplying with its rounded reciprocal.
        divisor = torch.full((), 127.0, device=x.device)
        scale = (
            table.abs().amax(dim=1) / divisor
            if groups
            else torch.empty(0, device=x.device, dtype=torch.float32)
        )
        # A subnormal scale may have been rounded so far that the quotient passes 127. Adding 0 turns -0 into
        # the +0 a receiver gets.
        q = _whole_steps(table, scale.unsqueeze(1)).clamp(-127, 127) + 0.0
        decoded = (q * scale.unsqueeze(1)).reshape(-1)[:n]
        data = torch.cat([scale.view(torch.uint8), q.reshape(-1)[:n].to(torch.int8).view(torch.uint8)])
        return data, decoded

    def decode(self, scales: Tensor, codes: Tensor, nnz: int) -> Tensor:
        scale, q = scales.view(torch.float32), codes.view(torch.int8)
        _refuse(~torch.isfinite(scale * 127.0) | (scale < 0), "scales that no encoder writes")
        _refuse(q == -128, "-128, which no encoder of int8 writes")
        return q.to(torch.float32) * scale.repeat_interleave(VALUE_GROUP)[:nnz]


class _Levels(_ValueCodec):
    """A sign and a level per value; two bf16 numbers per group of 256 say where the lowest and the highest of
    the equally spaced levels lie.

    What passes a threshold has no small magnitudes, so levels begin at the smallest one and none is wasted
    on zero. 4 bits span all magnitudes. 2 bits have two levels, an eighth and half of the way up, which is
    where they serve an exponential tail of 256 values best (Lloyd, 1982: 0.6 and 2.6 mean excesses, where
    the largest has about 5.5).
    """

    def __init__(self, bits: int, lowest: float, highest: float) -> None:
        super().__init__(bits, 2.0**127, scales=4)
        self._share = lowest, highest
        self._levels = 2 ** (bits - 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.numel()
        magnitude = _in_groups(x.abs(), float("nan"))
        low = magnitude.nan_to_num(nan=float("inf")).amin(dim=1) if n else magnitude[:, 0]
        high = magnitude.nan_to_num(nan=0.0).amax(dim=1) if n else low
        ends = torch.stack([low + (high - low) * share for share in self._share], dim=1).to(torch.bfloat16)
        start, step = self._scale(ends, x)
        level = _whole_steps(magnitude - start, step).clamp(0, self._levels - 1)
        negative = _in_groups(x, 0.0) < 0
        code = torch.where(negative, level + self._levels, level).nan_to_num(nan=0.0)
        decoded = torch.where(negative, -(start + level * step), start + level * step).reshape(-1)[:n]
        return torch.cat([ends.view(torch.uint8).reshape(-1), _packed(code, n, self.bits)]), decoded

    def decode(self, scales: Tensor, codes: Tensor, nnz: int) -> Tensor:
        ends = scales.view(torch.bfloat16).view(-1, 2)
        low, high = ends.float().unbind(dim=1)
        _refuse(~torch.isfinite(ends).all(dim=1) | (low < 0) | (high < low), "scales that no encoder writes")
        code = _unpacked(codes, nnz, self.bits)
        start, step = (t.expand(-1, VALUE_GROUP).reshape(-1)[:nnz] for t in self._scale(ends, codes))
        value = start + (code % self._levels).to(torch.float32) * step
        return torch.where(code >= self._levels, -value, value)

    def _scale(self, ends: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest level and the distance of levels, fp32 [groups, 1] each."""
        low, high = ends.to(torch.float32).split(1, dim=1)
        return low, (high - low) / torch.full((), self._levels - 1.0, device=like.device)


class _LogLevels(_ValueCodec):
    """Zero, or a sign and one of the powers 0 to 6 of ``2 ** -0.75``; the largest magnitude of 32 values, in
    a byte, is the factor.

    It is for all entries of a gradient, which span orders of magnitude that equal steps do not resolve.
    Rounding is to the nearest level.

    A factor is rounded to the nearest number of three mantissa bits; rounding up has 6 % more squared error.
    For 1,024 values there are first the exponent of the largest factor, then the factors: the number of steps
    above the one that is 254 steps, a factor of some ``2 ** 31``, below the largest possible one.
    """

    def __init__(self) -> None:
        super().__init__(4, 2.0**127)
        levels = torch.tensor(
            [0.0, *(2.0 ** (-0.75 * k) for k in range(6, -1, -1))], dtype=torch.float32, device="cpu"
        )
        self._levels, self._middles = levels, ((levels[1:].double() + levels[:-1]) / 2).float()

    def nbytes(self, nnz: int) -> int:
        return -(-nnz // 1024) + -(-nnz // 32) + -(-nnz // 2)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = _in_groups(x, 0.0, 32)
        magnitude = table.abs()
        rounded = _in_groups((magnitude.amax(dim=1).view(torch.int32) + 0x80000) >> 20, 0, 32)
        exponent = rounded.amax(dim=1, keepdim=True) >> 3
        steps = torch.cat([exponent, (rounded - 8 * exponent + 247).clamp(min=0)], dim=1).to(torch.uint8)
        factor, level = self._factors(steps)[: len(table), None], torch.zeros_like(table, dtype=torch.int64)
        for middle in self._middles.tolist():
            level += magnitude > factor * middle
        code = torch.where((table < 0) & (level > 0), level + 8, level)
        decoded = self._decoded(code, factor).view(-1)[: x.numel()]
        return torch.cat([steps.view(-1)[: len(table) + len(steps)], _packed(code, x.numel(), 4)]), decoded

    def decode(self, scales: Tensor, codes: Tensor, nnz: int) -> Tensor:
        steps = _in_groups(scales, 0, 33)
        _refuse(steps == 255, "scales that no encoder writes")
        code = _unpacked(codes, nnz, 4)
        _refuse(code == 8, "a negative zero, which no encoder writes")
        return self._decoded(code.to(torch.int64), self._factors(steps).repeat_interleave(32)[:nnz])

    @staticmethod
    def _factors(steps: Tensor) -> Tensor:
        """Return the factors, fp32 [32 * groups], of the bytes of all groups, uint8 [groups, 33]."""
        exponent, step = steps.to(torch.int32).split((1, 32), dim=1)
        return ((step + 8 * exponent - 247).clamp(min=0) << 20).view(torch.float32).view(-1)

    def _decoded(self, code: Tensor, factor: Tensor) -> Tensor:
        value = self._levels.to(code.device)[code % 8] * factor
        return torch.where(code >= 8, -value, value)


class _Sign(_ValueCodec):
    """A sign per value, and the mean magnitude (fp32) of each group of 256.

    Magnitudes are added as whole 32767ths of the largest one, so every order of addition has the same sum.
    """

    def __init__(self) -> None:
        super().__init__(1, 2.0**127, scales=4)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, table = x.numel(), _in_groups(x, 0.0)
        whole = torch.full((), 32767.0, device=x.device)
        step = table.abs().amax(dim=1) / whole if n else table[:, 0]
        parts = _whole_steps(table.abs(), step.unsqueeze(1)).clamp(max=32767.0)
        scale = parts.sum(dim=1) / _in_groups(torch.ones_like(x), 0.0).sum(dim=1) * step
        negative = (table < 0).view(-1)[:n]
        return torch.cat([scale.view(torch.uint8), _packed(negative, n, 1)]), self._decoded(negative, scale)

    def decode(self, scales: Tensor, codes: Tensor, nnz: int) -> Tensor:
        scale = scales.view(torch.float32)
        _refuse(~torch.isfinite(scale) | (scale < 0), "scales that no encoder writes")
        return self._decoded(_unpacked(codes, nnz, 1) > 0, scale)

    @staticmethod
    def _decoded(negative: Tensor, scale: Tensor) -> Tensor:
        magnitude = scale.repeat_interleave(VALUE_GROUP)[: negative.numel()]
        return torch.where(negative, -magnitude, magnitude)


def _refuse(wrong: Tensor, what: str) -> None:
    """Raise :class:`~dct_plugin.errors.PayloadError` if an entry is wrong."""
    if bool(wrong.any()):
        raise PayloadError(f"value section holds {what}")


def _whole_steps(x: Tensor, step: Tensor) -> Tensor:
    """Return how many steps ``x`` is, rounded; 0 where a step is 0, which divides by zero."""
    return torch.where(step > 0, torch.round(x / step), 0.0)


def _in_groups(x: Tensor, padding: float, group: int = VALUE_GROUP) -> Tensor:
    """Return ``x`` [n] as [groups, group]."""
    return functional.pad(x, (0, -x.numel() % group), value=padding).view(-1, group)


def _packed(code: Tensor, n: int, bits: int) -> Tensor:
    """Return the bytes of the first ``n`` codes of a table."""
    first = code.reshape(-1)[:n].to(torch.uint8)
    return pack(functional.pad(first, (0, -n % (8 // bits))), bits)


def _unpacked(data: Tensor, nnz: int, bits: int) -> Tensor:
    """Return ``nnz`` codes, uint8.

    Raises:
        PayloadError: Bits follow them.
    """
    code = unpack(data, bits)
    _refuse(code[nnz:] != 0, "trailing bits")
    return code[:nnz]


_FLOATS = {ValueDtype.FP32: torch.float32, ValueDtype.BF16: torch.bfloat16, ValueDtype.FP16: torch.float16}
_LOSSLESS = {dtype: member for member, dtype in _FLOATS.items()}
#: Every value type's codec.
VALUE_CODECS: Mapping[ValueDtype, _ValueCodec] = {
    **{member: _Float(dtype) for member, dtype in _FLOATS.items()},
    ValueDtype.INT8: _ScaledInt8(),
    ValueDtype.INT4: _Levels(4, 0.0, 1.0),
    ValueDtype.INT2: _Levels(2, 0.125, 0.5),
    ValueDtype.LOG4: _LogLevels(),
    ValueDtype.SIGN: _Sign(),
}


def value_nbytes(nnz: int, dtype: int) -> int:
    """Return the bytes of the value section of ``nnz`` values."""
    return VALUE_CODECS[ValueDtype(dtype)].nbytes(nnz)


def encode_values(values: Tensor, dtype: int) -> tuple[Tensor, Tensor]:
    """Encode fp32 ``values`` [nnz].

    Returns:
        the value section, uint8 [value_nbytes], and what a receiver will decode from it, fp32 [nnz].
    """
    codec = VALUE_CODECS[ValueDtype(dtype)]
    return codec.encode(values.clamp(-codec.limit, codec.limit))


def decode_values(data: Tensor, nnz: int, dtype: int) -> Tensor:
    """Decode a value section, uint8 [value_nbytes(nnz, dtype)], into fp32 [nnz].

    Raises:
        PayloadError: wrong length, or a value (or scale) that is not finite or not one the encoder writes.
    """
    vt = ValueDtype(dtype)
    codec = VALUE_CODECS[vt]
    if data.numel() != codec.nbytes(nnz):
        raise PayloadError(
            f"value section has {data.numel()} bytes, {nnz} {vt.label} values need {codec.nbytes(nnz)}"
        )
    codes = data.numel() - -(-nnz * codec.bits // 8)
    # Copies, since views of a wider dtype need an aligned start.
    return codec.decode(data[:codes].clone(), data[codes:].clone(), nnz)
