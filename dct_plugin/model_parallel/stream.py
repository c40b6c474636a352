"""One point of the model at which activations cross: dense steps, then a compressor each way.

Gradients come back as answers to the forward messages, or by themselves.
"""

from __future__ import annotations

from typing import Any

from ..config import ActivationConfig, KernelConfig
from ..config.model_parallel import NoMethod
from ..console import logger
from .compressors import ActivationCompressor, Site, create
from .compressors.compressor import GROUP_SIZE, GradientMessages
from .compressors.threshold import Answers, Thresholded


class ActivationStream(Site):
    """Compressor of the activations that one place in the model sends, and of their gradients.

    Sender and receiver each make one, with the same section and name. Its state changes between optimizer
    steps only (:meth:`end_step`), because recomputed activations must give the same message.

    Args:
        config: Settings of the place.
        name: Name of the place, in messages and as a seed.
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
        super().__init__(name, rank, kernels, fixed_size=config.fixed_size, answer=config.answer)
        self.config = config
        self._whole = self._gradient = create(NoMethod(), self)
        self._forward = create(config.forward, self)
        self._gradient_messages: GradientMessages
        if config.own_backward is None and isinstance(self._forward, Thresholded):
            self._gradient_messages = Answers(self._forward)
        else:
            self._gradient = create(config.own_backward or config.forward, self, f"{name} gradient")
            self._gradient_messages = GradientMessages(self._gradient)

    def fit_groups(self, width: int) -> None:
        """Let groups of values that share a scale lie within rows of ``width`` values, a multiple of 8."""
        self.group_size = max(8, min(GROUP_SIZE, width & -width))  # a power of two that divides the width

    @property
    def activations(self) -> ActivationCompressor[Any]:
        """The compressor of activations in this step; in dense steps it sends every entry."""
        return self._whole if self._is_dense else self._forward

    @property
    def gradients(self) -> GradientMessages:
        """The messages of gradients in this step."""
        return GradientMessages(self._whole) if self._is_dense else self._gradient_messages

    @property
    def density(self) -> float:
        """Target share of the entries to send forward in this step; 1 in dense steps."""
        return self.activations.density

    def end_step(self) -> None:
        """Update the state of the compressors after an optimizer step."""
        self._forward.end_step()
        self._gradient.end_step()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter and the state of the compressors."""
        return {"step": self.step, **self._forward.state_dict(), "gradient": self._gradient.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. Compressors of another method than the saved ones start with a new
        state.
        """
        self.step = state["step"]
        for compressor, saved in ((self._forward, state), (self._gradient, state.get("gradient", {}))):
            if compressor.state_dict().keys() <= saved.keys():
                compressor.load_state_dict(saved)
            else:
                what = f"the saved state is not one of the method {compressor.config.label()!r}"
                logger.warning(f"{compressor.name}: {what}, which starts afresh")

    @property
    def _is_dense(self) -> bool:
        """True in the first ``warmup_steps``."""
        return self.step < self.config.warmup_steps
