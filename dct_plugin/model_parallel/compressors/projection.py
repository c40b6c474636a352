"""The base class of compressors that project the rows of a tensor to a few directions."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...codecs.quantised import Quantiser
from ...config.methods import ProjectionMethod
from ...stream import Encoded
from .compressor import QuantisedAnswers, add, size_of_rows

#: The code of a basis that crosses: 8 bits an entry, with a scale for as many entries.
BASIS = Quantiser(bits=8, group=64)

Projected = TypeVar("Projected", bound=ProjectionMethod)


class Projection(QuantisedAnswers[Projected]):
    """Rows [rows, hidden] cross as codes [rows, rank], and so do their gradients.

    Codes are written a direction after the other, so that a scale serves rows of one direction.
    """

    @abstractmethod
    def project(self, gradient: Tensor, received: Any) -> Tensor:
        """Return the gradient of the codes that were ``received``, fp32 [rows, rank]."""

    @abstractmethod
    def expand(self, codes: Tensor, kept: Any) -> Tensor:
        """Return the gradient of the rows that were sent, fp32 [rows, hidden], from that of their codes."""

    def answer_nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        return self.answer_quantiser().nbytes(self.count(shape))

    def encode_answer(self, gradient: Tensor, kept: Any) -> tuple[Tensor, Encoded]:
        return self.answered(self.project(gradient, kept).t(), gradient)

    def decode_answer(self, message: Tensor, kept: Any, out: Tensor) -> None:
        add(out, self.expand(self.read_codes(self.answer_quantiser(), message, out.shape), kept))

    def pull_back(self, gradient: Tensor, kept: Any, received: Any) -> Tensor:
        pulled = self.expand(self.project(gradient, received), kept)
        return pulled.view(gradient.shape).to(gradient.dtype)

    def rank(self, rows: int, hidden: int) -> int:
        """Return the numbers per row."""
        return min(self.config.rank, hidden)

    def count(self, shape: torch.Size) -> int:
        """Return the numbers that cross of a tensor."""
        return size_of_rows(shape)[0] * self.rank(*size_of_rows(shape))

    def read_codes(self, quantiser: Quantiser, message: Tensor, shape: torch.Size) -> Tensor:
        """Return the codes of a tensor of ``shape``, fp32 [rows, rank]."""
        rows, hidden = size_of_rows(shape)
        return quantiser.decode(message, self.count(shape)).view(self.rank(rows, hidden), rows).t()


def random_basis(name: str, hidden: int, rank: int) -> Tensor:
    """Return an orthonormal basis, fp32 [hidden, rank], that depends on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.linalg.qr(torch.randn(hidden, rank, generator=generator))[0].contiguous()
