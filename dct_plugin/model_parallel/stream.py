"""One point of the model at which activations cross: dense steps, then a compressor each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import ActivationConfig, KernelConfig
from ..config.methods import NoMethod
from ..stream import Encoded
from .compressors import ActivationCompressor, AnsweringCompressor, Site, Written, create
from .compressors.compressor import GROUP_SIZE


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
        average: With the method learned: averages tensors over the model's replicas, in place.
    """

    def __init__(
        self,
        config: ActivationConfig,
        *,
        name: str = "activation",
        rank: int = 0,
        kernels: KernelConfig | None = None,
        average: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        self.config = config
        fixed_size = config.fixed_size
        self.site = Site(name, rank, kernels, average=average, fixed_size=fixed_size, answer=config.answer)
        self._gradient_site = Site(f"{name} gradient", rank, kernels, fixed_size=fixed_size)
        self._whole = create(NoMethod(), self.site)
        self._forward = create(config.forward, self.site)
        self._answers: AnsweringCompressor | None = None
        self._gradient = self._whole
        if config.own_backward is None and isinstance(self._forward, AnsweringCompressor):
            self._answers = self._forward
        else:
            self._gradient = create(config.own_backward or config.forward, self._gradient_site)

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

    def fit_groups(self, width: int) -> None:
        """Let groups of values that share a scale lie within rows of ``width`` values."""
        within = max(8, min(GROUP_SIZE, width & -width))  # a power of two that divides the width
        self.site.group_size = self._gradient_site.group_size = within

    @property
    def training(self) -> bool:
        """False in forward-only passes: what compressors remember is used and left as it is."""
        return self.site.training

    @training.setter
    def training(self, training: bool) -> None:
        self.site.training = training

    @property
    def density(self) -> float:
        """Share of the entries that is to cross forward in this step; 1 in warm-up steps."""
        return self._now(self._forward).density

    # -- forward ---------------------------------------------------------------------------------------------

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Most bytes of a message about a tensor."""
        return self._now(self._forward).nbytes(shape, dtype)

    def encode(self, parts: Sequence[Tensor]) -> Written:
        """One message for each tensor, all about the same point of the model in one pass over it."""
        return self._now(self._forward).encode(parts)

    def decode(self, message: Tensor, out: Tensor, peer: int = 0) -> Any:
        """Add what a message of rank ``peer`` holds to ``out``, contiguous; padding may follow.

        Returns:
            What this end keeps to answer with a gradient.

        Raises:
            PayloadError: The message is malformed, or of a tensor of another size.
        """
        return self._now(self._forward).decode(message, out, peer)

    # -- backward --------------------------------------------------------------------------------------------

    def gradient_nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        """Most bytes of a gradient's message; with what an end ``kept``, those of the answer to that."""
        if self._answering is not None:
            return self._answering.answer_nbytes(shape, dtype, kept)
        return self._now(self._gradient).nbytes(shape, dtype)

    @property
    def gradient_size_is_known(self) -> bool:
        """Whether :meth:`gradient_nbytes` is exact, given what an end kept."""
        return self._answering is not None or self._now(self._gradient).exact

    def encode_gradient(self, gradient: Tensor, kept: Any) -> tuple[Tensor, Encoded]:
        """The message, uint8, of the gradient of what was decoded; ``kept`` is of :meth:`decode`."""
        if self._answering is not None:
            return self._answering.encode_answer(gradient, kept)
        written = self._now(self._gradient).encode([gradient])
        return written.messages[0], written.encoded

    def decode_gradient(self, message: Tensor, kept: Any, out: Tensor, peer: int = 0) -> None:
        """Add the gradient of what was encoded to ``out``; ``kept`` is of :meth:`encode`.

        Raises:
            PayloadError: The message is malformed.
        """
        if self._answering is not None:
            self._answering.decode_answer(message, kept, out)
        else:
            self._now(self._gradient).decode(message, out, peer)

    def pull_back(self, gradient: Tensor, kept: Any, received: Any) -> Tensor:
        """The gradient of what this end encoded and decoded itself: nothing crosses, nothing is rounded."""
        if self._answering is not None:
            return self._answering.pull_back(gradient, kept, received)
        return gradient

    def learn(self, gradient: Tensor, received: Any) -> None:
        """:meth:`pull_back` is another rank's: take note of what this one ``received`` from it."""
        if self._answering is not None:
            self._answering.learn(gradient, received)

    # -- optimizer steps -------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """An optimizer step is complete: compressors may change what they remember."""
        self._forward.end_step()
        self._gradient.end_step()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Step counter, and what the compressors remember."""
        return {"step": self.step, **self._forward.state_dict(), "gradient": self._gradient.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` of the same settings."""
        self.step = state["step"]
        self._forward.load_state_dict(state)
        self._gradient.load_state_dict(state.get("gradient", {}))

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _warm(self) -> bool:
        """Whether the dense steps are over."""
        return self.step >= self.config.warmup_steps

    def _now(self, compressor: ActivationCompressor) -> ActivationCompressor:
        return compressor if self._warm else self._whole

    @property
    def _answering(self) -> AnsweringCompressor | None:
        return self._answers if self._warm else None
