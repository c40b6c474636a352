"""Automatic choices: the feedback for an optimizer, the settings of a quality class, and known losses."""

from __future__ import annotations

import math
from itertools import product
from typing import Literal, NamedTuple

from .data_parallel import DataParallelConfig
from .feedback import AutoFeedback, LocalFeedback, StepAheadFeedback
from .known_losses import Training, known_losses
from .optimizers import OptimizerFamily

#: Dense steps with step-ahead and without, steps after them in which the density falls, and the largest share
#: of a run for each.
DENSE, RAMP, SHARES = (40, 60), 180, (0.1, 0.6)
#: With step-ahead the density falls with this power of the step, unless the run is too short for it.
FALL = 1.5
#: Sparsity of local error feedback where it is known to lose at 0.99, or nothing is known.
GENTLE = 0.9


_UNTOLD = (
    "the optimizer was not told: local error feedback, which with Adam is known to lose (0.2 nats at 0.99 "
    "after 1,200 steps, 0.9 after 300)"
)


#: Sparsities and value types that the automatic mode chooses from, within the limits of a configuration.
_SPARSITIES, _VALUES = (0.9, 0.97, 0.99), {"bf16": 16, "int8": 8, "int4": 4}
#: Most ranks, and the highest sparsity at which step-ahead lost nothing measurable between so many. The
#: second row was measured with Adam alone.
_SAFE_AHEAD = ((4, 0.99), (8, 0.96))

#: Most compressors for which a sparsity, a value type and a density of owners' answers (a multiple of that of
#: what they receive) are the default with step-ahead. Loss grows with the number of compressors at one
#: density, and fewer bits pay for a higher one (docs/quality.md#many-compressors).
BY_COMPRESSORS = (
    (4, 0.99, "bf16", StepAheadFeedback.server_density),
    (math.inf, 0.96, "int4", 1.65),
)


def for_compressors(settings: DataParallelConfig, count: int) -> DataParallelConfig:
    """Return the settings with the sparsity, the value type and the answers for so many compressors.

    Settings that name one of the first two stay as they are, and so do those without step-ahead.
    """
    written = settings.model_fields_set & {"sparsity", "value_dtype", "quality", "adaptive"}
    _, sparsity, values, answers = next(row for row in BY_COMPRESSORS if count <= row[0])
    suits = (sparsity, values) == (settings.sparsity, settings.value_dtype)
    if written or suits or not settings.feedback.looks_ahead:
        return settings
    expert = {"server_density": answers, **settings.expert.model_dump(exclude_unset=True)}
    return _changed(settings, sparsity=sparsity, value_dtype=values, expert=expert)


#: In place of a value type: every entry in the gradient's own type, in a lossless code.
LOSSLESS = "lossless"


class Setting(NamedTuple):
    """A sparsity, the type of its values and the topology, as the automatic mode chooses them."""

    sparsity: float = 0.0
    value_dtype: str | None = None
    """Type of the values, or :data:`LOSSLESS`; None: the dense exchange of the framework."""
    exchange: str | None = None
    """``"direct"`` or ``"two_phase"``; None: the topology by rule."""

    @property
    def is_dense(self) -> bool:
        return self.value_dtype is None

    @property
    def strength(self) -> tuple[float, int]:
        """Order from gentle to strong: by sparsity, then by bits left out."""
        return self.sparsity, -_VALUES.get(self.value_dtype or "", 32)

    @property
    def is_exact(self) -> bool:
        """True if gradients are summed as the framework would, thresholded and rounded nowhere."""
        return self.value_dtype in (None, LOSSLESS)

    def __str__(self) -> str:
        if self.value_dtype == LOSSLESS:
            return "dense, lossless code"
        if self.is_dense:
            return "dense"
        topology = f", {self.exchange.replace('_', '-')} exchange" if self.exchange else ""
        return f"sparsity {self.sparsity:g}, {self.value_dtype} values{topology}"


def settings_within(
    config: DataParallelConfig, *, all_types: bool = True, lossless: bool = True
) -> list[Setting]:
    """Return the settings that the automatic mode may choose, the dense exchange first.

    Args:
        config: Its sparsity is the highest one that its quality class allows, its value type the widest.
        all_types: Whether types of fewer bits may be chosen, too.
        lossless: Whether the lossless code may be chosen, too.
    """
    coded = [Setting(0.0, LOSSLESS)] if lossless else []
    if config.quality == "exact":
        return [Setting(), *coded]
    most_bits = _bits(config)
    values = [name for name, bits in _VALUES.items() if bits <= most_bits]
    if not (values and all_types):
        values = [config.value_dtype]
    sparsities = [each for each in _SPARSITIES if each < config.sparsity]
    if not config.sparsity:
        return [Setting(), *coded, Setting(0.0, values[0])]
    sparsities.append(config.sparsity)
    return [Setting(), Setting(0.0, values[0]), *(Setting(*each) for each in product(sparsities, values))]


