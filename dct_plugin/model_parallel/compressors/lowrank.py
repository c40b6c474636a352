"""The projection of a tensor's rows to a few directions."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...codecs.quantised import Quantiser
from ...config.methods import LowRankMethod
from ...stream import Encoded
from .compressor import QuantisedAnswers, Written, add, rows_of, size_of_rows

#: The basis is rounded to this many bits, with a scale for as many entries.
BASIS = Quantiser(bits=8, group=64)


class _Factors(NamedTuple):
    codes: int
    """How many numbers cross beside the basis."""
    basis: int


class LowRank(QuantisedAnswers[LowRankMethod]):
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
        sizes = self._sizes(shape)
        return self.quantiser().nbytes(sizes.codes) + BASIS.nbytes(sizes.basis)

    def encode(self, parts: Sequence[Tensor]) -> Written:
        began = time.perf_counter()
        messages, kept = [], []
        for part in parts:
            rows = rows_of(part)
            stored = BASIS.encode(self._basis(rows))
            basis = self._read(stored, part.shape)
            seed = self.seed(part) if self.config.stochastic else None
            messages.append(torch.cat([stored, self.quantiser().encode((rows @ basis).t(), seed)]))
            kept.append(basis)
        return self.written(messages, kept, parts, began)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> Tensor:
        sizes = self._sizes(out.shape)
        basis = self._read(message, out.shape)
        codes = self.quantiser().decode(message[BASIS.nbytes(sizes.basis) :], sizes.codes)
        add(out, _columns(codes, out.shape, basis) @ basis.t())
        return basis

    def answer_nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Tensor | None = None) -> int:
        return self.answers().nbytes(self._sizes(shape).codes)

    def encode_answer(self, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Encoded]:
        return self.answered((rows_of(gradient) @ kept).t(), gradient)

    def decode_answer(self, message: Tensor, kept: Tensor, out: Tensor) -> None:
        codes = self.answers().decode(message, self._sizes(out.shape).codes)
        add(out, _columns(codes, out.shape, kept) @ kept.t())

    def pull_back(self, gradient: Tensor, kept: Tensor, received: Tensor) -> Tensor:
        pulled = rows_of(gradient) @ kept @ kept.t()
        return pulled.view(gradient.shape).to(gradient.dtype)

    def end_step(self) -> None:
        # A device is waited for here, once for all messages of the step.
        self._start |= {h: basis for h, basis in self._next.items() if bool(torch.isfinite(basis).all())}
        self._next = {}

    def state_dict(self) -> dict[str, Any]:
        return {"bases": {hidden: basis.cpu() for hidden, basis in self._start.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start, self._next = dict(state["bases"]), {}

    def _sizes(self, shape: torch.Size) -> _Factors:
        rows, hidden = size_of_rows(shape)
        rank = min(self.config.rank, rows, hidden)
        return _Factors(rows * rank, hidden * rank)

    def _basis(self, rows: Tensor) -> Tensor:
        """Orthonormal, [hidden, rank]; the first one of a step is where the next step's begin, if finite."""
        count, hidden = rows.shape
        rank = min(self.config.rank, count, hidden)
        start = self._start.get(hidden)
        if start is None or start.shape[1] < rank:
            start = random_basis(self.site.name, hidden, min(self.config.rank, hidden))
        basis = torch.linalg.qr(rows.t() @ (rows @ start[:, :rank].to(rows.device)))[0]
        if self.site.training and hidden not in self._next:
            # Row-major as it is when it is loaded: products must not depend on the layout.
            self._next[hidden] = basis.contiguous()
        return basis

    def _read(self, message: Tensor, shape: torch.Size) -> Tensor:
        """The basis at the start of a message, as both ends use it."""
        size = self._sizes(shape).basis
        return BASIS.decode(message, size).view(shape[-1], size // max(shape[-1], 1))


def _columns(codes: Tensor, shape: torch.Size, basis: Tensor) -> Tensor:
    """Coordinates, [rows, rank], of what crosses a direction after the other."""
    return codes.view(basis.shape[1], size_of_rows(shape)[0]).t()


def random_basis(name: str, hidden: int, rank: int) -> Tensor:
    """Orthonormal, fp32 [hidden, rank], by the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.linalg.qr(torch.randn(hidden, rank, generator=generator))[0].contiguous()
