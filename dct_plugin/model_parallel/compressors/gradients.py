"""The messages with which gradients come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...compression.stream import Encoded
from .compressor import ActivationCompressor


class GradientMessages(ABC):
    """The messages with gradients of one stream."""

    @property
    @abstractmethod
    def size_is_known(self) -> bool:
        """True if :meth:`nbytes` is exact, given what an end kept."""

    @abstractmethod
    def nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        """Return the most bytes of a message; with what an end ``kept``, those of the answer to that."""

    @abstractmethod
    def encode(self, gradient: Tensor, kept: Any) -> tuple[Tensor, Encoded]:
        """Write the gradient of a tensor that was decoded, uint8; ``kept`` is what decoding it returned."""

    @abstractmethod
    def decode(self, message: Tensor, kept: Any, out: Tensor, peer: int = 0) -> None:
        """Add the gradient of a tensor that was encoded to ``out``; ``kept`` is what encoding it returned.

        Raises:
            PayloadError: The message is malformed.
        """

    def pull_back(self, gradient: Tensor, kept: Any) -> Tensor:
        """Return the gradient of a tensor that this end encoded and decoded; nothing is rounded."""
        return gradient


class OwnGradients(GradientMessages):
    """Gradients that a compressor writes without regard to the forward messages."""

    def __init__(self, compressor: ActivationCompressor[Any]) -> None:
        self._compressor = compressor

    @property
    def size_is_known(self) -> bool:
        return self._compressor.exact

    def nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        return self._compressor.nbytes(shape, dtype)

    def encode(self, gradient: Tensor, kept: Any) -> tuple[Tensor, Encoded]:
        written = self._compressor.encode([gradient])
        return written.messages[0], written.encoded

    def decode(self, message: Tensor, kept: Any, out: Tensor, peer: int = 0) -> None:
        self._compressor.decode(message, out, peer)
