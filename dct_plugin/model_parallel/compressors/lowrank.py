"""The projection of a tensor's rows to a few directions of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...codecs.quantised import Quantiser
from ...codecs.stats import Stats
from ...config.methods import LowRankMethod
from ...stream import Encoded
from .basis import BASIS, random_basis
from .compressor import AnsweringCompressor, RoundingCompressor, add, rows_of, size_of_rows


class LowRank(RoundingCompressor[LowRankMethod], AnsweringCompressor[LowRankMethod]):
    """Rows X [rows, hidden] cross as their coordinates X V and the orthonormal basis V [hidden, rank].

    V comes from one power iteration that starts at the basis of the step before (PowerSGD, Vogels et al.,
    NeurIPS 2019, algorithm 1, on activations as in MCBench). Gradients G come back as G V: the exact gradient
    of X V V' for a given V. Coordinates are written in ``bits``, a direction after the other, so that a scale
    serves rows of one direction.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._start: dict[int, Tensor] = {}  # by hidden: bases of the step before
        self._next: dict[int, Tensor] = {}

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return BASIS.nbytes(self._basis_size(shape)) + self.quantiser().nbytes(self._count(shape))

    def encode_one(self, part: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows_of(part)
        stored = BASIS.encode(self._basis(rows))
        basis = self._read_basis(stored, part.shape)
        return torch.cat([stored, self.write((rows @ basis).t(), part)]), basis

    def decode(self, message: Tensor, out: Tensor, peer: int) -> Tensor:
        basis = self._read_basis(message, out.shape)
        codes = message[BASIS.nbytes(self._basis_size(out.shape)) :]
        add(out, self._read_codes(self.quantiser(), codes, out.shape) @ basis.t())
        return basis

    def answer_nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        return self._answer_quantiser().nbytes(self._count(shape))

    def encode_answer(self, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Encoded]:
        given = self.site.answer.stochastic
        random = self.config.stochastic if given is None else given
        codes = (rows_of(gradient) @ kept).t()
        message = self._answer_quantiser().encode(codes, self.seed(gradient) if random else None)
        count = gradient.numel()
        return message, Encoded([Stats(message.numel(), count, count, False)], count, self.density)

    def decode_answer(self, message: Tensor, kept: Tensor, out: Tensor) -> None:
        add(out, self._read_codes(self._answer_quantiser(), message, out.shape) @ kept.t())

    def pull_back(self, gradient: Tensor, kept: Tensor) -> Tensor:
        return (rows_of(gradient) @ kept @ kept.t()).view(gradient.shape).to(gradient.dtype)

    def end_step(self) -> None:
        # A device is waited for here, once for all messages of the step.
        self._start |= {h: basis for h, basis in self._next.items() if bool(torch.isfinite(basis).all())}
        self._next = {}

    def state_dict(self) -> dict[str, Any]:
        return {"bases": {hidden: basis.cpu() for hidden, basis in self._start.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start, self._next = dict(state["bases"]), {}

    def _answer_quantiser(self) -> Quantiser:
        """Return the code of the values of an answer."""
        bits = self.site.answer.bits
        return Quantiser(self.config.bits if bits is None else bits, self.site.group_size)

    def _rank(self, rows: int, hidden: int) -> int:
        """Return the numbers per row."""
        return min(self.config.rank, rows, hidden)

    def _count(self, shape: torch.Size) -> int:
        """Return the numbers that cross of a tensor."""
        rows, hidden = size_of_rows(shape)
        return rows * self._rank(rows, hidden)

    def _read_codes(self, quantiser: Quantiser, message: Tensor, shape: torch.Size) -> Tensor:
        """Return the coordinates of a tensor of ``shape``, fp32 [rows, rank]."""
        rows, hidden = size_of_rows(shape)
        return quantiser.decode(message, self._count(shape)).view(self._rank(rows, hidden), rows).t()

    def _basis(self, rows: Tensor) -> Tensor:
        """Return an orthonormal basis [hidden, rank]; a finite first one starts the next step's."""
        count, hidden = rows.shape
        rank = self._rank(count, hidden)
        start = self._start.get(hidden)
        if start is None or start.shape[1] < rank:
            start = random_basis(self.site.name, hidden, min(self.config.rank, hidden))
        basis = torch.linalg.qr(rows.t() @ (rows @ start[:, :rank].to(rows.device)))[0]
        if self.site.training and hidden not in self._next:
            # Row-major as it is when it is loaded: products must not depend on the layout.
            self._next[hidden] = basis.contiguous()
        return basis

    def _basis_size(self, shape: torch.Size) -> int:
        """Return the entries of the basis of a tensor."""
        return shape[-1] * self._rank(*size_of_rows(shape))

    def _read_basis(self, message: Tensor, shape: torch.Size) -> Tensor:
        """Return the basis at the start of a message, as both ends use it."""
        size = self._basis_size(shape)
        return BASIS.decode(message, size).view(shape[-1], size // max(shape[-1], 1))
