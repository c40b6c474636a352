"""``dct.data_parallel``: which part of the gradients crosses between data-parallel ranks, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from ..errors import ConfigError
from ..schedules import SparsitySchedule
from .feedback import AutoFeedback, Feedback
from .section import OR_FALSE, Section, Variant, conflict, written_short

if TYPE_CHECKING:
    from typing_extensions import Self

GradientType = Literal["fp32", "bf16", "fp16", "int8", "int4", "int2"]


class ParametersConfig(Section):
    """Thresholded updates of the weights, from the owner of a part of them to all ranks.

    They apply under ZeRO-1, ZeRO-2, ZeRO-3 with copies of the weights in nodes
    (``zero_hpz_partition_size``), and Megatron's distributed optimizer. Dense steps, the ramp after them
    and the threshold mechanics are those of ``dct.data_parallel``.
    """

    section_path = "dct.data_parallel.parameters"

    sparsity: float = Field(default=0.97, ge=0, lt=1)
    """Share of the entries that are not updated in one step. The rest of their change stays between master
    and working weight and is sent later.

    0.9 where quality matters most, 0.99 for the fewest bytes.
    """
    value_dtype: GradientType = "bf16"
    """Type of the differences on the wire. With sparsity 0 and the weights' own type or fp32, the host's
    own gather runs.

    `int8` for fewer bytes.
    """
    full_every: int | None = Field(default=None, ge=1)
    """Steps between two gathers of all weights in full; null gathers them in full for checkpoints alone.

    If working weights are read between checkpoints.
    """


def refuse(
    host: str, why: str = "every rank has the whole optimizer, no weights are gathered after a step"
) -> ConfigError:
    """Return the error for a host whose weights are not gathered, or not where they could be thresholded."""
    return ConfigError(f"{ParametersConfig.section_path}: {host}: {why}; leave it out")


class VerifyConfig(Section):
    """Comparison of the ranks' parameters by checksum."""

    section_path = "dct.data_parallel.verify"

    every: int = Field(default=1000, ge=1)
    """Optimizer steps from one comparison to the next.

    100 to 1000: one pass over the parameters and a small all-reduce. States of the optimizer are not
    compared.
    """
    action: Literal["stop", "resync"] = "stop"
    """What happens when the parameters differ: stop all ranks, or take over the parameters of the first rank.

    `resync` where a job must not stop; the message names parameter and rank either way.
    """


class AccordionConfig(Variant):
    """Less sparsity for layers in a critical regime (Accordion, Agarwal et al., MLSys 2021).

    A layer is critical when its gradients change much from interval to interval, or when its learning rate
    fell by half.
    """

    section_path = "dct.data_parallel.adaptive"

    kind: Literal["accordion"] = "accordion"
    sparsity: float = Field(default=0.9, ge=0, lt=1)
    """Sparsity of layers in a critical regime.

    Lower where early training needs more.
    """
    interval: int = Field(default=100, ge=1)
    """Optimizer steps between two decisions.

    Ten decisions per training are few, a hundred are many.
    """


class ExpertSettings(Section):
    """Settings for tests, studies and the papers' own values. The defaults serve every user."""

    section_path = "dct.data_parallel.expert"

    threshold: Literal["sample", "exact", "fixed"] = "sample"
    """How thresholds are found: from random positions and a small sample at every step (sample), as the
    exact k-th largest magnitude (exact), or from random positions, then unchanged over their life (fixed,
    as in the paper).

    `exact` and `fixed` for tests and studies.
    """
    threshold_lifespan: int = Field(default=1000, ge=1)
    """Upper limit, in steps, of a threshold's life. It is also measured at steps 1, 2, 4, 8, ...

    For studies.
    """
    server_density: float | None = Field(default=None, ge=1)
    """In the two-phase exchange, density of what owners send back, as a multiple of the density of what
    ranks send to them; null takes 3 with `step_ahead`, else 1.

    Higher for quality, 1 for the fewest bytes ([measured](quality.md#step-ahead-adam-at-99-)).
    """
    ramp: Literal["exponential", "power"] = "exponential"
    """How the density falls after the dense steps: exponentially, or with a power of the step, which needs
    `warmup_steps`. Where `feedback` is auto and becomes step-ahead, it is power.

    For studies.
    """
    step_ahead_coefficient: float | None = Field(default=None, gt=0, le=1)
    """With `step_ahead`: share of a rank's own residual by which weights are displaced; null measures, for
    every tensor, how much of it the other ranks share.

    A fixed value saves the small all-reduce that measuring takes every 10 steps.
    """


