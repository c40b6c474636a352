"""Value section of a payload: fp32, bf16, fp16, or int8 with one scale per 256 values.

Rounding is to nearest, ties to even; what a type cannot hold is clamped to its largest finite value. Plain
torch, any device; the compiled kernels write the same bytes.
"""

from __future__ import annotations

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

    @classmethod
    def parse(cls, value: int | str) -> ValueDtype:
        """The member for a name (``"bf16"``) or a number; ``ValueError`` names the allowed ones."""
        try:
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError):
            allowed = ", ".join(m.label for m in cls)
            raise ValueError(f"value dtype {value!r} is unknown; allowed: {allowed}") from None


# Magnitudes are clamped to this before rounding. int8: below fp32's maximum, so that 127 * fl(max / 127) is
# finite.
VALUE_LIMIT = {
    ValueDtype.FP32: FLOAT32_MAX,
    ValueDtype.BF16: torch.finfo(torch.bfloat16).max,
    ValueDtype.FP16: torch.finfo(torch.float16).max,
    ValueDtype.INT8: 2.0**127,
}
_TORCH_DTYPE = {
    ValueDtype.FP32: torch.float32,
    ValueDtype.BF16: torch.bfloat16,
    ValueDtype.FP16: torch.float16,
}


def value_nbytes(nnz: int, dtype: int) -> int:
    """Bytes of the value section of ``nnz`` values."""
    if dtype == ValueDtype.INT8:
        return nnz + 4 * (-(-nnz // INT8_GROUP))
    return nnz * (4 if dtype == ValueDtype.FP32 else 2)


def encode_values(values: Tensor, dtype: int) -> tuple[Tensor, Tensor]:
    """Encode fp32 ``values`` [nnz].

    Returns:
        the value section, uint8 [value_nbytes], and what a receiver will decode from it, fp32 [nnz].
    """
    vt = ValueDtype(dtype)
    limit = VALUE_LIMIT[vt]
    x = values.clamp(-limit, limit)
    if vt is not ValueDtype.INT8:
        stored = x.to(_TORCH_DTYPE[vt])
        return stored.contiguous().view(torch.uint8), stored.to(torch.float32)
    n = x.numel()
    groups = -(-n // INT8_GROUP)
    padded = torch.zeros(groups * INT8_GROUP, dtype=torch.float32, device=x.device)
    padded[:n] = x
    table = padded.view(groups, INT8_GROUP)
    # A tensor as divisor: CUDA divides by a Python number by multiplying with its rounded reciprocal.
    divisor = torch.full((), 127.0, device=x.device)
    scale = table.abs().amax(dim=1) / divisor if groups else torch.empty(0, device=x.device)
    q = torch.round(table / scale.unsqueeze(1))
    # A zero scale divides by zero; a subnormal one may have been rounded so far that the quotient passes 127.
    # Adding 0 turns -0 into the +0 a receiver gets.
    q = torch.where(scale.unsqueeze(1) > 0, q, torch.zeros_like(q)).clamp(-127, 127) + 0.0
    decoded = (q * scale.unsqueeze(1)).reshape(-1)[:n]
    data = torch.cat([scale.view(torch.uint8), q.reshape(-1)[:n].to(torch.int8).view(torch.uint8)])
    return data, decoded


def decode_values(data: Tensor, nnz: int, dtype: int) -> Tensor:
    """Decode a value section, uint8 [value_nbytes(nnz, dtype)], into fp32 [nnz].

    Raises:
        PayloadError: wrong length, or a value (or scale) that is not finite or not one the encoder writes.
    """
    vt = ValueDtype(dtype)
    if data.numel() != value_nbytes(nnz, vt):
        raise PayloadError(
            f"value section has {data.numel()} bytes, {nnz} {vt.label} values need {value_nbytes(nnz, vt)}"
        )
    data = data.clone()  # views of a wider dtype need an aligned start
    if vt is not ValueDtype.INT8:
        values = data.view(_TORCH_DTYPE[vt]).to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise PayloadError("value section holds a non-finite value")
        return values
    groups = -(-nnz // INT8_GROUP)
    scale = data[: 4 * groups].view(torch.float32)
    q = data[4 * groups :].view(torch.int8)
    if not bool((torch.isfinite(scale * 127.0) & (scale >= 0)).all()):
        raise PayloadError("int8 value section holds a negative or non-finite scale")
    if bool((q == -128).any()):
        raise PayloadError("int8 value section holds -128, which no encoder writes")
    return q.to(torch.float32) * scale.repeat_interleave(INT8_GROUP)[:nnz]
