"""The messages with which gradients come back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...compression.stream import Encoded
from .compressor import ActivationCompressor


class GradientMessages:
    """The messages with gradients of one stream: a compressor writes them without regard to the forward
    messages.

    Attributes:
        size_is_known: True if :meth:`nbytes` is exact, given what an end kept.
    """

    def __init__(self, compressor: ActivationCompressor[Any]) -> None:
        self.compressor = compressor
        self.size_is_known = compressor.exact

    def nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        """Return the most bytes of a message; with what an end ``kept``, those of the answer to that."""
        return self.compressor.nbytes(shape, dtype)

    def encode(self, gradient: Tensor, kept: Any) -> tuple[Tensor, Encoded]:
        """Write the gradient of a tensor that was decoded, uint8; ``kept`` is what decoding it returned."""
        written = self.compressor.encode([gradient])
        return written.messages[0], written.encoded

    def decode(self, message: Tensor, kept: Any, out: Tensor, peer: int = 0) -> None:
        """Add the gradient of a tensor that was encoded to ``out``; ``kept`` is what encoding it returned.

        Raises:
            PayloadError: The message is malformed.
        """
        self.compressor.decode(message, out, peer)

    def pull_back(self, gradient: Tensor, kept: Any) -> Tensor:
        """Return the gradient of a tensor that this end encoded and decoded; nothing is rounded."""
        return gradient
