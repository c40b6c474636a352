"""All entries, in few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ...codecs.quantised import Quantiser
from ...config.model_parallel import QuantiseMethod
from .compressor import ActivationCompressor, add


class Quantised(ActivationCompressor[QuantiseMethod]):
    """:class:`~dct_plugin.codecs.quantised.Quantiser` of groups along the last dimension.

    Source: MCBench (Bian et al., MLSys 2024). Gradients pass straight through the rounding, and are
    quantised themselves.
    """

    def quantiser(self) -> Quantiser:
        """Return the code of the values."""
        return Quantiser(self.config.bits, self.site.group_size)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.quantiser().nbytes(shape.numel())

    def encode_one(self, part: Tensor) -> tuple[Tensor, None]:
        return self.quantiser().encode(part), None

    def decode(self, message: Tensor, out: Tensor, peer: int) -> None:
        add(out, self.quantiser().decode(message, out.numel()))
