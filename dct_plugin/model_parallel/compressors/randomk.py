"""Entries at random positions, which cost no bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...codecs.quantised import uniform
from ...config.methods import RandomKMethod
from ...errors import PayloadError
from ...stream import Encoded
from ...thresholds import wanted
from .compressor import QuantisedAnswers

_SEED_NBYTES = 8


class RandomK(QuantisedAnswers[RandomKMethod]):
    """One entry of every run of equal length, at random (MCBench, Bian et al., MLSys 2024, without runs).

    The message holds the seed of the positions and the values, in ``bits`` each. Nothing is scaled up.
    Gradients come back as values at the positions.
    """

    @property
    def density(self) -> float:
        return self.config.density

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return _SEED_NBYTES + self.quantiser().nbytes(self._count(shape.numel()))

    def encode_one(self, part: Tensor) -> tuple[Tensor, Tensor]:
        seed = self.seed(part)
        index = self._positions(seed, part.numel())
        values = part.detach().reshape(-1)[index].to(torch.float32)
        data = self.quantiser().encode(values, seed + 1 if self.config.stochastic else None)
        return torch.cat([seed.view(1).view(torch.uint8), data]), index

    def decode(self, message: Tensor, out: Tensor, peer: int) -> Tensor:
        if message.numel() < _SEED_NBYTES:
            raise PayloadError(f"a message of {message.numel()} bytes holds no seed")
        index = self._positions(message[:_SEED_NBYTES].clone().view(torch.int64)[0], out.numel())
        values = self.quantiser().decode(message[_SEED_NBYTES:], index.numel())
        _add_at(out, index, values)
        return index

    def answer_nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Tensor | None = None) -> int:
        return self.answer_quantiser().nbytes(self._count(shape.numel()))

    def encode_answer(self, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Encoded]:
        values = gradient.detach().reshape(-1)[kept].to(torch.float32)
        return self.answered(values, gradient)

    def decode_answer(self, message: Tensor, kept: Tensor, out: Tensor) -> None:
        _add_at(out, kept, self.answer_quantiser().decode(message, kept.numel()))

    def pull_back(self, gradient: Tensor, kept: Tensor, received: Tensor) -> Tensor:
        pulled = torch.zeros_like(gradient)
        pulled.view(-1)[kept] = gradient.reshape(-1)[kept]
        return pulled

    def _count(self, numel: int) -> int:
        return wanted(self.density, numel) if numel else 0

    def _positions(self, seed: Tensor, numel: int) -> Tensor:
        """Return int64 [count], ascending: one position of each of as many runs."""
        count = self._count(numel)
        starts = torch.arange(count + 1, dtype=torch.int64, device=seed.device) * numel // max(count, 1)
        lengths = starts[1:] - starts[:-1]
        return starts[:-1] + (uniform(count, seed) * lengths).to(torch.int64).clamp_(max=lengths - 1)


def _add_at(out: Tensor, index: Tensor, values: Tensor) -> None:
    flat = out.view(-1)
    flat[index] = (flat[index].to(torch.float32) + values).to(flat.dtype)
