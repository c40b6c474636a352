"""The code of a linear auto-encoder that is trained with the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config.methods import LearnedMethod
from .compressor import Site, add, rows_of
from .projection import Projection, random_basis


class _Received(NamedTuple):
    peer: int
    code: Tensor
    """fp32 [rows, rank], as it arrived."""


class Learned(Projection[LearnedMethod]):
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
        return self.quantiser().nbytes(self.count(shape))

    def encode_one(self, part: Tensor) -> tuple[Tensor, Tensor | None]:
        encoder = self._weight("encoder", part.shape[-1], part.device)
        message = self.write((rows_of(part) @ encoder.value).t(), part)
        return message, part.detach() if self.site.training else None

    def decode(self, message: Tensor, out: Tensor, peer: int) -> _Received:
        decoder = self._weight(f"decoder {peer}", out.shape[-1], out.device)
        code = self.read_codes(self.quantiser(), message, out.shape)
        add(out, code @ decoder.value.t())
        return _Received(peer, code)

    def project(self, gradient: Tensor, received: _Received) -> Tensor:
        """Return the gradient of the code; that of the decoder is added to what it has."""
        rows = rows_of(gradient)
        decoder = self._weight(f"decoder {received.peer}", rows.shape[1], rows.device)
        decoder.gradient += rows.t() @ received.code
        return rows @ decoder.value

    def expand(self, codes: Tensor, kept: Tensor) -> Tensor:
        """Return the gradient of the rows; that of the encoder is added to what it has."""
        encoder = self._weight("encoder", kept.shape[-1], codes.device)
        encoder.gradient += rows_of(kept).t() @ codes
        return codes @ encoder.value.t()

    def observe_gradient(self, gradient: Tensor, received: _Received) -> None:
        self.project(gradient, received)

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

    def _weight(self, name: str, hidden: int, device: torch.device) -> _Weight:
        weight = self._weights.get(name)
        if weight is None:
            basis = random_basis(self.site.name, hidden, self.rank(0, hidden))
            weight = self._weights[name] = _Weight(basis)
        return weight.to(device)


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
