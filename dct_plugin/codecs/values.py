"""Value section of a payload: fp32, bf16, fp16, or int8 with one scale per 256 values.

Rounding is to nearest, ties to even; what a type cannot hold is clamped to its largest finite value. Plain
torch, any device; the compiled kernels write the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import Tensor

from ..errors import PayloadError

INT8_GROUP = 256
FLOAT32_MAX = torch.finfo(torch.float32).max


class ValueDtype(IntEnum):
    """Value type as written in the header."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    INT8 = 3

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def itemsize(self) -> int:
        """Bytes per value, without the scales of int8."""
        return VALUE_CODECS[self].itemsize

    @classmethod
    def parse(cls, value: int | str) -> ValueDtype:
        """The member for a name (``"bf16"``) or a number; ``ValueError`` names the allowed ones."""
        try:
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError):
            allowed = ", ".join(m.label for m in cls)
            raise ValueError(f"value dtype {value!r} is unknown; allowed: {allowed}") from None

    @classmethod
    def lossless(cls, dtype: torch.dtype) -> ValueDtype:
        """The type that holds what the kernels read of a ``dtype`` tensor: fp32, bf16 and fp16 as they are,
        fp32 for all others (fp64), which are rounded to it first.
        """
        return _LOSSLESS.get(dtype, cls.FP32)


class _ValueCodec(ABC):
    """One way of writing values.

    Attributes:
        itemsize: bytes per value.
        limit: magnitudes are clamped to it before rounding.
    """

    def __init__(self, itemsize: int, limit: float) -> None:
        self.itemsize = itemsize
        self.limit = limit

    def nbytes(self, nnz: int) -> int:
        return nnz * self.itemsize

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Section, uint8, and decoded values, fp32 [nnz], of ``x``, fp32 [nnz] within the limit."""

    @abstractmethod
    def decode(self, data: Tensor, nnz: int) -> Tensor:
        """Values, fp32 [nnz], of a section of the right size that starts aligned."""


class _Float(_ValueCodec):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype.itemsize, torch.finfo(dtype).max)
        self.dtype = dtype

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stored = x.to(self.dtype)
        return stored.contiguous().view(torch.uint8), stored.to(torch.float32)

    def decode(self, data: Tensor, nnz: int) -> Tensor:
        values = data.view(self.dtype).to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise PayloadError("value section holds a non-finite value")
        return values


class _ScaledInt8(_ValueCodec):
    """fp32 scales of all groups, then one byte per value."""

    def __init__(self) -> None:
        super().__init__(1, 2.0**127)  # below fp32's maximum, so that 127 * fl(max / 127) is finite

    def nbytes(self, nnz: int) -> int:
        return nnz + 4 * (-(-nnz // INT8_GROUP))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.numel()
        groups = -(-n // INT8_GROUP)
        padded = torch.zeros(groups * INT8_GROUP, dtype=torch.float32, device=x.device)
        padded[:n] = x
        table = padded.view(groups, INT8_GROUP)
        # A tensor as divisor: CUDA divides by a Python number by multiplying with its rounded reciprocal.
        divisor = torch.full((), 127.0, device=x.device)
        scale = table.abs().amax(dim=1) / divisor if groups else torch.empty(0, device=x.device)
        q = torch.round(table / scale.unsqueeze(1))
        # A zero scale divides by zero; a subnormal one may have been rounded so far that the quotient passes
        # 127. Adding 0 turns -0 into the +0 a receiver gets.
        q = torch.where(scale.unsqueeze(1) > 0, q, torch.zeros_like(q)).clamp(-127, 127) + 0.0
        decoded = (q * scale.unsqueeze(1)).reshape(-1)[:n]
        data = torch.cat([scale.view(torch.uint8), q.reshape(-1)[:n].to(torch.int8).view(torch.uint8)])
        return data, decoded

    def decode(self, data: Tensor, nnz: int) -> Tensor:
        groups = -(-nnz // INT8_GROUP)
        scale = data[: 4 * groups].view(torch.float32)
        q = data[4 * groups :].view(torch.int8)
        if not bool((torch.isfinite(scale * 127.0) & (scale >= 0)).all()):
            raise PayloadError("int8 value section holds a negative or non-finite scale")
        if bool((q == -128).any()):
            raise PayloadError("int8 value section holds -128, which no encoder writes")
        return q.to(torch.float32) * scale.repeat_interleave(INT8_GROUP)[:nnz]


_FLOATS = {
    ValueDtype.FP32: torch.float32,
    ValueDtype.BF16: torch.bfloat16,
    ValueDtype.FP16: torch.float16,
}
_LOSSLESS = {dtype: member for member, dtype in _FLOATS.items()}
#: Every value type's codec.
VALUE_CODECS: Mapping[ValueDtype, _ValueCodec] = {
    **{member: _Float(dtype) for member, dtype in _FLOATS.items()},
    ValueDtype.INT8: _ScaledInt8(),
}
if list(VALUE_CODECS) != list(ValueDtype):  # pragma: no cover
    raise ImportError(f"value codecs are {list(VALUE_CODECS)}; expected one for each of {list(ValueDtype)}")


def value_nbytes(nnz: int, dtype: int) -> int:
    """Bytes of the value section of ``nnz`` values."""
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
    return codec.decode(data.clone(), nnz)  # views of a wider dtype need an aligned start
