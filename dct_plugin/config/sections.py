"""The models: frozen and strict.

An integer is fine where a number is wanted, but booleans and numeric strings are not numbers, and unknown
keys are errors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ..errors import ConfigError
from .options import options, show
from .validation_errors import validated

if TYPE_CHECKING:
    from typing_extensions import Self

SECTION = "dct"

# Upper limits of what has none of its own: beyond anything that makes sense, below what overflows somewhere.
_LARGEST = {int: 2**48, float: 1e30}

# Keys that tell a DeepSpeed JSON without a "dct" section from a file that is the section itself.
_DEEPSPEED_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "steps_per_print",
}  # fmt: skip


class Section(BaseModel):
    """Base of the sections: unknown keys and types of another kind are faults."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),  # pydantic up to 2.9 warns of every key that begins with "model_"
    )

    @field_validator("*")
    @classmethod
    def _within_reason(cls, value: Any) -> Any:
        numbers = value if isinstance(value, tuple) else (value,)
        if any(number > _LARGEST.get(type(number), number) for number in numbers if _is_number(number)):
            raise PydanticCustomError("dct_limit", "at most 2^48 (integers) or 1e30 (numbers)")
        if isinstance(value, str) and "\0" in value:
            raise PydanticCustomError("dct_limit", "without the character NUL")
        return value

    @classmethod
    def of(cls, values: Mapping[str, Any] | None = None, /, **keys: Any) -> Self:
        """A validated section; like the constructor, but faults are raised as :class:`ConfigError`."""
        return validated(cls, {**(values or {}), **keys}, _source_of(cls))

    @classmethod
    def read(cls, section: Mapping[str, Any], source: str, *, where: str | None = None) -> Self:
        """A section that stands at ``source`` in the file ``where``; faults are :class:`ConfigError`."""
        return validated(cls, section, source, where=where)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_band(band: tuple[float, float]) -> tuple[float, float]:
    if not 0 < band[0] < 1 < band[1]:
        raise ValueError("out of range")  # replaced by the field's own text
    return band


# Threshold options of gradients and activations alike; only their defaults differ.
_ThresholdSource = Annotated[
    Literal["sample", "exact"],
    Field(description="How tau is found: from random positions, or as the exact k-th largest magnitude."),
]
_Tracking = Annotated[bool, Field(description="Follow a small sample at every step between measurements.")]
_DensityBand = Annotated[
    tuple[float, float],
    Field(
        strict=False,
        description="Realised density, as multiples of the target, outside which tau is refreshed at once.",
        json_schema_extra={"allowed": "a pair [low, high] of numbers with 0 < low < 1 < high"},
    ),
    AfterValidator(_check_band),
]


class ParametersConfig(Section):
    """``dct.data_parallel.parameters``: updates of the weights, from the owner of a part of them to all.

    Under ZeRO-1 and 2 and Megatron's distributed optimizer. Dense steps, the rise of sparsity after them, and
    how thresholds are found, are those of ``dct.data_parallel``.
    """

    enabled: bool = Field(
        default=False,
        description="Threshold the updates; false leaves the gather of updated weights to the host.",
    )
    sparsity: float = Field(
        default=0.97,
        ge=0,
        lt=1,
        description="Share of the entries that are not updated in one step; what is left stays between "
        "master and working weight and is sent later.",
    )
    value_dtype: Literal["fp32", "bf16", "fp16", "int8", "int4", "int2"] = Field(
        default="bf16",
        description="Type of the differences on the wire; with sparsity 0 and the weights' own type or fp32 "
        "the host's own gather runs.",
    )
    full_every: int | None = Field(
        default=None,
        ge=1,
        description="Steps between two gathers of all weights in full; null gathers them in full for "
        "checkpoints alone.",
    )


