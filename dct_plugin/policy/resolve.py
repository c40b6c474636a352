"""The settings that a section becomes for a training: decided once, with reasons, and read by all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..config import AutoFeedback, DataParallelConfig, LocalFeedback, NoFeedback
from ..config.data_parallel import ParametersConfig, StepAheadFeedback
from ..errors import ConfigError
from .evidence import (
    EXACT_UPDATES,
    FINE_TUNING_LR,
    MEASURED_UPDATES,
    Training,
    known_losses,
    measured_with,
    size_of,
)
from .optimizers import OptimizerFamily
from .rules import (
    DENSITY_OPTIONS,
    bits_of,
    changed,
    compresses,
    safe_sparsity,
    says_density,
    thresholds_of,
    with_thresholds,
)

#: Dense steps with step-ahead and without, steps after them in which the density falls, and the largest share
#: of a run for each.
DENSE, RAMP, SHARES = (40, 60), 180, (0.1, 0.6)
#: With step-ahead the density falls with this power of the step, unless the run is too short for it.
FALL = 1.5
#: Runs of fewer steps have a shorter start, which lost 0.03 to 0.05 nats
#: (docs/quality.md#the-start-by-the-length-of-the-run).
SHORT = 862
#: All entries in few bits: where thresholds lose quality, or their loss was not measured.
ALL_ENTRIES: dict[str, object] = {"sparsity": 0.0, "value_dtype": "int8"}
#: What crosses of updates in each step: a sixteenth in int4, or all in signs.
UPDATES: dict[OptimizerFamily, dict[str, object]] = {
    OptimizerFamily.ADAM: {"sparsity": 0.9375, "value_dtype": "int4"},
    OptimizerFamily.MUON: {"sparsity": 0.0, "value_dtype": "sign"},
}
#: Where ranks shard one copy, vectors cross dense by their shape; smaller matrices save less than a header.
SHARED_MIN_NUMEL = 1024
_UPDATES = "docs/updates.md"
_ALL_ENTRIES = (
    "all entries are sent, in int8, 3.9x fewer bytes than fp32 (AdamW lost 0.0002 nats so, "
    "docs/quality.md#fine-tuning)"
)


@dataclass(frozen=True)
class AppliedSettings:
    """The settings of a training as they are applied, and what is to be said about them.

    Attributes:
        settings: The settings that all layers read.
        compressors: Ranks or nodes that exchange messages.
        inside: Ranks of a node, each of which keeps a part of the node's residuals.
        line: Says what was chosen and why, or that the settings are known to lose; empty where neither is so.
        warns: True where the line is a warning: the settings are known to lose, or lack what was written.
        updates: Says how updated weights are gathered by default; empty where the host gathers none, or the
            section says it.
    """

    settings: DataParallelConfig
    compressors: int
    line: str = ""
    warns: bool = False
    updates: str = ""
    inside: float = 1.0

    @property
    def lines(self) -> list[str]:
        """The lines to log."""
        return [line for line in (self.line, self.updates) if line]


def resolve(
    written: DataParallelConfig, training: Training, compressors: int | None = None
) -> AppliedSettings:
    """Return the settings that a training gets, with the reasons.

    Args:
        written: The settings as they were written.
        training: The optimizer, and where it runs.
        compressors: Ranks or nodes that exchange messages; None: every rank.
    """
    count = training.ranks if compressors is None else compressors
    if not written.enabled:
        return AppliedSettings(written, count)
    if written.exchange_of == "updates":
        return _exchange_of_updates(written, training, count)
    if written.local_steps is not None:
        return _local_steps(written, training, count)
    if training.shares_copy:
        return _with_updates(_sharing_copy(written, training, count), written, training)
    made = _with_residuals(_with_losses(written, training, count), training)
    made = replace(made, inside=training.ranks / count if training.ranks and count else 1.0)
    return _with_updates(_compared(made, written, training), written, training)


def _compared(made: AppliedSettings, written: DataParallelConfig, training: Training) -> AppliedSettings:
    """Have the ranks compare the settings with dense steps, unless the section says the density."""
    is_off = "quality" in written.model_fields_set and written.quality is None
    has_updates = written.parameters not in (None, "exact")
    if says_density(written) or is_off or has_updates or not training.is_timed:
        return made
    return replace(made, settings=changed(made.settings, quality="if_faster"))


def _with_residuals(made: AppliedSettings, training: Training) -> AppliedSettings:
    """Keep residuals in int8 under ZeRO-3, unless the section says their type."""
    settings = made.settings
    if training.stage != 3 or settings.residual_dtype != "auto" or not settings.feedback.keeps_residual:
        return made
    return replace(made, settings=changed(settings, residual_dtype="int8"))


def _with_updates(made: AppliedSettings, written: DataParallelConfig, training: Training) -> AppliedSettings:
    """Exchange updated weights exactly where that can be had, unless the section says how."""
    unavailable = training.exact_unavailable
    is_written = "parameters" in written.model_fields_set
    if unavailable is None or is_written or not compresses(made.settings):
        return made
    if unavailable and training.int8_copies:
        updates = (
            "weights are gathered from a copy in int8 on each rank, 1.02 bytes a parameter, of which changed "
            f"codes cross (parameters null gathers them whole): {unavailable}"
        )
        return replace(made, settings=changed(made.settings, parameters="int8"), updates=updates)
    if unavailable:
        return replace(made, updates=f"updated weights are gathered whole: {unavailable}")
    return replace(
        made,
        settings=changed(made.settings, parameters="exact"),
        updates="updated weights cross where their bits changed if that is faster than a gather, with the "
        "same bits (parameters 'exact'; null leaves it out): "
        f"{EXACT_UPDATES.what} (docs/{EXACT_UPDATES.source})",
    )


def _with_losses(written: DataParallelConfig, training: Training, count: int) -> AppliedSettings:
    """Return the settings with their feedback and density, and say what they are known to lose."""
    if written.quality == "dense":
        return AppliedSettings(_without_sparsity(written), count)
    made = _suited(written, training, count)
    if made.settings.quality == "safe":
        most = safe_sparsity(made.settings, training, count)
        if most == 0 and made.settings.sparsity:
            return AppliedSettings(_without_sparsity(written), count, _nothing_safe(training))
        made = replace(made, settings=changed(made.settings, sparsity=min(made.settings.sparsity, most)))
    loss = next(known_losses(made.settings, training, count), None)
    if loss is None:
        return made
    better = f"better: {loss.better(training)}{_nothing_written(written, training, count)}"
    if made.line:
        return replace(made, line=f"{made.line} (known to lose {loss.loss}; {better})", warns=True)
    line = (
        f"{training.name} with feedback = '{written.feedback.label()}' at sparsity "
        f"{made.settings.sparsity:g} is known to lose {loss.loss}; {better} "
        f"(docs/quality.md#{loss.source}, {size_of(loss.model)})"
    )
    return replace(made, line=line, warns=True)


def _nothing_written(written: DataParallelConfig, training: Training, count: int) -> str:
    """Return what a section without density and feedback would get, in words; empty if that is this one."""
    values = written.model_dump(exclude_unset=True)
    plain = {key: value for key, value in values.items() if key not in {*DENSITY_OPTIONS, "feedback"}}
    if plain == values or "parameters" in plain:
        return ""
    return (
        f"; with nothing written: {resolve(DataParallelConfig.of(plain), training, count).settings.summary}"
    )


def _suited(written: DataParallelConfig, training: Training, count: int) -> AppliedSettings:
    """Return the settings with the feedback and the thresholds that suit the optimizer.

    What is written stays as it is. With nothing written thresholds are taken only where their loss was
    measured; elsewhere all entries are sent.
    """
    if not isinstance(written.feedback, AutoFeedback):
        return AppliedSettings(with_thresholds(written, training, count), count)
    thresholds_updates = isinstance(written.parameters, ParametersConfig)
    is_free = not says_density(written) and not thresholds_updates
    steps = written.total_steps or training.steps
    if is_free and (reason := _unmeasured(training, count, steps)):
        # A residual would take a byte per parameter, and bring nothing (docs/quality.md#one-mesh).
        keeps_none = training.stage == 3 and written.residual_dtype == "auto"
        feedback = NoFeedback() if keeps_none else LocalFeedback()
        made = changed(written, feedback=feedback, **ALL_ENTRIES)
        return AppliedSettings(made, count, f"{reason}: {_ALL_ENTRIES}{_offer(training)}")
    family = training.family
    is_ahead = family.loses_by_delay and not training.step_ahead_unavailable
    settings = changed(written, feedback=StepAheadFeedback() if is_ahead else LocalFeedback())
    nothing_waits = written.sparsity == 0 and not thresholds_updates
    if nothing_waits or family in (OptimizerFamily.ADAGRAD, OptimizerFamily.SGD):
        return AppliedSettings(changed(settings, feedback=LocalFeedback()), count)
    if family is OptimizerFamily.UNTOLD:
        hint = f"the optimizer was not told ({training.optimizer_unknown_hint}): local error feedback"
        return AppliedSettings(settings, count, hint, warns=True)
    settings = with_thresholds(settings, training, count)
    start, words = _start(settings, settings.total_steps or training.steps, is_ahead=is_ahead)
    settings = changed(settings, **start)
    if is_ahead:
        facts = f"{training.facts(count)}; measured with a {measured_with(family)}".removeprefix("; ")
        return AppliedSettings(settings, count, f"step-ahead for {training.name}, {words}; {facts}")
    why = training.step_ahead_unavailable or f"the step of {training.name} is not known"
    line = f"{why}: local error feedback at sparsity {settings.sparsity:g}, {words}"
    return AppliedSettings(settings, count, line, warns=True)


def _unmeasured(training: Training, count: int, steps: int | None) -> str:
    """Return why a training of so many steps (None: not known) should not have thresholds; empty where they
    were measured to lose nothing.
    """
    family, name, facts = training.family, training.name, training.facts(count)
    if family is OptimizerFamily.UNTOLD:
        return f"the optimizer was not told ({training.optimizer_unknown_hint})"
    if family is OptimizerFamily.MUON:
        return f"{name} loses by thresholds (docs/quality.md#muon)"
    if family is OptimizerFamily.OTHER:
        return f"the step of {name} is not known"
    if training.is_fine_tuning:
        where = "docs/quality.md#fine-tuning"
        return f"{name} at {training.lr:g} is fine-tuning, which loses by thresholds ({where})"
    if training.clips_momentum:
        return f"{name} loses by thresholds where gradients are clipped (docs/quality.md#pictures)"
    if family.loses_by_delay and training.step_ahead_unavailable:
        return training.step_ahead_unavailable
    if family.loses_by_delay and steps is not None and steps < SHORT:
        where = "docs/quality.md#the-start-by-the-length-of-the-run"
        return f"a run of {steps} steps is too short for the start of thresholds that loses nothing ({where})"
    if thresholds_of(training, count) is None:
        where = "docs/quality.md#many-compressors"
        return f"thresholds lose quality or were not measured with {name}, {facts} ({where})"
    return ""


def _start(settings: DataParallelConfig, steps: int | None, *, is_ahead: bool) -> tuple[dict[str, Any], str]:
    """Return the settings of the start of a run of so many steps (None: not known), and a description."""
    dense = _of_run(DENSE[0] if is_ahead else DENSE[1], SHARES[0], steps)
    ramp = _of_run(RAMP, SHARES[1], steps)
    start: dict[str, Any] = {}
    is_free = is_ahead and settings.warmup_steps is None and settings.sparsity_warmup_steps is None
    fall = round(DENSE[0] * ((1.0 - settings.sparsity) ** (-1.0 / FALL) - 1.0))
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
        made = changed(settings, **start)
        short, long = (_times_fewer(made, count) for count in (300, 600))
        length = (
            "; the length of the run is not known (data_parallel.total_steps): its first 300 steps send "
            f"{short:.0f}x fewer bytes than fp32, its first 600 {long:.0f}x"
        )
    return start, f"after {dense} dense steps and a ramp of {ramp}{length}"


def _times_fewer(settings: DataParallelConfig, steps: int) -> float:
    """Return how many times fewer bytes than fp32 the first steps send, with positions as bits or bytes."""
    bits, densities = bits_of(settings), map(settings.schedule.density, range(steps))
    return 32 * steps / sum(32 if share == 1.0 else bits * share + min(1.0, 8 * share) for share in densities)


def _local_steps(written: DataParallelConfig, training: Training, count: int) -> AppliedSettings:
    """Return the settings of local steps, and a line about them."""
    rule = written.local_steps
    assert rule is not None
    dense = _of_run(DENSE[1], SHARES[0], written.total_steps or training.steps)
    suited = {**ALL_ENTRIES, "warmup_steps": dense} | written.model_dump(exclude_unset=True)
    made = changed(written, **{**suited, "feedback": NoFeedback(), "nodes": 1})
    what = "" if rule.fragments == 1 else f"1/{rule.fragments} of "
    arrives = f"; its mean arrives {rule.delay} steps later" if rule.delay else ""
    line = (
        f"local steps: after {made.warmup_steps} dense steps the ranks exchange {what}their progress every "
        f"{rule.period} steps, and train alone in between{arrives}"
    )
    return AppliedSettings(made, count, line)


def _exchange_of_updates(written: DataParallelConfig, training: Training, count: int) -> AppliedSettings:
    """Return the settings of an exchange of updates, and a line about them.

    Raises:
        ConfigError: It was not measured with this optimizer.
    """
    if training.family not in UPDATES:
        raise ConfigError(
            f"dct.data_parallel.exchange_of = 'updates' was not measured with {training.name}; it is for "
            "Adam, AdamW and Muon: leave it out"
        )
    suited = {**UPDATES[training.family], "warmup_steps": 0} | written.model_dump(exclude_unset=True)
    every_step = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    fixed = {"feedback": LocalFeedback(), "nodes": 1, "local_steps": every_step}
    made = changed(written, **{**suited, **fixed})
    if training.family is OptimizerFamily.ADAM and training.lr > FINE_TUNING_LR:
        rate = "" if training.lr == math.inf else f" at {training.lr:g}"
        loss = "lost 0.15 nats by an exchange of updates in pre-training (simulated)"
        line = f"{training.name}{rate} {loss}: leave it out"
        return AppliedSettings(made, count, f"{line} ({_UPDATES})", warns=True)
    return AppliedSettings(
        made,
        count,
        f"exchange of updates for {training.name}: each rank's optimizer uses its own gradients, so .grad "
        f"and the optimizer's states differ; detach() at the end exchanges what was not sent ({_UPDATES})",
    )


def _offer(training: Training) -> str:
    """Return what an exchange of updates was measured to save and to lose, in words; empty where it cannot be
    had, or the optimizer should not have it.
    """
    measured = MEASURED_UPDATES.get(training.family)
    can = not training.stage and training.exact_unavailable is None
    if measured is None or not can or training.family.loses_by_delay > training.is_fine_tuning:
        return ""
    memory = "keeps 8 bytes per parameter, with fp32 weights or masters"
    price = f"{measured.what} and {memory} (docs/{measured.source})"
    return f'; "exchange_of": "updates" sends {price}'


def _sharing_copy(written: DataParallelConfig, training: Training, count: int) -> AppliedSettings:
    """Return the settings of ranks that shard one copy. Nothing waits: thresholds lost 0.1 nats there."""
    suited = {**ALL_ENTRIES, "min_numel": SHARED_MIN_NUMEL, **written.model_dump(exclude_unset=True)}
    made = changed(written, **{**suited, "feedback": NoFeedback()})
    line = f"all entries of a gradient cross to their owner, in {made.value_dtype}, without a residual"
    return AppliedSettings(made, count, line, inside=training.ranks / count)


def _of_run(count: int, share: float, steps: int | None) -> int:
    """Return a number of steps, at most a share of a run of so many steps (None: not known)."""
    return count if steps is None else min(count, int(steps * share))


def _without_sparsity(written: DataParallelConfig) -> DataParallelConfig:
    """Return the settings of a training in which every entry is sent."""
    feedback = LocalFeedback() if isinstance(written.feedback, AutoFeedback) else written.feedback
    return changed(written, feedback=feedback, sparsity=0.0)


def _nothing_safe(training: Training) -> str:
    where = f"{training.ranks} ranks" + (f" under ZeRO-{training.stage}" if training.stage else "")
    clipped = " and clipped gradients" if training.clips_momentum else ""
    how = " in fine-tuning" if training.is_fine_tuning else clipped
    return (
        f"quality 'safe': no sparsity is known to lose nothing with {training.name}{how} on {where}; all "
        "entries are sent, dense or in bf16"
    )
