"""Everything, in the tensor's own type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...codecs.values import ValueDtype
from ...compression.stream import Encoded, wire_dtype
from ...config.methods import Method
from .compressor import Written
from .payloads import PayloadCompressor


class Whole(PayloadCompressor[Method]):
    """All entries cross, in warm-up steps and if nothing is to be left out; finite ones arrive bitwise."""

    # A message that holds a non-finite entry is shorter than others: ``exact`` stays False.

    def value_type(self, dtype: torch.dtype) -> ValueDtype:
        return wire_dtype(dtype, dense=True)

    def _tau(self, encoded: Encoded, flats: Sequence[Tensor]) -> float:
        return 0.0

    def encode(self, parts: Sequence[Tensor]) -> Written:
        messages, encoded = self._write(parts)
        return Written(messages, [None] * len(messages), encoded)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> None:
        self._add(message, out)
