"""``dct.model_parallel``: activations between ranks that hold parts of the model, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from .methods import (
    AnswerMethod,
    ExpertsBackward,
    ExpertsForward,
    Method,
    NoMethod,
    PipelineBackward,
    PipelineForward,
    TensorBackward,
    TensorForward,
    ThresholdMethod,
)
from .section import Section, conflict

if TYPE_CHECKING:
    from typing_extensions import Self


class ActivationConfig(Section):
    """How activations are compressed where they cross, and the gradients that come back."""

    section_path = "dct.model_parallel"

    #: Whether receivers must know the size of a message in advance.
    fixed_size: ClassVar[bool] = False

    forward: TensorForward = NoMethod()
    """How activations cross: one of the [methods](#methods).

    [Which one](model-parallel.md#compressor-classes); the cost is in
    [quality](quality.md#compressor-classes-for-activations).
    """
    backward: TensorBackward | None = None
    """How gradients come back. null takes the positions of the forward message with `threshold`, else the
    method of `forward`; `{"method": "answer", ...}` sets the type of values at these positions; any other
    method compresses gradients by themselves.

    Where gradients bear fewer bits than activations, or more; [not with
    threshold](quality.md#one-direction-alone).
    """
    warmup_steps: int = Field(default=0, ge=0)
    """First optimizer steps in which the host's own transfer is used.

    While losses still fall fast.
    """
    evaluation: bool = True
    """Compress in forward-only passes, too; false evaluates the dense model.

    `false` to see what the dense model would do; a model trained with compression is best used with it.
    """

    @model_validator(mode="after")
    def _answers_fit(self) -> Self:
        if isinstance(self.backward, AnswerMethod) and not isinstance(self.forward, ThresholdMethod):
            raise conflict(
                f"backward = 'answer' does not go with forward = '{self.forward.label()}', whose "
                "messages cannot be answered; leave backward out"
            )
        return self

    @property
    def answer(self) -> AnswerMethod:
        """How answers to the forward messages are written."""
        return self.backward if isinstance(self.backward, AnswerMethod) else AnswerMethod()

    @property
    def own_backward(self) -> Method | None:
        """The method that compresses gradients by themselves; None where they answer or go the way of
        ``forward``.
        """
        return None if isinstance(self.backward, AnswerMethod) else self.backward

    @property
    def compresses(self) -> bool:
        """True if anything is left out of what crosses forward or backward."""
        return self.forward.compresses or (self.own_backward is not None and self.own_backward.compresses)

    @property
    def summary(self) -> str:
        """Method and strength forward, and backward where that is another one, in words."""
        own = "" if self.own_backward is None else f", gradients {self.own_backward.summary}"
        return self.forward.summary + own


class PipelineConfig(ActivationConfig):
    """Activations and gradients between pipeline stages."""

    section_path = "dct.model_parallel.pipeline"
    fixed_size = True

    forward: PipelineForward = NoMethod()
    backward: PipelineBackward | None = None
    boundaries: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, strict=False, json_schema_extra={"allowed": "a list of integers >= 0 or null"}
    )
    """Boundaries at which anything is compressed: 0 is behind the first stage; null is all of them.

    The first boundaries are the most sensitive: `[1, 2]` spares the first of three.
    """
    boundary_sparsity: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        default=(), strict=False, json_schema_extra={"allowed": "a list of numbers in [0, 1)"}
    )
    """Sparsity of the first, second, ... boundary instead of `forward.sparsity`; the one from the last
    stage back to the first, of interleaved schedules, comes last.

    0 for boundaries on fast links, more where the slow network lies.
    """

    @model_validator(mode="after")
    def _boundaries_are_sparse(self) -> Self:
        if self.boundary_sparsity and not isinstance(self.forward, ThresholdMethod):
            raise conflict(
                f"boundary_sparsity needs a sparsity, and forward = '{self.forward.label()}' has none"
            )
        return self

    @property
    def compresses(self) -> bool:
        return super().compresses or any(self.boundary_sparsity)

    def at(self, boundary: int) -> PipelineConfig:
        """Return the section for the boundary behind stage ``boundary``, with that boundary's sparsity."""
        forward, backward = self.forward, self.backward
        if boundary < len(self.boundary_sparsity):
            forward = forward.model_copy(update={"sparsity": self.boundary_sparsity[boundary]})
        if self.boundaries is not None and boundary not in self.boundaries:
            forward, backward = NoMethod(), None
        return self.model_copy(update={"forward": forward, "backward": backward, "boundary_sparsity": ()})


class TensorConfig(ActivationConfig):
    """Partial sums and activations inside tensor-parallel layers."""

    section_path = "dct.model_parallel.tensor"

    gather: bool = False
    """With sequence parallelism, compress the inputs of column-parallel layers, too; that costs more
    quality than the partial sums of row-parallel ones.

    Only where tensor parallelism crosses a slow network and quality has been checked.
    """
    skip_first_layers: int = Field(default=0, ge=0)
    """First transformer layers that stay dense.

    First layers are the most sensitive: 1 or 2 where quality suffers.
    """
    skip_last_layers: int = Field(default=0, ge=0)
    """Last transformer layers that stay dense.

    Where quality suffers.
    """


class ExpertsConfig(ActivationConfig):
    """Tokens on their way to experts on other ranks and back, and their gradients."""

    section_path = "dct.model_parallel.experts"

    forward: ExpertsForward = NoMethod()
    backward: ExpertsBackward | None = None


class ModelParallelConfig(Section):
    """Activations between ranks that hold parts of the model, and their gradients."""

    section_path = "dct.model_parallel"

    pipeline: PipelineConfig = PipelineConfig()
    """Between pipeline stages."""
    tensor: TensorConfig = TensorConfig()
    """Inside tensor-parallel layers."""
    experts: ExpertsConfig = ExpertsConfig()
    """Between tokens and experts on other ranks."""
    expert_gradients: bool = False
    """Let data_parallel threshold the gradients of expert-parallel layers, too.

    Where expert gradients dominate the bytes and quality has been checked.
    """
