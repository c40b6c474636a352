"""``dct.data_parallel``: which part of the gradients crosses between data-parallel ranks, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from .section import OR_FALSE, Section, Variant, conflict, written_short


@dataclass(frozen=True)
class SparsitySchedule:
    """Dense first, then rising sparsity, then the target.

    The rise follows Deep Gradient Compression (Lin et al., ICLR 2018, section 3.3): the density falls
    exponentially from 1 to its target, so that early, fast-changing gradients are not delayed. Or it falls
    with a power of the step, which suits runs whose length is not known: a longer run has a longer rise.

    Args:
        sparsity: Target share of entries dropped, in [0, 1).
        warmup_steps: Steps that go dense.
        ramp_steps: Steps of the rise that follows.
        by_power: The density falls with a power of the step; needs ``warmup_steps``.
    """

    sparsity: float
    warmup_steps: int = 0
    ramp_steps: int = 0
    by_power: bool = False

    def starting(self, step: int) -> bool:
        """True while steps are dense or sparsity rises."""
        return step < self.warmup_steps + self.ramp_steps

    def rest(self, step: int) -> str:
        """Return how the start goes on at ``step``, in words."""
        if step < self.warmup_steps:
            return f"dense steps go on until step {self.warmup_steps}"
        end = self.warmup_steps + self.ramp_steps
        return f"sparsity rises until step {end}" if step < end else "the start is over"

    def density(self, step: int) -> float:
        """Share of entries to keep at ``step`` (from 0); 1.0 means dense."""
        if step < self.warmup_steps:
            return 1.0
        target = 1.0 - self.sparsity
        position = step - self.warmup_steps
        if position < self.ramp_steps:
            share = (position + 1) / (self.ramp_steps + 1)
            if self.by_power and self.warmup_steps:
                end = self.warmup_steps + self.ramp_steps + 1
                share = math.log((step + 1) / self.warmup_steps) / math.log(end / self.warmup_steps)
            return float(target**share)
        return target


class FeedbackConfig(Variant):
    """Base class of the kinds of feedback."""

    section_path = "dct.data_parallel.feedback"

    #: Whether each rank keeps what it did not send in a residual.
    keeps_residual: ClassVar[bool] = True
    #: Whether gradients are taken at weights that are displaced by the residual.
    looks_ahead: ClassVar[bool] = False
    #: Density of what owners send back, as a multiple of the density of what they receive.
    server_density: ClassVar[float] = 1.0


class AutoFeedback(FeedbackConfig):
    """The feedback that suits the optimizer; ``local`` until the optimizer is known."""

    kind: Literal["auto"] = "auto"


class NoFeedback(FeedbackConfig):
    """Entries that are not sent are dropped."""

    keeps_residual = False

    kind: Literal["none"] = "none"


class LocalFeedback(FeedbackConfig):
    """Entries that are not sent are added to the rank's next gradient."""

    kind: Literal["local"] = "local"


class StepAheadFeedback(FeedbackConfig):
    """Local feedback; also, the next gradient is taken at weights that anticipate the residual."""

    looks_ahead = True
    server_density = 3.0

    kind: Literal["step_ahead"] = "step_ahead"


#: Any kind of feedback; its name alone stands for the kind with default settings.
Feedback = Annotated[
    AutoFeedback | LocalFeedback | StepAheadFeedback | NoFeedback,
    Field(discriminator="kind"),
    written_short("kind"),
]


GradientType = Literal["fp32", "bf16", "fp16", "int8", "int4", "int2", "log4"]


class ParametersConfig(Section):
    """Thresholded updates of the weights, from the owner of a part of them to all ranks, under ZeRO-1,
    ZeRO-2, ZeRO-3 with copies of the weights in nodes (``zero_hpz_partition_size``) and Megatron's
    distributed optimizer. Dense start, ramp and thresholds are those of the gradients.
    """

    section_path = "dct.data_parallel.parameters"

    sparsity: float = Field(default=0.97, ge=0, lt=1)
    """Share of the weights that are not updated in one step, but in later ones.

    0.9 for quality, 0.99 for the fewest bytes.
    """
    value_dtype: GradientType = "bf16"
    """Type of the updates on the wire. At sparsity 0, in fp32 or the weights' own type, the framework
    gathers the weights.

    `int8` for fewer bytes.
    """
    full_every: int | None = Field(default=None, ge=1)
    """Steps between two gathers of all weights. With null only checkpoints gather them.

    Set it if the script reads weights between checkpoints.
    """


