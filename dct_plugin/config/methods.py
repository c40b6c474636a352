"""Methods that compress activations: one small section each, chosen by the key ``"method"``.

Each has a class of the same purpose in :mod:`dct_plugin.model_parallel.compressors`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .section import Variant, written_short

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
#: Methods with messages whose size both ends know.
_Known = ThresholdMethod | QuantiseMethod | TransformMethod

#: Methods between tensor-parallel ranks.
TensorForward = Annotated[_Known | BoundMethod | NoMethod, _CHOSEN, _SHORT]
TensorBackward = Annotated[AnswerMethod | _Known | BoundMethod | NoMethod, _CHOSEN, _SHORT]
#: Methods between pipeline stages, where a receiver knows the size of a message in advance: no bound.
PipelineForward = Annotated[_Known | NoMethod, _CHOSEN, _SHORT]
PipelineBackward = Annotated[AnswerMethod | _Known | NoMethod, _CHOSEN, _SHORT]
#: Methods for tokens on their way to experts.
ExpertsForward = Annotated[ThresholdMethod | QuantiseMethod | BoundMethod | NoMethod, _CHOSEN, _SHORT]
ExpertsBackward = Annotated[
    AnswerMethod | ThresholdMethod | QuantiseMethod | BoundMethod | NoMethod, _CHOSEN, _SHORT
]