class DataParallelConfig(Section):
    """``dct.data_parallel``: which part of the gradients crosses between data-parallel ranks, and how."""

    enabled: bool = Field(
        default=True, description="Threshold data-parallel gradients; false leaves them to the host."
    )
    sparsity: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="Share of the gradient entries that are not sent in one step; 0 sends all.",
    )
    threshold: _ThresholdSource = "sample"
    threshold_lifespan: int = Field(
        default=1000,
        ge=1,
        description="Upper limit, in steps, of a threshold's life; it is also refreshed at steps 1, 2, 4, 8, "
        "... and when the realised density leaves density_band.",
    )
    threshold_tracking: _Tracking = True
    density_band: _DensityBand = (0.5, 2.0)
    capacity: float = Field(
        default=2.0,
        ge=1,
        le=1e6,
        description="Most entries of one message, as a multiple of the target density; "
        "what overflows stays in the residual.",
    )
    update: Literal["shared", "local"] = Field(
        default="shared",
        description="What ranks exchange: gradients, before an optimizer step that all make alike (shared), "
        "or the changes of their weights, after steps on their own gradients (local; DDP and ZeRO-0).",
    )
    exchange_every: int = Field(
        default=1, ge=1, description="With update local: optimizer steps from one exchange to the next."
    )
    min_numel: int = Field(
        default=4096,
        ge=0,
        description="Tensors with fewer entries are sent dense, as they are: bf16 stays bf16.",
    )
    value_dtype: Literal["fp32", "bf16", "fp16", "int8", "int4", "int2"] = Field(
        default="bf16",
        description="Type of the kept values on the wire; the rounding error stays in the residual. int8 has "
        "one scale per 256 values; int4 and int2 have a sign and 8 or 2 levels between two.",
    )
    error_feedback: Literal["local", "step_ahead", "none"] = Field(
        default="local",
        description="What was not sent is added to the next gradient (local); besides, the next gradient is "
        "taken where the weights will be once it has arrived (step_ahead); or it is dropped (none).",
    )
    residual_dtype: Literal["auto", "fp32", "bf16", "int8"] = Field(
        default="auto",
        description="Type in which what was not sent is kept: 4, 2 or 1.02 bytes per parameter and rank. "
        "bf16 and int8 (64 entries share an exponent) are rounded stochastically: on average nothing is "
        "lost. auto is int8 under ZeRO-3, else fp32.",
    )
    step_ahead_coefficient: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="With step_ahead: share of the own residual by which weights are displaced; null "
        "measures, for every tensor, how much of it the other ranks share.",
    )
    error_averaging_interval: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps from one time that the ranks' residuals become their mean to the next "
        "(Xu, Huo, Huang, AAAI 2021); null never averages.",
    )
    error_averaging_dtype: Literal["bf16", "int8"] = Field(
        default="int8",
        description="With error_averaging_interval: type of the residuals on the wire; what it drops stays "
        "with the rank.",
    )
    momentum_correction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Momentum kept at the workers, so that what is sent late carries it "
        "(Deep Gradient Compression, section 3.2); 0 is off.",
    )
    server_density: float | None = Field(
        default=None,
        ge=1,
        description="In the two-phase exchange, density of what owners send back, as a multiple of that of "
        "what ranks send to them; null takes 3 with step_ahead and update local, else 1.",
    )
    exchange: Literal["auto", "direct", "two_phase"] = Field(
        default="auto",
        description="All-gather of every rank's payload (direct), or reduce at owners and gather "
        "(two_phase); auto takes the one with fewer bytes, and with step_ahead or update local direct up to "
        "4 ranks.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="First optimizer steps that are sent dense.")
    sparsity_warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Steps after these in which the density falls exponentially to its target, as in DGC.",
    )
    parameters: ParametersConfig = Field(
        default_factory=ParametersConfig,
        description="Updates of the weights under ZeRO-1, ZeRO-2 and Megatron's distributed optimizer.",
    )

    adaptive: Literal["off", "accordion"] = Field(
        default="off",
        description="accordion: layers whose gradients change much from interval to interval, or whose "
        "learning rate fell by half, take adaptive_sparsity instead of sparsity.",
    )
    adaptive_sparsity: float = Field(
        default=0.9, ge=0, lt=1, description="With adaptive: sparsity of layers in a critical regime."
    )
    adaptive_interval: int = Field(
        default=100, ge=1, description="With adaptive: optimizer steps between two decisions."
    )

    verify_every: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps between comparisons of the ranks' parameters, by checksum; 0 is off.",
    )
    verify_action: Literal["stop", "resync"] = Field(
        default="stop",
        description="What to do when they differ: stop all ranks, or take over those of the first rank.",
    )
    nonfinite_action: Literal["pass", "skip"] = Field(
        default="pass",
        description="A step whose gradient is not finite is passed on, as without the plugin, or skipped on "
        "all ranks, with residuals as they were before it.",
    )

    @model_validator(mode="after")
    def _options_fit_together(self) -> Self:
        if self.momentum_correction != 0 and self.error_feedback != "local":
            why = {
                "none": "keeps no residual for momentum_correction = {value} to act on",
                "step_ahead": "looks ahead by the optimizer's own momentum, which momentum_correction = "
                "{value} takes away from it",
            }
            raise PydanticCustomError(
                "dct_conflict",
                "error_feedback = '{feedback}' "
                + why[self.error_feedback]
                + "; set error_feedback to 'local', or leave momentum_correction out",
                {"feedback": self.error_feedback, "value": show(self.momentum_correction)},
            )
        if self.error_averaging_interval is not None and self.error_feedback == "none":
            raise PydanticCustomError(
                "dct_conflict",
                "error_averaging_interval = {every} needs residuals, and error_feedback = 'none' keeps none; "
                "leave it out, or set error_feedback to 'local' or 'step_ahead'",
                {"every": self.error_averaging_interval},
            )
        if self.residual_dtype in ("bf16", "int8") and self.momentum_correction != 0:
            raise PydanticCustomError(
                "dct_conflict",
                "residual_dtype = '{dtype}' does not go with momentum_correction = {value}, which keeps a "
                "momentum in fp32 beside the residual; leave one of them out",
                {"dtype": self.residual_dtype, "value": show(self.momentum_correction)},
            )
        if self.residual_dtype in ("bf16", "int8") and self.error_averaging_interval is not None:
            raise PydanticCustomError(
                "dct_conflict",
                "residual_dtype = '{dtype}' does not go with error_averaging_interval = {every}, which adds "
                "to residuals in place; leave one of them out",
                {"dtype": self.residual_dtype, "every": self.error_averaging_interval},
            )
        if self.residual_dtype in ("bf16", "int8") and self.error_feedback == "none":
            raise PydanticCustomError(
                "dct_conflict",
                "residual_dtype = '{dtype}' has nothing to keep with error_feedback = 'none'; leave it out",
                {"dtype": self.residual_dtype},
            )
        if self.adaptive != "off" and self.adaptive_sparsity > self.sparsity:
            raise PydanticCustomError(
                "dct_conflict",
                "adaptive_sparsity = {gentle} is above sparsity = {strong}; it is the gentle one of the two",
                {"gentle": show(self.adaptive_sparsity), "strong": show(self.sparsity)},
            )
        return self

    @model_validator(mode="after")
    def _local_steps_owe_weights(self) -> Self:
        if self.update == "shared" and self.exchange_every > 1:
            raise PydanticCustomError(
                "dct_conflict",
                "exchange_every = {every} needs update = 'local': steps that all ranks make alike take the "
                "gradients of all ranks every time",
                {"every": self.exchange_every},
            )
        if self.update == "local" and self.error_feedback != "local":
            why = {
                "none": "would make ranks forget how far they are ahead of the others",
                "step_ahead": "is part of it: each rank's weights already hold what it still owes",
            }
            raise PydanticCustomError(
                "dct_conflict",
                "error_feedback = '{feedback}' does not go with update = 'local': it "
                + why[self.error_feedback]
                + "; leave error_feedback out",
                {"feedback": self.error_feedback},
            )
        if self.update == "local" and self.nonfinite_action == "skip":
            raise PydanticCustomError(
                "dct_conflict",
                "nonfinite_action = 'skip' does not go with update = 'local': ranks step on gradients of "
                "their own, and the others would wait for one that skips",
                {},
            )
        if self.update == "local" and self.residual_dtype in ("bf16", "int8"):
            raise PydanticCustomError(
                "dct_conflict",
                "residual_dtype = '{dtype}' does not go with update = 'local': what a rank owes lies between "
                "its weights and the anchor; leave it out",
                {"dtype": self.residual_dtype},
            )
        if self.update == "local" and self.adaptive != "off":
            raise PydanticCustomError(
                "dct_conflict",
                "adaptive = '{adaptive}' does not go with update = 'local': it follows the mean gradient, "
                "which no rank has",
                {"adaptive": self.adaptive},
            )
        if self.update == "local" and self.error_averaging_interval is not None:
            raise PydanticCustomError(
                "dct_conflict",
                "error_averaging_interval = {every} does not go with update = 'local': what a rank owes "
                "there is how far its weights are ahead, and averaging that is a dense exchange of weights",
                {"every": self.error_averaging_interval},
            )
        if self.update == "local" and self.momentum_correction != 0:
            raise PydanticCustomError(
                "dct_conflict",
                "momentum_correction = {value} does not go with update = 'local': ranks exchange changes of "
                "weights, in which the optimizer's own momentum is",
                {"value": show(self.momentum_correction)},
            )
        return self

    @property
    def density(self) -> float:
        """Target share of the entries that are sent, 1 - sparsity."""
        return 1.0 - self.sparsity

    @property
    def answer_density(self) -> float:
        """Density of what owners send back, as a multiple of that of what they are sent."""
        if self.server_density is None:
            ahead = self.error_feedback == "step_ahead" or self.update == "local"
            return 3.0 if ahead else 1.0
        return self.server_density


