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
    """Everything crosses, by the host's own transfer."""

    in_words = "dense"

    method: Literal["none"] = "none"

    @property
    def compresses(self) -> bool:
        return False


class ThresholdMethod(Method):
    """Entries that reach a threshold cross."""

    in_words = "sparsity {sparsity:g}"

    method: Literal["threshold"] = "threshold"
    sparsity: float = Field(ge=0, lt=1)
    """Share of the entries that do not cross; 0 leaves the host's own transfer in place.

    0.5 to 0.9; transformers rarely stand more than 0.9 (see [quality](quality.md)).
    """
    value_dtype: KeptType = "auto"
    """Type of the kept values on the wire; auto is fp16 for fp16 tensors, else bf16.

    `fp32` to see whether rounding matters, `int8`, `int4` for fewer bytes.
    """

    @property
    def density(self) -> float:
        return 1.0 - self.sparsity

    @property
    def compresses(self) -> bool:
        return self.sparsity > 0


class QuantiseMethod(Method):
    """All entries cross in few bits."""

    in_words = "{method}, {bits} bits"

    method: Literal["quantise"] = "quantise"
    bits: Bits = 8
    """Bits of a value; 16 is bf16, 1 a sign. One scale serves a group of values.

    4 where 8 are too many bytes; 16 is lossless for bf16 tensors.
    """


class BoundMethod(Method):
    """All entries cross within a bound of the error."""

    in_words = "bound, error {error_bound:g}"

    method: Literal["bound"] = "bound"
    error_bound: float = Field(gt=0)
    """Largest error of an entry, as a multiple of the root mean square of the message's values.

    0.02 to 0.1: as close as 8 bits, in fewer bytes.
    """


class TransformMethod(Method):
    """Coordinates in the principal directions cross, in as many bits as each earns."""

    in_words = "transform, {rate:g} bits per entry"

    method: Literal["transform"] = "transform"
    rate: float = Field(default=1.42, gt=0, le=8)
    """Bits per entry, on average over directions.

    1.42 is 20 times fewer bytes than fp32, 10 times fewer than bf16.
    """


class AnswerMethod(Method):
    """Gradients come back at the positions of a thresholded forward message."""

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
