"""``dct.model_parallel``: activations between ranks that hold parts of the model, and their gradients.

The methods that compress activations are a small section each, chosen by the key ``"method"``. Each has a
class of the same purpose in :mod:`dct_plugin.model_parallel.compressors`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from .section import Section, Variant, conflict, written_short

KeptType = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "int2"]
Bits = Literal[16, 8, 4, 3, 2, 1]


class Method(Variant):
    """Base class of all methods."""

    selector = "method"
    section_path = "dct.model_parallel"

    #: What :attr:`summary` says, with settings in braces.
    in_words: ClassVar[str] = "{method}"

    @property
    def density(self) -> float:
        """Share of the entries that cross."""
        return 1.0

    @property
    def compresses(self) -> bool:
        """True if the method leaves anything out."""
        return True

    @property
    def summary(self) -> str:
        """The method and its strength in words."""
        return self.in_words.format(**dict(self))


class NoMethod(Method):
    """The framework transfers the tensor itself."""

    in_words = "dense"

    method: Literal["none"] = "none"

    @property
    def compresses(self) -> bool:
        return False


class ThresholdMethod(Method):
    """Only entries that reach a threshold are sent."""

    in_words = "sparsity {sparsity:g}"

    method: Literal["threshold"] = "threshold"
    sparsity: float = Field(ge=0, lt=1)
    """Share of the entries that are not sent; at 0 the framework transfers the tensor.

    0.5 to 0.9. Transformers lose [quality](quality.md#compressor-classes-for-activations) above.
    """
    value_dtype: KeptType = "auto"
    """Type of the sent values; auto is fp16 for fp16 tensors, else bf16.

    `int8`, `int4` for fewer bytes, `fp32` to see whether rounding matters.
    """

    @property
    def density(self) -> float:
        return 1.0 - self.sparsity

    @property
    def compresses(self) -> bool:
        return self.sparsity > 0


class QuantiseMethod(Method):
    """All entries are sent, rounded to a few bits."""

    in_words = "{method}, {bits} bits"

    method: Literal["quantise"] = "quantise"
    bits: Bits = 8
    """Bits of a value; 16 is bf16, 1 a sign. A group of values shares one scale.

    4 if 8 send too many bytes. 16 is lossless for bf16 tensors.
    """


class BoundMethod(Method):
    """All entries are sent, rounded within an error bound."""

    in_words = "bound, error {error_bound:g}"

    method: Literal["bound"] = "bound"
    error_bound: float = Field(gt=0)
    """Largest error of an entry, as a multiple of the root mean square of the message's values.

    0.02 to 0.1 is as accurate as 8 bits, in fewer bytes.
    """


class TransformMethod(Method):
    """Coordinates in the principal directions are sent, with more bits for directions of higher variance."""

    in_words = "transform, {rate:g} bits per entry"

    method: Literal["transform"] = "transform"
    rate: float = Field(default=1.42, gt=0, le=8)
    """Mean number of bits per entry.

    1.42 sends 20 times fewer bytes than fp32 and 10 times fewer than bf16; 4 loses nothing measurable.
    """


class AnswerMethod(Method):
    """Only gradients at the positions of a thresholded forward message are sent back."""

    method: Literal["answer"] = "answer"
    value_dtype: KeptType = "auto"
    """Type of these gradients; auto is fp16 for fp16 tensors, else bf16."""


_CHOSEN, _SHORT = Field(discriminator="method"), written_short("method")
_Entrywise = ThresholdMethod | QuantiseMethod
#: Methods with messages whose size both ends know.
_Known = _Entrywise | TransformMethod


class ActivationConfig(Section):
    """Compression of the activations that ranks exchange, and of their gradients."""

    section_path = "dct.model_parallel"

    #: Whether receivers must know the size of a message in advance.
    fixed_size: ClassVar[bool] = False

    forward: Annotated[_Known | BoundMethod | NoMethod, _CHOSEN, _SHORT] = NoMethod()
    """Method that compresses activations.

    One of the [methods](#methods): `transform` between pipeline stages
    ([comparison](model-parallel.md#compressor-classes),
    [quality](quality.md#compressor-classes-for-activations)).
    """
    backward: Annotated[AnswerMethod | _Known | BoundMethod | NoMethod, _CHOSEN, _SHORT] | None = None
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

    # A receiver knows the size of a message in advance: no bound.
    forward: Annotated[_Known | NoMethod, _CHOSEN, _SHORT] = NoMethod()
    backward: Annotated[AnswerMethod | _Known | NoMethod, _CHOSEN, _SHORT] | None = None
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

    forward: Annotated[_Entrywise | BoundMethod | NoMethod, _CHOSEN, _SHORT] = NoMethod()
    backward: Annotated[AnswerMethod | _Entrywise | BoundMethod | NoMethod, _CHOSEN, _SHORT] | None = None


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