Method = Literal[
    "threshold", "topk", "randomk", "quantise", "bound", "lowrank", "learned", "transform", "none"
]
#: Classes that need a sparsity; at 0 they leave everything as it is.
_SPARSE = ("threshold", "topk", "randomk")
_KeptType = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "int2"]
_Bits = Literal[16, 8, 4, 3, 2, 1]


class ActivationConfig(Section):
    """How activations are compressed where they cross, and the gradients that come back."""

    enabled: bool = Field(
        default=True, description="Compress what crosses here; false leaves it to the host."
    )
    method: Method = Field(
        default="threshold",
        description="What crosses: entries that reach a threshold, the largest of each tensor (topk), random "
        "ones (randomk), all in few bits (quantise), all within a bound (bound), a projection to a low rank "
        "(lowrank), the code of a linear auto-encoder trained with the model (learned), coordinates in the "
        "principal directions in as many bits as each earns (transform), or all (none: the host's own "
        "transfer).",
    )
    gradient_method: Literal[
        "same", "threshold", "topk", "randomk", "quantise", "bound", "lowrank", "transform", "none"
    ] = Field(
        default="same",
        description="How gradients come back: same answers at the forward message's positions, in its "
        "subspace or in its code (quantise, bound, transform: the same way, by themselves); any other "
        "compresses them by themselves.",
    )
    sparsity: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="With threshold, topk and randomk: share of the entries that do not cross; 0 leaves the "
        "host's own transfer in place.",
    )
    gradient_sparsity: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="The same for gradients with a gradient_method of their own; null takes sparsity.",
    )
    threshold: _ThresholdSource = "sample"
    threshold_lifespan: int = Field(
        default=100,
        ge=1,
        description="Upper limit, in steps, of a threshold's life; it is also refreshed at steps 1, 2, 4, 8, "
        "... and when the realised density leaves density_band. Within a step it never changes.",
    )
    threshold_tracking: _Tracking = True
    density_band: _DensityBand = (0.8, 1.25)
    value_dtype: _KeptType = Field(
        default="auto",
        description="With threshold and topk: type of the kept activations on the wire; auto is fp16 for "
        "fp16 tensors, else bf16.",
    )
    gradient_value_dtype: _KeptType = Field(
        default="auto",
        description="Type of the gradients that come back; auto is fp16 for fp16 tensors, else bf16.",
    )
    bits: _Bits = Field(
        default=8,
        description="With quantise, lowrank, learned and randomk: bits of a value; 16 is bf16, 1 a sign, and "
        "one scale serves a group of values.",
    )
    gradient_bits: _Bits | None = Field(default=None, description="The same for gradients; null takes bits.")
    error_bound: float | None = Field(
        default=None,
        gt=0,
        description="With bound: largest error of an entry, as a multiple of the root mean square of what "
        "crosses in one message.",
    )
    gradient_error_bound: float | None = Field(
        default=None, gt=0, description="The same for gradients; null takes error_bound."
    )
    group_size: int = Field(
        default=128,
        ge=8,
        le=65536,
        description="Values that share a scale (2 bytes): a power of two.",
        json_schema_extra={"allowed": "a power of two in [8, 65536]"},
    )
    stochastic: bool = Field(
        default=False,
        description="Round at random, right on average, and span each group's largest value; the seed is "
        "made of name, step and content, so that recomputation rounds alike.",
    )
    gradient_stochastic: bool | None = Field(
        default=None, description="The same for gradients; null takes stochastic."
    )
    rotate: bool = Field(
        default=False,
        description="With quantise: mix the values of each group by a Hadamard transform first, so that "
        "outliers spread (TAH-Quant).",
    )
    rank: int = Field(
        default=16, ge=1, le=65536, description="With lowrank and learned: numbers per row instead of hidden."
    )
    gradient_rank: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="With gradient_method lowrank: the rank of gradients; null takes rank.",
    )
    rate: float = Field(
        default=1.42, gt=0, le=8, description="With transform: bits per entry, on average over directions."
    )
    gradient_rate: float | None = Field(
        default=None, gt=0, le=8, description="The same for gradients; null takes rate."
    )
    basis_interval: int = Field(
        default=10,
        ge=1,
        description="With transform: most steps from one set of directions to the next, which crosses with "
        "the messages of a step; a quarter of the steps so far, where that is less.",
    )
    learning_rate: float = Field(
        default=1e-3, gt=0, description="With learned: Adam's, for encoder and decoder."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="First optimizer steps in which the host's own transfer is used."
    )

    @field_validator("group_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("not a power of two")  # replaced by the field's own text
        return value

    @model_validator(mode="after")
    def _gradients_fit(self) -> Self:
        own = self.gradient_method != "same"
        for key, useful in (
            ("gradient_sparsity", own and self.gradient_method in _SPARSE),
            ("gradient_rank", self.gradient_method == "lowrank"),
        ):
            if getattr(self, key) is not None and not useful:
                raise PydanticCustomError(
                    "dct_conflict",
                    "{key} = {value} needs a gradient_method that has one; gradient_method = '{method}' "
                    "follows the forward message or has none",
                    {"key": key, "value": show(getattr(self, key)), "method": self.gradient_method},
                )
        return self

    @model_validator(mode="after")
    def _bound_is_said(self) -> Self:
        for key, method, bound in (
            ("method", self.method, self.error_bound),
            ("gradient_method", self.gradient_method, self.gradient_error_bound or self.error_bound),
        ):
            if method == "bound" and bound is None:
                raise PydanticCustomError(
                    "dct_conflict",
                    "{key} = 'bound' needs error_bound: how far off may an entry be?",
                    {"key": key},
                )
        return self

    @property
    def density(self) -> float:
        """Target share of the entries that cross, 1 - sparsity."""
        return 1.0 - self.sparsity

    @property
    def compresses_forward(self) -> bool:
        """Whether anything is left out of what crosses forward."""
        return self.method != "none" and (self.method not in _SPARSE or self.sparsity > 0)

    @property
    def compresses(self) -> bool:
        """Whether anything is left out of what crosses forward or backward."""
        own = self.gradient_method != "same" and self.for_gradients().compresses_forward
        return self.compresses_forward or own

    @property
    def summary(self) -> str:
        """Method and strength forward, and backward where that is another one; for people."""
        own = "" if self.gradient_method == "same" else f", gradients {self.for_gradients().summary}"
        if self.method in _SPARSE:
            what = f"sparsity {self.sparsity:g}"
        elif self.method == "none":
            return f"dense{own}"
        elif self.method == "bound":
            what = f"error {self.error_bound:g}"
        elif self.method == "transform":
            what = f"{self.rate:g} bits per entry"
        else:
            what = f"{self.bits} bits" + (f", rank {self.rank}" if self.method != "quantise" else "")
        return (what if self.method == "threshold" else f"{self.method}, {what}") + own

    def for_gradients(self) -> Self:
        """The section for gradients that are compressed by themselves, as if they went forward."""
        own = {"method": self.method if self.gradient_method == "same" else self.gradient_method}
        given = {
            "sparsity": self.gradient_sparsity,
            "bits": self.gradient_bits,
            "stochastic": self.gradient_stochastic,
            "rank": self.gradient_rank,
            "rate": self.gradient_rate,
            "error_bound": self.gradient_error_bound,
        }
        given = {key: value for key, value in given.items() if value is not None}
        changes = {**own, **given, "value_dtype": self.gradient_value_dtype, "gradient_method": "same"}
        return self.model_copy(update={**changes, "gradient_sparsity": None, "gradient_rank": None})


class PipelineConfig(ActivationConfig):
    """``dct.model_parallel.pipeline``: activations and gradients between pipeline stages."""

    boundaries: tuple[int, ...] | None = Field(
        default=None,
        strict=False,
        description="Boundaries at which anything is compressed: 0 is behind the first stage; null: all.",
        json_schema_extra={"allowed": "a list of integers >= 0 or null"},
    )
    boundary_sparsity: tuple[float, ...] = Field(
        default=(),
        strict=False,
        description="Sparsity of the first, second, ... boundary instead of `sparsity`; the one from the "
        "last stage back to the first, of interleaved schedules, comes last.",
        json_schema_extra={"allowed": "a list of numbers in [0, 1)"},
    )
    capacity: float = Field(
        default=1.0,
        ge=0.5,
        le=1e6,
        description="With threshold: room of a message, as a multiple of the target density; receivers need "
        "its size in advance, so this is what crosses. What does not fit is dropped like entries below tau.",
    )
    evaluation: bool = Field(
        default=True, description="Compress in forward-only passes, too; false evaluates the dense model."
    )

    @model_validator(mode="after")
    def _sizes_are_known(self) -> Self:
        for key in ("method", "gradient_method"):
            if getattr(self, key) == "bound":
                raise PydanticCustomError(
                    "dct_conflict",
                    "{key} = 'bound' does not go with pipelines: a receiver must know a message's size in "
                    "advance, and this one depends on the data; set it to 'quantise'",
                    {"key": key},
                )
        return self

    @field_validator("boundaries")
    @classmethod
    def _numbers(cls, values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if values is not None and any(value < 0 for value in values):
            raise ValueError("out of range")  # replaced by the field's own text
        return values

    @field_validator("boundary_sparsity")
    @classmethod
    def _boundaries(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= value < 1 for value in values):
            raise ValueError("out of range")  # replaced by the field's own text
        return values

    @property
    def compresses(self) -> bool:
        return super().compresses or any(self.boundary_sparsity)

    def at(self, boundary: int) -> PipelineConfig:
        """The section for the boundary behind stage ``boundary``, with that one's sparsity."""
        own: dict[str, Any] = {"boundary_sparsity": ()}
        if boundary < len(self.boundary_sparsity):
            own["sparsity"] = self.boundary_sparsity[boundary]
        if self.boundaries is not None and boundary not in self.boundaries:
            own |= {"method": "none", "gradient_method": "same"}
        return self.model_copy(update=own)


class TensorConfig(ActivationConfig):
    """``dct.model_parallel.tensor``: partial sums and activations inside tensor-parallel layers."""

    gather: bool = Field(
        default=False,
        description="With sequence parallelism, compress the inputs of column-parallel layers, too; costs "
        "more quality than the partial sums of row-parallel ones.",
    )
    skip_first_layers: int = Field(default=0, ge=0, description="First transformer layers that stay dense.")
    skip_last_layers: int = Field(default=0, ge=0, description="Last transformer layers that stay dense.")


class ExpertsConfig(ActivationConfig):
    """``dct.model_parallel.experts``: tokens on their way to experts on other ranks and back."""

    method: Literal["threshold", "topk", "quantise", "bound", "none"] = Field(
        default="threshold",
        description="What crosses of a token: entries that reach a threshold, the largest of a message "
        "(topk), all in few bits (quantise), all within a bound (bound), or all (none: the host's own "
        "all-to-all).",
    )
    gradient_method: Literal["same", "threshold", "topk", "quantise", "bound", "none"] = Field(
        default="same",
        description="How gradients come back: same answers at the forward message's positions (quantise, "
        "bound: the same way); any other compresses them by themselves.",
    )
    evaluation: bool = Field(
        default=True, description="Compress in forward-only passes, too; false evaluates the dense model."
    )


class ModelParallelConfig(Section):
    """``dct.model_parallel``: activations between ranks that hold parts of the model, and their gradients."""

    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="Between pipeline stages.")
    tensor: TensorConfig = Field(default_factory=TensorConfig, description="Inside tensor-parallel layers.")
    experts: ExpertsConfig = Field(
        default_factory=ExpertsConfig, description="Between tokens and experts on other ranks."
    )
    expert_gradients: bool = Field(
        default=False, description="Let data_parallel threshold the gradients of expert-parallel layers, too."
    )


class EmbeddingChannelConfig(Section):
    """``dct.embedding``: vectors of sharded embedding tables, and the gradients that come back."""

    enabled: bool = Field(
        default=True, description="The channel as a whole; false is a plain all-to-all of every vector."
    )
    deduplicate: bool = Field(
        default=True,
        description="Each distinct row of a table crosses once per message; gradients of equal rows are "
        "summed before they cross. Lossless.",
    )
    error_bound: float | None = Field(
        default=None,
        gt=0,
        description="Largest absolute error of an embedding entry, times the factor of its table's class; "
        "null does not quantise.",
    )
    bound_classes: tuple[float, float, float] = Field(
        default=(1.0, 1.0, 1.0),
        strict=False,
        description="Factors on error_bound for tables of which quantising merges many, some and few of the "
        "rows. The class of a table is found from its data.",
        json_schema_extra={"allowed": "three numbers > 0"},
    )
    bound_start: float = Field(
        default=1.0, ge=1, description="Factor on error_bound at the first step; it decays to 1."
    )
    bound_decay_steps: int = Field(
        default=0, ge=0, description="Steps in which bound_start decays to 1, in ten equal factors."
    )
    gradient_bound: float | None = Field(
        default=None,
        gt=0,
        description="Largest error of a gradient entry, as a multiple of the root mean square of its "
        "table's gradient in the message; null does not quantise.",
    )
    entropy: Literal["auto", "rice", "packed", "deflate"] = Field(
        default="auto",
        description="How quantised entries are coded: rice is small, packed is fast; auto weighs them "
        "for each table by what the link is worth.",
    )
    sparsity: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the embedding entries that do not cross (DCT-MP); 0 sends all.",
    )
    granularity: Literal["table", "vector", "sample", "tensor"] = Field(
        default="table",
        description="Entries that are ranked together: those of a table, of one vector, of one sample's "
        "vectors on a rank, or all on a rank.",
    )
    threshold_lifespan: int = Field(default=1, ge=1, description="Steps between two measurements of tau.")
    threshold_smoothing: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="Weight of the old threshold at a measurement; 0 takes that of the batch alone.",
    )
    dense_gradient: bool = Field(
        default=False,
        description="Gradients of all entries come back, not only of those that crossed.",
    )
    value_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = Field(
        default="auto",
        description="Type of entries that are not quantised; auto is bf16 under a threshold (fp16 for fp16 "
        "tables), and the table's own type otherwise.",
    )
    gradient_value_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = Field(
        default="auto", description="The same for gradients."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="First steps without threshold and bounds; rows are de-duplicated."
    )
    evaluation: bool = Field(
        default=True,
        description="Evaluate with threshold and bound, as trained; false evaluates the dense model.",
    )

    @field_validator("bound_classes")
    @classmethod
    def _classes(cls, factors: tuple[float, float, float]) -> tuple[float, float, float]:
        if not min(factors) > 0:
            raise ValueError("out of range")  # replaced by the field's own text
        return factors

    @model_validator(mode="after")
    def _samples_need_their_own_vectors(self) -> Self:
        if self.granularity == "sample" and self.deduplicate and self.sparsity > 0:
            raise PydanticCustomError(
                "dct_conflict",
                "granularity = 'sample' needs deduplicate = false: "
                "a row that crosses once serves many samples",
            )
        return self