class DataParallelConfig(Section):
    """Gradients between data-parallel ranks."""

    section_path = "dct.data_parallel"

    enabled: bool = True
    """Threshold data-parallel gradients; false leaves them to the host.

    `false` if only other parts of the plugin are wanted.
    """
    sparsity: float = Field(default=0.99, ge=0, lt=1)
    """Share of the gradient entries that are not sent in one step; 0 sends all. Where neither it nor
    `value_dtype` is written, `step_ahead` between more than 4 ranks (or nodes) takes 0.96 in `int4`
    ([measured](quality.md#many-compressors)).

    0.9 where quality matters most, 0.99 on slow links, 0 to measure the plugin's own cost.
    """
    quality: Literal["exact", "safe", "bytes"] | None = None
    """Choose by measurement, at the start and whenever steps or the link change, with `sparsity` as the
    highest sparsity and `value_dtype` as the widest type of values: the dense exchange, plain or in a
    lossless code (exact), sparsities that lost nothing measurable with this optimizer and number of ranks
    (safe), or all of them (bytes). null takes the settings as they are. `"sparsity": "auto"` stands for 0.99
    and `safe`.

    Where the link is not known or changes ([how it decides](automatic.md)).
    """
    value_dtype: GradientType = "bf16"
    """Type of the kept values on the wire; the rounding error stays in the residual. int8 has one scale per
    256 values; int4 and int2 have a sign and 8 or 2 levels between two scales.

    `int8`, `int4` for fewer bytes (16, 12 bits per kept entry at 99 % instead of 24); `fp32` to see whether
    rounding matters.
    """
    min_numel: int = Field(default=4096, ge=0)
    """Tensors with fewer entries are sent dense, in their own type.

    Lower it if `gradient_small` dominates the bytes, raise it to leave more layers exact.
    """
    feedback: Feedback = AutoFeedback()
    """What becomes of entries that are not sent: they are added to the next gradient (local); besides, that
    gradient is taken where the weights will be once they arrived (step_ahead); or the entries are dropped
    (none). auto follows the optimizer: step_ahead with Adam, RMSprop and momentum, after a start of dense
    steps; local with Adagrad and plain SGD; else local at a sparsity of 0.9 at most.

    Leave it out: the log says what was chosen. `none` saves a residual of 4 bytes per parameter and usually
    costs quality.
    """
    residual_dtype: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """Type of the residual: 4, 2 or 1.02 bytes per parameter and rank. bf16 and int8 (64 entries share an
    exponent) are rounded stochastically: on average nothing is lost. auto is int8 under ZeRO-3, else fp32.

    `int8` where memory is short ([what it costs](quality.md#residuals-in-fewer-bytes)).
    """
    exchange: Literal["auto", "direct", "two_phase"] = "auto"
    """All-gather of every rank's payload (direct), or sum at owners and gather (two_phase). auto takes the
    one with fewer bytes; with `step_ahead` it takes direct up to 4 ranks. With `quality` the other one is
    tried, too, between more than 2 ranks.

    To compare the two; no effect under ZeRO 1 and 2, where owners keep their part.
    """
    nodes: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Ranks of a node, which are summed densely before one message for all of them crosses: `auto` finds
    nodes by the hosts' names, a number is consecutive ranks per node, 1 is for none.

    A number where the fast link joins other ranks than those of one host ([guide](nodes.md)).
    """
    warmup_steps: int | None = Field(default=None, ge=0)
    """First optimizer steps that are sent dense; null is 0, with feedback auto 60 where the optimizer needs
    a start, or a tenth of a shorter run whose length is known.

    While losses still fall fast; with Adam at 0.99 60, in runs of some hundred steps a tenth (measured).
    """
    sparsity_warmup_steps: int | None = Field(default=None, ge=0)
    """Steps after these in which the density falls to its target; null is 0. With feedback auto it is 540
    with step-ahead at 0.99, else 180, or six tenths of a run that is known to be too short for that.

    Instead of, or after, dense steps: smoother than one jump to the target.
    """
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run: a short one gets a shorter start. null takes what the host or its scheduler
    says, if anything.

    In runs of fewer than 600 steps, where the log says that the length is not known
    ([what it changes](quality.md#the-start-by-the-length-of-the-run)).
    """
    adaptive: Annotated[AccordionConfig | None, OR_FALSE, written_short("kind")] = None
    """`"accordion"` or an object with its settings; null is off.

    With learning rates that fall in steps. Changes are logged, and `gradient/critical` in the
    [metrics](metrics.md) is what they cost.
    """
    parameters: Annotated[ParametersConfig | None, OR_FALSE] = None
    """null leaves the gather of updated weights to the host.

    Where the network is the bottleneck, with `"feedback": "step_ahead"`; the cost is in
    [quality](quality.md#updated-weights-under-zero-1).
    """
    verify: Annotated[VerifyConfig | None, OR_FALSE] = None
    """null is off."""
    nonfinite_action: Literal["pass", "skip"] = "pass"
    """A step whose gradient is not finite is passed on, as without the plugin, or skipped on all ranks,
    with residuals as they were before it.

    `"skip"` for long runs in fp32 and bf16: one pass over the gradients, and a second copy of the
    residuals. fp16 loss scaling always skips. DDP and FSDP2 then also take back a step that the script
    rejects: its gradients are cleared without `optimizer.step()`. DDP needs
    `DCTState(..., optimizer=optimizer)`, Megatron `--no-check-for-nan-in-loss-and-grad`.
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
    def _options_fit_together(self) -> Self:
        for message in self._conflicts():
            raise conflict(message)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Yield what does not go together, in words."""
        feedback = f"feedback = '{self.feedback.label()}'"
        if self.residual_dtype in ("bf16", "int8"):
            packed = f"residual_dtype = '{self.residual_dtype}'"
            if not self.feedback.keeps_residual:
                yield f"{packed} has nothing to keep with {feedback}"
        if self.quality is not None and self.adaptive is not None:
            yield f"quality = '{self.quality}' does not go with adaptive: both choose the sparsity"
        if self.adaptive is not None and self.adaptive.sparsity > self.sparsity:
            yield f"adaptive.sparsity = {self.adaptive.sparsity} is above sparsity = {self.sparsity}"

    @property
    def summary(self) -> str:
        """The share of entries sent, and the feedback for the others, in words."""
        if self.quality == "exact":
            return "quality exact, nothing left out"
        if self.quality is not None:
            return (
                f"quality {self.quality}, sparsity up to {self.sparsity:g}, feedback {self.feedback.label()}"
            )
        return f"sparsity {self.sparsity:g}, {self.value_dtype} values, feedback {self.feedback.label()}"

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
