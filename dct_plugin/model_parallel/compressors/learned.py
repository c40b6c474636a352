"""The code of a linear auto-encoder that is trained with the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config.methods import LearnedMethod
from ...stream import Encoded
from .compressor import QuantisedAnswers, Site, Written, add, rows_of, size_of_rows
from .lowrank import random_basis


class _Received(NamedTuple):
    peer: int
    code: Tensor
    """fp32 [rows, rank], as it arrived."""


class Learned(QuantisedAnswers[LearnedMethod]):
    """Rows X [rows, hidden] cross as X E [rows, rank] and become X E D at the receiver.

    The sender has E [hidden, rank], the receiver a D [rank, hidden] for each sender; both begin as one
    orthonormal projection and follow the model's own loss (MCBench, Bian et al., MLSys 2024): the gradient of
    the code comes back, in few bits. Adam, with ``learning_rate``; a step with a non-finite gradient
    is left out. The sender keeps X until its gradient is there.
    """

    def __init__(self, config: Any, site: Site) -> None:
        super().__init__(config, site)
        self._weights: dict[str, _Weight] = {}

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.quantiser().nbytes(self._count(shape))

    def encode(self, parts: Sequence[Tensor]) -> Written:
        began = time.perf_counter()
        messages: list[Tensor] = []
        kept: list[Tensor | None] = []
        for part in parts:
            encoder = self._weight("encoder", part.shape[-1], part.device)
            seed = self.seed(part) if self.config.stochastic else None
            messages.append(self.quantiser().encode((rows_of(part) @ encoder.value).t(), seed))
            kept.append(part.detach() if self.site.training else None)
        return self.written(messages, kept, parts, began)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> _Received:
        decoder = self._weight(f"decoder {peer}", out.shape[-1], out.device)
        code = self._code(self.quantiser().decode(message, self._count(out.shape)), out.shape)
        add(out, code @ decoder.value.t())
        return _Received(peer, code)

    def answer_nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        return self.answers().nbytes(self._count(shape))

    def encode_answer(self, gradient: Tensor, kept: _Received) -> tuple[Tensor, Encoded]:
        return self.answered(self._through_decoder(gradient, kept).t(), gradient)

    def decode_answer(self, message: Tensor, kept: Tensor, out: Tensor) -> None:
        code = self._code(self.answers().decode(message, self._count(out.shape)), out.shape)
        add(out, self._through_encoder(code, kept))

    def pull_back(self, gradient: Tensor, kept: Tensor, received: _Received) -> Tensor:
        pulled = self._through_encoder(self._through_decoder(gradient, received), kept)
        return pulled.view(gradient.shape).to(gradient.dtype)

    def learn(self, gradient: Tensor, received: _Received) -> None:
        self._through_decoder(gradient, received)

    def end_step(self) -> None:
        names = sorted(self._weights)
        gradients = [self._weights[name].gradient for name in names]
        if self.site.average is not None and gradients:
            self.site.average(gradients)
        for name in names:
            self._weights[name].step(self.config.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": {name: weight.state_dict() for name, weight in self._weights.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights = {name: _Weight(**part) for name, part in state["weights"].items()}

    def _rank(self, hidden: int) -> int:
        return min(self.config.rank, hidden)

    def _count(self, shape: torch.Size) -> int:
        rows, hidden = size_of_rows(shape)
        return rows * self._rank(hidden)

    def _code(self, values: Tensor, shape: torch.Size) -> Tensor:
        """[rows, rank] of what crosses a direction after the other."""
        return values.view(self._rank(shape[-1]), size_of_rows(shape)[0]).t()

    def _weight(self, name: str, hidden: int, device: torch.device) -> _Weight:
        weight = self._weights.get(name)
        if weight is None:
            weight = self._weights[name] = _Weight(random_basis(self.site.name, hidden, self._rank(hidden)))
        return weight.to(device)

    def _through_decoder(self, gradient: Tensor, kept: _Received) -> Tensor:
        """Gradient of the code; the decoder's is added to what it has."""
        rows = rows_of(gradient)
        decoder = self._weight(f"decoder {kept.peer}", rows.shape[1], rows.device)
        decoder.gradient += rows.t() @ kept.code
        return rows @ decoder.value

    def _through_encoder(self, code: Tensor, kept: Tensor) -> Tensor:
        encoder = self._weight("encoder", kept.shape[-1], code.device)
        encoder.gradient += rows_of(kept).t() @ code
        return code @ encoder.value.t()


class _Weight:
    """E or the transpose of D, fp32 [hidden, rank], with Adam's moments (Kingma and Ba, ICLR 2015)."""

    def __init__(
        self,
        value: Tensor,
        first: Tensor | None = None,
        second: Tensor | None = None,
        steps: int = 0,
    ) -> None:
        self.value = value
        self.first = torch.zeros_like(value) if first is None else first.clone()
        self.second = torch.zeros_like(value) if second is None else second.clone()
        self.steps = steps
        self.gradient = torch.zeros_like(value)

    def to(self, device: torch.device) -> _Weight:
        if self.value.device != device:
            for name in ("value", "first", "second", "gradient"):
                setattr(self, name, getattr(self, name).to(device))
        return self

    def step(self, learning_rate: float) -> None:
        gradient, self.gradient = self.gradient, torch.zeros_like(self.value)
        if not bool(torch.isfinite(gradient).all()) or not bool(gradient.any()):
            return
        self.steps += 1
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient.square(), 0.001)
        scale = (1 - 0.999**self.steps) ** 0.5 / (1 - 0.9**self.steps)
        tiny = torch.finfo(torch.float32).tiny
        self.value = self.value - learning_rate * scale * self.first / (self.second.sqrt() + tiny)

    def state_dict(self) -> dict[str, Any]:
        moments = {name: getattr(self, name).cpu().clone() for name in ("value", "first", "second")}
        return {**moments, "steps": self.steps}