def _bits(settings: DataParallelConfig) -> int:
    """Return the bits of a value on the wire."""
    return {"int2": 2, "fp16": 16, **_VALUES}.get(settings.value_dtype, 32)


def exchange_by_rule(settings: DataParallelConfig, ranks: int) -> Literal["direct", "two_phase"]:
    """Return the topology that the settings ask for, or the one with the fewest bytes."""
    if settings.exchange != "auto":
        return settings.exchange
    # A rank sends P-1 messages directly, 2(P-1)/P in two phases: the same bytes for two ranks, one exchange
    # fewer. What owners hold back costs step-ahead quality (measured: docs/quality.md).
    return "direct" if ranks <= (4 if settings.feedback.looks_ahead else 2) else "two_phase"


def alternative_exchange(settings: DataParallelConfig, by_rule: str) -> str | None:
    """Return the topology that the automatic mode may choose in place of the one by rule, or None.

    Every sparsity that is safe lost nothing measurable in both topologies, if owners answer with as many
    entries as by default (``docs/quality.md``).
    """
    measured = settings.quality == "bytes" or settings.server_density >= settings.feedback.server_density
    if settings.quality is None or settings.exchange != "auto" or not measured:
        return None
    return "two_phase" if by_rule == "direct" else "direct"


def safe_sparsity(settings: DataParallelConfig, training: Training) -> float:
    """Return the highest sparsity that lost nothing measurable in a training (``docs/quality.md``)."""
    family = training.family
    if family in (OptimizerFamily.ADAGRAD, OptimizerFamily.SGD):
        return 0.99 if settings.feedback.keeps_residual else 0.0
    if family.loses_by_delay and settings.feedback.looks_ahead:
        measured = _SAFE_AHEAD if family is OptimizerFamily.ADAM else _SAFE_AHEAD[:1]
        return next((most for ranks, most in measured if training.ranks <= ranks), 0.0)
    return 0.0


class Choice(NamedTuple):
    """The feedback that ``auto`` became."""

    settings: DataParallelConfig
    reason: str
    """Why, and with which start, for the log; empty where there is nothing to say."""
    is_second_best: bool = False
    """True if step-ahead would be better and is not available."""


def chosen(
    settings: DataParallelConfig, training: Training, *, steps: int | None = None, obstacle: str = ""
) -> Choice:
    """Return the settings with the feedback that suits the optimizer in place of ``auto``.

    Explicit settings stay as they are, and so do those of a training whose optimizer the plugin was not told.

    Args:
        settings: The settings as they were written.
        training: The optimizer, and where it runs.
        steps: Optimizer steps of the whole run; None if that is not known.
        obstacle: Why step-ahead is not available here; empty if it is.
    """
    family = training.family
    if not isinstance(settings.feedback, AutoFeedback) or family is OptimizerFamily.UNTOLD:
        return Choice(settings, "")
    nothing_waits = settings.sparsity == 0 and settings.parameters is None
    if not settings.enabled or nothing_waits or family in (OptimizerFamily.ADAGRAD, OptimizerFamily.SGD):
        return Choice(_changed(settings, feedback=LocalFeedback()), "")
    is_ahead = family.loses_by_delay and not obstacle
    sparsity = settings.sparsity if is_ahead else min(settings.sparsity, GENTLE)
    start, words = _start(settings, sparsity, steps, is_ahead=is_ahead)
    name = training.optimizer[0]
    if is_ahead:
        made = _changed(settings, feedback=StepAheadFeedback(), **start)
        return Choice(made, f"step-ahead for {name}, {words}")
    made = _changed(settings, feedback=LocalFeedback(), sparsity=sparsity, **start)
    why = obstacle or f"the step of {name} is not known"
    at = f" instead of {settings.sparsity:g}" if sparsity < settings.sparsity else ""
    keep = ' (which "feedback": "local" keeps)' if at else ""
    return Choice(
        made, f"{why}: local error feedback at sparsity {sparsity:g}{at}{keep}, {words}", is_second_best=True
    )


