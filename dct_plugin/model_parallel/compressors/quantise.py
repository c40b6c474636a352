"""All entries, in few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ...codecs.quantised import Quantiser
from ...config.methods import QuantiseMethod
from .compressor import ActivationCompressor, add


class Quantised(ActivationCompressor[QuantiseMethod]):
    """:class:`~dct_plugin.codecs.quantised.Quantiser` of groups along the last dimension, rotated by option.

    Sources: MCBench (Bian et al., MLSys 2024); TAH-Quant (arXiv 2506.01352) for the rotation. Gradients pass
    straight through the rounding, and are quantised themselves.
    """

    def quantiser(self) -> Quantiser:
        """Return the code of the values."""
        return Quantiser(self.config.bits, self.site.group_size, self.config.rotate)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.quantiser().nbytes(shape.numel())

    def encode_one(self, part: Tensor) -> tuple[Tensor, None]:
        return self.quantiser().encode(part, self.seed(part) if self.config.stochastic else None), None

    def decode(self, message: Tensor, out: Tensor, peer: int) -> None:
        add(out, self.quantiser().decode(message, out.numel()))
