"""``dct.model_parallel``: activations between ranks that hold parts of the model, and their gradients."""

from __future__ import annotations

from typing import Annotated, ClassVar

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


class ActivationConfig(Section):
    """Compression of the activations that ranks exchange, and of their gradients."""

    section_path = "dct.model_parallel"

    #: Whether receivers must know the size of a message in advance.
    fixed_size: ClassVar[bool] = False

    forward: TensorForward = NoMethod()
    """Method that compresses activations.

    One of the [methods](#methods): `transform` between pipeline stages
    ([comparison](model-parallel.md#compressor-classes),
    [quality](quality.md#compressor-classes-for-activations)).
    """
    backward: TensorBackward | None = None
    """Method for the gradients of these activations. null is the method of `forward`; with `threshold`
    gradients return at the forward positions, in the type of `{"method": "answer", ...}`.

    If gradients need other bits; [not with threshold](quality.md#one-direction-alone).
    """
    warmup_steps: int = Field(default=0, ge=0)
    """First optimizer steps that use the framework's own transfer.

    20 with `transform`; more if the loss still falls fast.
    """
    evaluation: bool = True
    """Also compress in forward-only passes. false evaluates the dense model.

    `false` to compare. A model that was trained with compression is best used with it.
    """

    @model_validator(mode="after")
    def _answers_fit(self) -> ActivationConfig:
        if isinstance(self.backward, AnswerMethod) and not isinstance(self.forward, ThresholdMethod):
            raise conflict(
                f"backward = 'answer' does not go with forward = '{self.forward.label()}', whose "
                "messages cannot be answered; leave backward out"
            )
        return self

    @property
    def answer(self) -> AnswerMethod:
        """The method of the answers to the forward messages."""
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
    """Boundaries between stages that are compressed; 0 is behind the first stage, null is all.

    The first boundaries are the most sensitive: `[1, 2]` leaves the first of three dense.
    """
    boundary_sparsity: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        default=(), strict=False, json_schema_extra={"allowed": "a list of numbers in [0, 1)"}
    )
    """Sparsity of each boundary in order, in place of `forward.sparsity`; the last value is for the
    boundary from the last stage to the first in interleaved schedules.

    0 for boundaries on fast links.
    """

    @model_validator(mode="after")
    def _boundaries_are_sparse(self) -> PipelineConfig:
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
    """With sequence parallelism, also compress the inputs of column-parallel layers, at more loss of
    quality than the partial sums of row-parallel layers.

    If tensor parallelism crosses a slow network; compare the loss.
    """
    skip_first_layers: int = Field(default=0, ge=0)
    """First transformer layers that stay dense.

    1 or 2 if quality falls: they are the most sensitive.
    """
    skip_last_layers: int = Field(default=0, ge=0)
    """Last transformer layers that stay dense.

    If quality falls.
    """


class ExpertsConfig(ActivationConfig):
    """Tokens that go to experts on other ranks, the results, and their gradients."""

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
    """Also compress the gradients of expert-parallel layers, as `data_parallel` says.

    If these gradients send most of the bytes; compare the loss.
    """