def _start(
    settings: DataParallelConfig, sparsity: float, steps: int | None, *, is_ahead: bool
) -> tuple[dict[str, object], str]:
    """Return the settings of the start of a run of so many steps (None: not known), and a description."""
    dense, ramp = DENSE[0] if is_ahead else DENSE[1], RAMP
    if steps is not None:
        dense, ramp = min(dense, int(steps * SHARES[0])), min(ramp, int(steps * SHARES[1]))
    start: dict[str, object] = {}
    is_free = is_ahead and settings.warmup_steps is None and settings.sparsity_warmup_steps is None
    fall = round(DENSE[0] * ((1.0 - sparsity) ** (-1.0 / FALL) - 1.0))
    if is_free and (steps is None or steps >= DENSE[0] + fall):
        ramp = max(ramp, fall)
        start["expert"] = {**settings.expert.model_dump(exclude_unset=True), "ramp": "power"}
    elif is_free and steps is not None:
        ramp = int(steps * SHARES[1])
    dense = dense if settings.warmup_steps is None else settings.warmup_steps
    ramp = ramp if settings.sparsity_warmup_steps is None else settings.sparsity_warmup_steps
    start |= {"warmup_steps": dense, "sparsity_warmup_steps": ramp}
    length = f" (of {steps} steps)"
    if steps is None:
        made = _changed(settings, sparsity=sparsity, **start)
        short, long = (_times_fewer(made, of) for of in (300, 600))
        length = (
            "; the length of the run is not known (data_parallel.total_steps): its first 300 steps send "
            f"{short:.0f}x fewer bytes than fp32, its first 600 {long:.0f}x"
        )
    return start, f"after {dense} dense steps and a ramp of {ramp}{length}"


def _times_fewer(settings: DataParallelConfig, steps: int) -> float:
    """Return how many times fewer bytes than fp32 the first steps send, with positions as bits or bytes."""
    bits, densities = _bits(settings), map(settings.schedule.density, range(steps))
    return 32 * steps / sum(32 if each == 1.0 else bits * each + min(1.0, 8 * each) for each in densities)


def _changed(settings: DataParallelConfig, **changes: object) -> DataParallelConfig:
    return DataParallelConfig.of({**settings.model_dump(exclude_unset=True), **changes})


class Judgement(NamedTuple):
    """The settings of a training as they are applied, and what is to be said about them."""

    settings: DataParallelConfig
    line: str
    """Says which feedback was chosen, or that the settings are known to lose; empty where neither is so."""
    warns: bool
    """True where the line is a warning."""


def judged(
    written: DataParallelConfig,
    training: Training,
    *,
    steps: int | None = None,
    obstacle: str = "",
    untold: str = "",
) -> Judgement:
    """Choose the feedback, and say what it became or what the settings are known to lose.

    Args:
        written: The settings as they were written.
        training, steps, obstacle: See :func:`chosen`.
        untold: What to do so that the plugin knows the optimizer, in words.
    """
    if written.quality == "exact":
        feedback = LocalFeedback() if isinstance(written.feedback, AutoFeedback) else written.feedback
        return Judgement(_changed(written, feedback=feedback, sparsity=0.0), "", False)
    steps = written.total_steps or steps
    settings, line, is_second_best = chosen(written, training, steps=steps, obstacle=obstacle)
    if settings.quality == "safe":
        most = safe_sparsity(settings, training)
        if most == 0 and settings.sparsity:
            return Judgement(*_without_sparsity(written, training), False)
        settings = _changed(settings, sparsity=min(settings.sparsity, most))
    found = next(known_losses(settings, training), None)
    if found is not None and is_second_best:
        line += f" (known to lose {found.loss})"
    elif found is not None and not line:
        name = training.optimizer[0] if training.optimizer else "the optimizer"
        line = (
            f"{name} with feedback = '{written.feedback.label()}' at sparsity "
            f"{written.sparsity:g} is known to lose {found.loss}; better: {found.change} "
            f"(docs/quality.md#{found.source})"
        )
    elif training.family is OptimizerFamily.UNTOLD and isinstance(written.feedback, AutoFeedback):
        line = f"{_UNTOLD}; {untold}"
    return Judgement(settings, line, bool(line) and (found is not None or is_second_best))


def _without_sparsity(written: DataParallelConfig, training: Training) -> tuple[DataParallelConfig, str]:
    """Return the settings of a training for which no sparsity is known to be safe, and a line about it."""
    feedback = LocalFeedback() if isinstance(written.feedback, AutoFeedback) else written.feedback
    name = training.optimizer[0] if training.optimizer else "an optimizer that the plugin was not told"
    where = f"{training.ranks} ranks" + (f" under ZeRO-{training.stage}" if training.stage else "")
    line = (
        f"quality 'safe': no sparsity is known to lose nothing with {name} on {where}; all entries are sent, "
        "dense or in bf16"
    )
    return _changed(written, feedback=feedback, sparsity=0.0), line