class LocalStepsConfig(Section):
    """Optimizer steps without any exchange, after which the ranks exchange their progress: a rank's own
    weights minus the common weights. It is sent whole, in `value_dtype` (by default int8). Gradients are
    averaged in the first `warmup_steps` steps.
    """

    section_path = "dct.data_parallel.local_steps"

    every: int = Field(default=30, ge=1)
    """Optimizer steps from one exchange to the next.

    10 for quality, 100 for the slowest links ([measured](local-steps.md)).
    """
    outer_lr: float = Field(default=1.0, gt=0)
    """Learning rate of the outer optimizer, which adds the mean progress to the common weights.

    0.7 with `outer_momentum` 0.9 is DiLoCo as published.
    """
    outer_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer.

    0 with `outer_lr` 1 makes the common weights the mean of the ranks', and saves a copy of them.
    """
    fragments: int = Field(default=1, ge=1)
    """Parts of the model that cross in turn, one of them every `every` / `fragments` steps.

    3 with a `delay`.
    """
    delay: int = Field(default=0, ge=0)
    """Optimizer steps for which an exchange travels while the ranks train on. 0: they wait for it.

    3 with 3 `fragments`, where an exchange takes longer than a step ([measured](local-steps.md)).
    """

    @property
    def period(self) -> int:
        """Optimizer steps from one fragment's exchange to the next one's."""
        return self.every // self.fragments

    @model_validator(mode="after")
    def _fragments_fit(self) -> LocalStepsConfig:
        if self.every % self.fragments:
            raise conflict(f"every = {self.every} is no multiple of fragments = {self.fragments}")
        if self.delay >= self.period:
            raise conflict(f"delay = {self.delay}: less than every / fragments = {self.period} is allowed")
        return self


class VerifyConfig(Section):
    """Comparison of the tensors that all ranks hold, by checksum."""

    section_path = "dct.data_parallel.verify"

    every: int = Field(default=1000, ge=1)
    """Optimizer steps between two comparisons; also the end of the dense start, 1, 10 and 100 steps later,
    and saves under DeepSpeed and Megatron ([what is compared](reliability.md#guard)).

    A comparison costs one pass over the tensors and a small all-gather.
    """
    action: Literal["stop", "warn", "resync"] = "stop"
    """Action when trainable parameters differ: stop all ranks, warn, or resync (copy the first rank's). All
    log the tensor and the rank. Differing frozen parameters and buffers are logged, or copied.

    `resync` if the job must not stop.
    """
    conservation: bool = False
    """Check at each comparison, at sampled entries, that the gradients of all ranks equal what the
    optimizer got and what residuals hold.

    To find a script whose steps dct does not see. It costs some microseconds per tensor and step.
    """

    def is_due(self, step: int, dense_steps: int) -> bool:
        """Return whether to compare after an optimizer step."""
        return step > 0 and (step % self.every == 0 or step - dense_steps in (0, 1, 10, 100))


#: The comparison that nobody has asked for: it stops no job.
_VERIFY = VerifyConfig(action="warn")


class AccordionConfig(Variant):
    """A lower sparsity for layers in a critical regime (Accordion, Agarwal et al., MLSys 2021): their
    gradients change much from interval to interval, or their learning rate fell by half.
    """

    section_path = "dct.data_parallel.adaptive"

    kind: Literal["accordion"] = "accordion"
    sparsity: float = Field(default=0.9, ge=0, lt=1)
    """Sparsity of layers in a critical regime.

    Lower it if the loss falls too slowly early in training.
    """
    interval: int = Field(default=100, ge=1)
    """Optimizer steps between two decisions.

    10 to 100 decisions per training.
    """


class ExpertSettings(Section):
    """Settings for tests and studies, not for users."""

    section_path = "dct.data_parallel.expert"

    threshold: Literal["sample", "topk", "fixed"] = "sample"
    """Method: a random sample, corrected at every step by a smaller one (sample); the k-th largest
    magnitude (topk); a random sample that is kept for `threshold_lifespan` steps (fixed, as in the paper).
    """
    threshold_lifespan: int = Field(default=1000, ge=1)
    """Most steps between two measurements of a threshold. Steps 1, 2, 4, 8, ... measure, too."""
    server_density: float | None = Field(default=None, ge=1)
    """Density of the sums that owners send back in the two-phase exchange, as a multiple of the density of
    the messages. null is 3 with `step_ahead`, else 1.

    Higher for quality, 1 for the fewest bytes ([measured](quality.md#step-ahead-adam-at-99-)).
    """
    ramp: Literal["exponential", "power"] = "exponential"
    """Fall of the density after the dense steps: exponential, or with a power of the step (power, which
    needs `warmup_steps`). With feedback auto, step-ahead gets power.
    """
    step_ahead_coefficient: float | None = Field(default=None, gt=0, le=1)
    """Share of a rank's own residual by which `step_ahead` displaces weights. null measures for every
    tensor how well the residual predicts the mean of all ranks.

    A value saves a small all-reduce every 10 steps.
    """


class DataParallelConfig(Section):
    """Gradients between data-parallel ranks."""

    section_path = "dct.data_parallel"

    enabled: bool = True
    """Compress data-parallel gradients. false leaves them to the framework.

    `false` to compress only activations or embeddings.
    """
    sparsity: float = Field(default=0.99, ge=0, lt=1)
    """Share of the gradient entries (with `exchange_of` updates, of the weights' progress) that are not
    sent in a step; 0 sends all. Without `sparsity`, `value_dtype`, `quality` and `adaptive` a training gets
    [settings that lost nothing when measured](settings.md), if faster than dense. `"auto"` is `"quality":
    "safe"` at 0.99.

    0.9 for quality, 0.99 on slow links, [less on many ranks](quality.md#many-compressors), 0 to measure the
    plugin's own cost.
    """
    quality: Literal["dense", "safe", "bytes", "if_faster"] | None = None
    """Settings from which the plugin takes the fastest by measurement: dense; safe (sparsities that lost
    nothing measurable with this optimizer and number of ranks); bytes (all sparsities); or, once after the
    dense start, if_faster (the settings, all entries in int8, or dense; the rule where neither `sparsity`
    nor `value_dtype` is written). Else `sparsity` is the highest one, `value_dtype` the widest. null: the
    settings as they are.

    If the link's speed is unknown or changes ([how it decides](automatic.md)).
    """
    value_dtype: Literal[GradientType, "sign"] = "bf16"
    """Type of the sent values; the rounding error stays in the residual. int8: a scale per 256 values.
    int4, int2: a sign and 8 or 2 levels between two scales. log4 (sparsity 0 only): a sign and powers of
    2^-0.75 in 4 bits, a scale per 32 values. sign (`exchange_of` updates only): the mean magnitude of 256
    values.

    `int8` or `int4` for fewer bytes: at 0.99 an entry with its position takes 16 or 12 bits instead of 24.
    `fp32` to see whether rounding matters.
    """
    min_numel: int = Field(default=4096, ge=0)
    """Fewest entries of a compressed tensor. Smaller ones are sent dense, in their own type (fp32 in bf16
    to owners, beside 8 bits or fewer without a residual).

    Lower if `gradient_small` sends most of the bytes.
    """
    feedback: Feedback = AutoFeedback()
    """Treatment of unsent entries: added to the next gradient (local); also, that gradient is taken at
    weights that anticipate them (step_ahead); dropped (none). auto: step_ahead with Adam, RMSprop and
    momentum, else local.

    Leave it out; the log names the choice. `none` saves the residual's memory and usually costs quality.
    """
    residual_dtype: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """Type of the residual: 4, 2 or 1.02 bytes per parameter and rank; bf16 and int8 are rounded
    stochastically, without a mean error. auto: int8 under ZeRO-3, else fp32.

    `int8` if memory is short ([its cost](quality.md#residuals-in-fewer-bytes)).
    """
    exchange: Literal["auto", "direct", "two_phase"] = "auto"
    """Topology: all ranks send to all (direct), or owners sum the messages and send the sums (two_phase).
    auto: fewer bytes; with `step_ahead` direct on up to 4 ranks. No effect under ZeRO-1 and 2, where owners
    keep the sums.
    """
    nodes: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", json_schema_extra={"allowed": '"auto" or an integer >= 1'}
    )
    """Consecutive ranks that form a node, which sums its gradients densely before nodes exchange messages.
    auto: ranks with one machine's name; 1: no nodes.

    If the fast link joins other ranks ([guide](nodes.md)).
    """
    warmup_steps: int | None = Field(default=None, ge=0)
    """First optimizer steps whose gradients are sent dense. null is 0; with feedback auto 40 with
    step-ahead, 0 with Adagrad and plain SGD, else 60, at most a tenth of a run of known length.

    Longer if the loss still falls fast after it.
    """
    sparsity_warmup_steps: int | None = Field(default=None, ge=0)
    """Steps after the dense ones in which the density falls to its target (the ramp). null is 0; with
    feedback auto 822 with step-ahead at 0.99, 302 at 0.96 (180 if `warmup_steps` is written), 0 with Adagrad
    and plain SGD, else 180, in shorter runs six tenths of them.

    Longer if the loss rises when the dense steps end.
    """
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run; a short run gets a shorter start. null: the number that the framework or
    its scheduler knows.

    In runs of fewer than 900 steps, if the log says that the length is not known
    ([effect](quality.md#the-start-by-the-length-of-the-run)).
    """
    adaptive: Annotated[AccordionConfig | None, OR_FALSE, written_short("kind")] = None
    """`"accordion"` or an object with its settings; null is off.

    For learning rates that fall in steps. The log names the changes; the class `gradient/critical` of the
    [metrics](metrics.md) has their bytes.
    """
    parameters: Annotated[Literal["exact", "int8"] | ParametersConfig | None, OR_FALSE] = Field(
        default=None, json_schema_extra={"allowed": '"exact", "int8", an object with its settings, or null'}
    )
    """`"exact"` sends the bf16 or fp16 weights whose bits changed, and loses nothing. `"int8"` has FSDP2 on
    one mesh, and ZeRO-3, gather from copies in int8, of which changed codes cross. An object has its
    updates thresholded. null leaves gathers to the framework. Default: `"exact"` where gradients are
    thresholded or in 8 bits or fewer, and the framework gathers bf16 or fp16 weights
    ([frameworks](methods.md#exact-updates)).

    An object if the network is the bottleneck, with step-ahead ([its
    cost](quality.md#updated-weights-under-zero-1)). null to measure what exact updates cost.
    """
    local_steps: Annotated[
        LocalStepsConfig | None,
        OR_FALSE,
        BeforeValidator(lambda value: {"every": value} if type(value) is int else value),
    ] = Field(
        default=None, json_schema_extra={"allowed": "an integer >= 1, an object with its settings, or null"}
    )
    """A number is `every`. null exchanges gradients in every step.

    30 for links of 10 to 300 Mbit/s with long delays ([guide](local-steps.md)).
    """
    exchange_of: Literal["gradients", "updates"] = "gradients"
    """Tensors that cross in each step: gradients, or the progress of weights (updates), each rank making
    its own optimizer's step. By default a sixteenth of the progress crosses per step in `int4` with Adam,
    all of it in `sign` with Muon.

    updates for fine-tuning with Adam at 1e-4 or less, and for Muon ([guide](updates.md)).
    """
    verify: Annotated[VerifyConfig | None, OR_FALSE] = _VERIFY
    """By default differences are logged (`{"action": "warn"}`). null is off."""
    nonfinite_action: Literal["pass", "skip"] = "pass"
    """Action when a gradient is not finite: pass it on, as without the plugin (pass), or skip the step on
    all ranks and restore the residuals (skip). fp16 loss scaling always skips.

    `"skip"` for long runs in fp32 and bf16, for a pass over the gradients and a second copy of the
    residuals. DDP and FSDP2 then also undo a step whose gradients the script clears. Megatron needs
    `--no-check-for-nan-in-loss-and-grad`, a `DCTState` its optimizer.
    """
    expert: ExpertSettings = ExpertSettings()
    """Settings for tests and studies."""

    @model_validator(mode="before")
    @classmethod
    def _expand_auto(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("sparsity") == "auto":
            given = {name: value for name, value in values.items() if name != "sparsity"}
            return {"quality": "safe", **given}
        return values

    @model_validator(mode="after")
    def _options_fit_together(self) -> DataParallelConfig:
        for message in self._conflicts():
            raise conflict(message)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Yield what does not go together, in words."""
        feedback = f"feedback = '{self.feedback.label()}'"
        if self.residual_dtype in ("bf16", "int8") and not self.feedback.keeps_residual:
            yield f"residual_dtype = '{self.residual_dtype}' has nothing to keep with {feedback}"
        if self.quality is not None and self.adaptive is not None:
            yield f"quality = '{self.quality}' does not go with adaptive: both choose the sparsity"
        updates = self.exchange_of == "updates"
        if self.trains_alone:
            others = {
                "parameters": self.parameters is not None,
                "quality": self.quality is not None,
                "adaptive": self.adaptive is not None,
                f"nodes = {self.nodes}": self.nodes not in ("auto", 1),
                f"sparsity = {self.sparsity}": not updates
                and "sparsity" in self.model_fields_set
                and self.sparsity > 0,
                feedback: self.feedback.label() not in (("auto", "local") if updates else ("auto", "none")),
            }
            name = "exchange_of = 'updates'" if updates else "local_steps"
            for other in (name for name, given in others.items() if given):
                yield f"{name} does not go with {other}: progress of weights is sent, and no gradients are"
        if self.value_dtype == "sign" and not updates:
            yield "value_dtype = 'sign' does not go with exchange_of = 'gradients', whose quality it loses"
        if self.adaptive is not None and self.adaptive.sparsity > self.sparsity:
            yield f"adaptive.sparsity = {self.adaptive.sparsity} is above sparsity = {self.sparsity}"

    @property
    def trains_alone(self) -> bool:
        """True if each rank's optimizer uses this rank's own gradients."""
        return self.local_steps is not None or self.exchange_of == "updates"

    @property
    def summary(self) -> str:
        """The share of entries sent, and the feedback for the others, in words."""
        if self.quality == "dense":
            return "quality dense, nothing left out"
        if self.exchange_of == "updates":
            return f"an exchange of updates, 1/{1 / self.density:.0f} in each step, {self.value_dtype} values"
        if self.local_steps is not None:
            return f"an exchange of progress every {self.local_steps.every} steps, {self.value_dtype} values"
        if self.quality not in (None, "if_faster"):
            return (
                f"quality {self.quality}, sparsity up to {self.sparsity:g}, feedback {self.feedback.label()}"
            )
        rule = ", if faster than dense" if self.quality == "if_faster" else ""
        feedback = self.feedback.label()
        return f"sparsity {self.sparsity:g}, {self.value_dtype} values, feedback {feedback}{rule}"

    @property
    def asks_to_verify(self) -> bool:
        """True if a comparison of the ranks is written, and is not the default."""
        return self.verify not in (None, _VERIFY)

    @property
    def dense_steps(self) -> int:
        """First optimizer steps that are sent dense."""
        return self.warmup_steps or 0

    @property
    def ramp_steps(self) -> int:
        """Steps after these in which the density falls."""
        return self.sparsity_warmup_steps or 0

    @property
    def schedule(self) -> SparsitySchedule:
        """Sparsity over the training."""
        by_power = self.expert.ramp == "power"
        return SparsitySchedule(self.sparsity, self.dense_steps, self.ramp_steps, by_power)

    @property
    def density(self) -> float:
        """Target share of the entries that are sent, 1 - sparsity."""
        return 1.0 - self.sparsity

    @property
    def server_density(self) -> float:
        """Density of what owners send back, as a multiple of the density of what they receive."""
        given = self.expert.server_density
        return self.feedback.server_density if given is None else given
