"""One point of the model at which activations cross: dense steps, then a compressor each way.

Gradients come back as answers to the forward messages, or by themselves.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..config import ActivationConfig, KernelConfig
from ..config.methods import NoMethod
from ..stream import Encoded
from .compressors import ActivationCompressor, Site, create
from .compressors.compressor import GROUP_SIZE
from .compressors.threshold import Thresholded

logger = logging.getLogger("dct_plugin")


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


class Answers(GradientMessages):
    """Gradients at the positions of the forward messages."""

    size_is_known = True

    def __init__(self, compressor: Thresholded) -> None:
        self._compressor = compressor

    def nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        return self._compressor.answer_nbytes(shape, dtype, kept)

    def encode(self, gradient: Tensor, kept: Any) -> tuple[Tensor, Encoded]:
        return self._compressor.encode_answer(gradient, kept)

    def decode(self, message: Tensor, kept: Any, out: Tensor, peer: int = 0) -> None:
        self._compressor.decode_answer(message, kept, out)

    def pull_back(self, gradient: Tensor, kept: Any) -> Tensor:
        return self._compressor.pull_back(gradient, kept)


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


class ActivationStream:
    """Compresses what crosses at one point of the model, step after step, and the gradients that come back.

    Either end has one, made of the same section and name; what one end encodes the other decodes. What
    compressors remember changes between optimizer steps only (:meth:`end_step`): activation recomputation
    runs a forward pass twice and must send the same again.

    Args:
        config: Settings of the point.
        name: Name of the point, in messages and as a seed.
        rank: Rank in the group, seeds what is random, too.
        kernels: Which kernels run; the defaults when None.
    """

    def __init__(
        self,
        config: ActivationConfig,
        *,
        name: str = "activation",
        rank: int = 0,
        kernels: KernelConfig | None = None,
    ) -> None:
        self.config = config
        fixed_size = config.fixed_size
        self.site = Site(name, rank, kernels, fixed_size=fixed_size, answer=config.answer)
        self._gradient_site = Site(f"{name} gradient", rank, kernels, fixed_size=fixed_size)
        self._whole = self._gradient = create(NoMethod(), self.site)
        self._forward = create(config.forward, self.site)
        self._gradient_messages: GradientMessages
        if config.own_backward is None and isinstance(self._forward, Thresholded):
            self._gradient_messages = Answers(self._forward)
        else:
            self._gradient = create(config.own_backward or config.forward, self._gradient_site)
            self._gradient_messages = OwnGradients(self._gradient)

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.site.step

    @step.setter
    def step(self, step: int) -> None:
        self.site.step = self._gradient_site.step = step

    @property
    def training(self) -> bool:
        """False in forward-only passes, which use what compressors remember and leave it as it is."""
        return self.site.training

    @training.setter
    def training(self, training: bool) -> None:
        self.site.training = training

    def fit_groups(self, width: int) -> None:
        """Let groups of values that share a scale lie within rows of ``width`` values."""
        within = max(8, min(GROUP_SIZE, width & -width))  # a power of two that divides the width
        self.site.group_size = self._gradient_site.group_size = within

    @property
    def activations(self) -> ActivationCompressor[Any]:
        """The compressor of activations in this step; in dense steps everything crosses."""
        return self._whole if self._is_dense else self._forward

    @property
    def gradients(self) -> GradientMessages:
        """The messages of gradients in this step."""
        return OwnGradients(self._whole) if self._is_dense else self._gradient_messages

    @property
    def density(self) -> float:
        """Share of the entries that is to cross forward in this step; 1 in dense steps."""
        return self.activations.density

    def end_step(self) -> None:
        """Let compressors change what they remember: an optimizer step is complete."""
        self._forward.end_step()
        self._gradient.end_step()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter and what the compressors remember."""
        return {"step": self.step, **self._forward.state_dict(), "gradient": self._gradient.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. Compressors of another method than the saved ones start afresh."""
        self.step = state["step"]
        for compressor, saved in ((self._forward, state), (self._gradient, state.get("gradient", {}))):
            if compressor.state_dict().keys() <= saved.keys():
                compressor.load_state_dict(saved)
            else:
                logger.warning(
                    "%s: the saved state is not one of the method %r, which starts afresh",
                    compressor.site.name,
                    compressor.config.label(),
                )

    @property
    def _is_dense(self) -> bool:
        """True in the first ``warmup_steps``."""
        return self.step < self.config.warmup_steps