class MetricsConfig(Section):
    """``dct.metrics``: what is written about bytes, density and time, and where."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="JSON lines file, written by rank 0, or by every rank if the name holds '{rank}'.",
    )
    every: int = Field(
        default=50, ge=1, description="Steps between two reports, which hold averages over these steps."
    )
    tensorboard: str | None = Field(
        default=None,
        min_length=1,
        description="Directory for an own TensorBoard writer; null uses the host framework's monitor only.",
    )


class KernelConfig(Section):
    """``dct.kernels``: which implementation of the hot loops runs."""

    backend: str = Field(
        default="auto",
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="Plain torch (reference), the compiled CPU library (cpu), the Triton kernels (triton), "
        "another registered backend, or the fastest there is for the tensor's device (auto).",
        json_schema_extra={"allowed": '"auto", "reference", "cpu", "triton" or another registered name'},
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Threads of the compiled library; null follows torch.get_num_threads().",
    )


class DCTConfig(Section):
    """The whole ``dct`` section."""

    enabled: bool = Field(
        default=True, description="The plugin as a whole; false leaves the host framework untouched."
    )
    data_parallel: DataParallelConfig = Field(
        default_factory=DataParallelConfig, description="Gradients between data-parallel ranks."
    )
    model_parallel: ModelParallelConfig = Field(
        default_factory=ModelParallelConfig,
        description="Activations and their gradients between model-parallel ranks.",
    )
    embedding: EmbeddingChannelConfig = Field(
        default_factory=EmbeddingChannelConfig,
        description="Vectors of sharded embedding tables between their owner and the samples' rank.",
    )
    metrics: MetricsConfig = Field(
        default_factory=MetricsConfig, description="Reports on bytes, density, time."
    )
    kernels: KernelConfig = Field(
        default_factory=KernelConfig, description="Implementation of the hot loops."
    )

    @classmethod
    def parse(
        cls, section: Mapping[str, Any] | DCTConfig | None, *, rank: int | None = None, source: str = SECTION
    ) -> DCTConfig:
        """Validate a ``dct`` section.

        Args:
            section: the section as read from JSON, or an already validated one (returned as it is).
                ``None`` (there is no section) gives a disabled configuration.
            rank: named in the error when given.
            source: path of the section, the first part of every key named in an error.

        Raises:
            ConfigError: all faults of the section, one per line: key, value, what is allowed, and for an
                unknown key the closest valid one.
        """
        if isinstance(section, DCTConfig):
            return section
        if section is None:
            return cls(enabled=False)
        return validated(cls, section, source, rank=rank)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, rank: int | None = None) -> DCTConfig:
        """Read a section from a JSON file: a DeepSpeed configuration with a ``dct`` key, or the bare section.

        Raises:
            ConfigError: the file cannot be read, is not JSON, holds no section, or the section is wrong.
        """
        where = os.fspath(path)
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        except OSError as error:
            raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from error
        except RecursionError:
            raise ConfigError(f"{where}: nested too deeply") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{where}: must hold a JSON object, holds {show(content)}")
        if SECTION in content:
            content = content[SECTION]
        elif found := sorted(_DEEPSPEED_KEYS & content.keys()):
            raise ConfigError(
                f'{where}: a DeepSpeed configuration (it has {found[0]!r}) without a "dct" section'
            )
        return validated(cls, content, SECTION, rank=rank, where=where)

    def updated(self, changes: Mapping[str, Any]) -> DCTConfig:
        """A validated copy with nested ``changes`` merged in, e.g. ``{"data_parallel": {"sparsity": 0}}``."""
        return validated(type(self), _merged(self.model_dump(), changes), SECTION)

    def canonical_json(self) -> str:
        """The section with every default written out, keys sorted; equal configurations give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def fingerprint(self) -> str:
        """Short hash of :meth:`canonical_json`, equal on all ranks that agree (12 hexadecimal digits)."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:12]

    def differences(self, other: DCTConfig) -> list[str]:
        """``['dct.data_parallel.sparsity: 0.99 != 0.9', ...]``: every key in which the two differ."""
        return [
            f"{mine.path}: {show(mine.value)} != {show(theirs.value)}"
            for mine, theirs in zip(options(self), options(other), strict=True)
            if mine.value != theirs.value
        ]


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = (
            _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"key {key!r} is given twice")
        seen[key] = value
    return seen


def _source_of(cls: type[Section]) -> str:
    """Path at which a section model stands in the configuration, e.g. ``dct.metrics``."""
    for name, field in DCTConfig.model_fields.items():
        if field.annotation is cls:
            return f"{SECTION}.{name}"
    return SECTION
