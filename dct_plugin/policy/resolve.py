"""The settings that a section becomes for a training: feedback, start and sparsity, each with its reason."""

from __future__ import annotations

from typing import NamedTuple

from ..config import AutoFeedback, DataParallelConfig, LocalFeedback, NoFeedback
from ..config.data_parallel import StepAheadFeedback
from .evidence import EXACT_UPDATES, Training, known_losses, measured_with, size_of
from .optimizers import OptimizerFamily
from .rules import DENSITY_OPTIONS, changed, safe_sparsity
from .settings import bits_of

#: Dense steps with step-ahead and without, steps after them in which the density falls, and the largest share
#: of a run for each.
DENSE, RAMP, SHARES = (40, 60), 180, (0.1, 0.6)
#: With step-ahead the density falls with this power of the step, unless the run is too short for it.
FALL = 1.5
#: Few bits of all entries, rather than few entries, lose least with Muon, in fine-tuning with Adam, and of
#: the progress of local steps (docs/quality.md#muon, docs/quality.md#fine-tuning, docs/local-steps.md).
ALL_ENTRIES: dict[str, object] = {"sparsity": 0.0, "value_dtype": "int8"}
#: Sparsity of local error feedback where it is known to lose at 0.99, or nothing is known.
GENTLE = 0.9

_UNTOLD = (
    "the optimizer was not told: local error feedback, which with Adam is known to lose (0.2 nats at 0.99 "
    "after 1,200 steps, 0.9 after 300)"
)


class Resolved(NamedTuple):
    """The settings of a training as they are applied, and what is to be said about them."""

    settings: DataParallelConfig
    line: str = ""
    """Says which feedback was chosen, or that the settings are known to lose; empty where neither is so."""
    warns: bool = False
    """True where the line is a warning: step-ahead would be better and is not available, or they lose."""
    updates: str = ""
    """Says how updated weights are gathered by default; empty where the host gathers none, or the section
    says it."""


def _suited(settings: DataParallelConfig, training: Training) -> Resolved:
    """Return the settings, as they were written, with the feedback that suits the optimizer for ``auto``.

    Explicit settings stay as they are, and so do those of a training whose optimizer the plugin was not told.
    """
    family = training.family
    if not isinstance(settings.feedback, AutoFeedback) or family is OptimizerFamily.UNTOLD:
        return Resolved(settings)
    nothing_waits = settings.sparsity == 0 and settings.parameters in (None, "exact")
    if not settings.enabled or nothing_waits or family in (OptimizerFamily.ADAGRAD, OptimizerFamily.SGD):
        return Resolved(changed(settings, feedback=LocalFeedback()))
    name = training.optimizer[0]
    written = settings.model_fields_set & {*DENSITY_OPTIONS, "parameters"}
    if not written and (loses := _loses_by_thresholds(name, training)):
        made = changed(settings, feedback=LocalFeedback(), **ALL_ENTRIES)
        return Resolved(made, f"{loses}: all entries are sent, in int8")
    is_ahead = family.loses_by_delay and not training.step_ahead_unavailable
    sparsity = settings.sparsity if is_ahead else min(settings.sparsity, GENTLE)
    steps = settings.total_steps or training.steps
    start, words = _start(settings, sparsity, steps, is_ahead=is_ahead)
    if is_ahead:
        made = changed(settings, feedback=StepAheadFeedback(), **start)
        return Resolved(made, f"step-ahead for {name}, {words}; measured with a {measured_with(family)}")
    made = changed(settings, feedback=LocalFeedback(), sparsity=sparsity, **start)
    why = training.step_ahead_unavailable or f"the step of {name} is not known"
    at = f" instead of {settings.sparsity:g}" if sparsity < settings.sparsity else ""
    keep = ' (which "feedback": "local" keeps)' if at else ""
    return Resolved(
        made, f"{why}: local error feedback at sparsity {sparsity:g}{at}{keep}, {words}", warns=True
    )


def _loses_by_thresholds(name: str, training: Training) -> str:
    """Say that a training loses by thresholds, and where that was measured; nothing if it does not."""
    if training.family is OptimizerFamily.MUON:
        return f"{name} loses by thresholds (docs/quality.md#muon)"
    if training.is_fine_tuning:
        where = "docs/quality.md#fine-tuning"
        return f"{name} at {training.lr:g} is fine-tuning, which loses by thresholds ({where})"
    return ""


def _start(
    settings: DataParallelConfig, sparsity: float, steps: int | None, *, is_ahead: bool
) -> tuple[dict[str, object], str]:
    """Return the settings of the start of a run of so many steps (None: not known), and a description."""
    dense = _of_run(DENSE[0] if is_ahead else DENSE[1], SHARES[0], steps)
    ramp = _of_run(RAMP, SHARES[1], steps)
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
        made = changed(settings, sparsity=sparsity, **start)
        short, long = (_times_fewer(made, of) for of in (300, 600))
        length = (
            "; the length of the run is not known (data_parallel.total_steps): its first 300 steps send "
            f"{short:.0f}x fewer bytes than fp32, its first 600 {long:.0f}x"
        )
    return start, f"after {dense} dense steps and a ramp of {ramp}{length}"


def _times_fewer(settings: DataParallelConfig, steps: int) -> float:
    """Return how many times fewer bytes than fp32 the first steps send, with positions as bits or bytes."""
    bits, densities = bits_of(settings), map(settings.schedule.density, range(steps))
    return 32 * steps / sum(32 if each == 1.0 else bits * each + min(1.0, 8 * each) for each in densities)


def resolve(written: DataParallelConfig, training: Training) -> Resolved:
    """Choose the feedback and the gather of updated weights, and say what they became, or what the settings
    are known to lose.

    Args:
        written: The settings as they were written.
        training: The optimizer, and where it runs.
    """
    if written.local_steps is not None:
        return _local_steps(written, training)
    made, unavailable = _feedback(written, training), training.exact_unavailable
    fewer = made.settings.sparsity or written.quality is not None or bits_of(made.settings) < 16
    if unavailable is None or "parameters" in written.model_fields_set or not (written.enabled and fewer):
        return made
    if unavailable:
        return made._replace(updates=f"updated weights are gathered whole: {unavailable}")
    return made._replace(
        settings=changed(made.settings, parameters="exact"),
        updates="updated weights cross where their bits changed if that is faster than a gather, with the "
        "same bits (parameters 'exact'; null leaves it out): "
        f"{EXACT_UPDATES.what} (docs/{EXACT_UPDATES.source})",
    )


def _feedback(written: DataParallelConfig, training: Training) -> Resolved:
    """Return the settings with their feedback; see :func:`resolve`."""
    if written.quality == "exact":
        return _without_sparsity(written, training)._replace(line="")
    settings, line, warns, _ = _suited(written, training)
    if settings.quality == "safe":
        most = safe_sparsity(settings, training)
        if most == 0 and settings.sparsity:
            return _without_sparsity(written, training)
        settings = changed(settings, sparsity=min(settings.sparsity, most))
    found = next(known_losses(settings, training), None)
    if found is not None and line:
        line += f" (known to lose {found.loss}; better: {found.change})"
    elif found is not None:
        name = training.optimizer[0] if training.optimizer else "the optimizer"
        line = (
            f"{name} with feedback = '{written.feedback.label()}' at sparsity "
            f"{written.sparsity:g} is known to lose {found.loss}; better: {found.change} "
            f"(docs/quality.md#{found.source}, {size_of(found.model)})"
        )
    elif training.family is OptimizerFamily.UNTOLD and isinstance(written.feedback, AutoFeedback):
        line = f"{_UNTOLD}; {training.optimizer_unknown_hint}"
    return Resolved(settings, line, bool(line) and (found is not None or warns))


def _local_steps(written: DataParallelConfig, training: Training) -> Resolved:
    """Return the settings of local steps, and a line about them."""
    assert written.local_steps is not None
    dense = _of_run(DENSE[1], SHARES[0], written.total_steps or training.steps)
    suited = {**ALL_ENTRIES, "warmup_steps": dense} | written.model_dump(exclude_unset=True)
    made = changed(written, **{**suited, "feedback": NoFeedback(), "nodes": 1})
    line = (
        f"local steps: after {made.warmup_steps} dense steps the ranks exchange their progress every "
        f"{written.local_steps.every} steps, and train alone in between"
    )
    return Resolved(made, line)


def _of_run(count: int, share: float, steps: int | None) -> int:
    """Return a number of steps, at most a share of a run of so many steps (None: not known)."""
    return count if steps is None else min(count, int(steps * share))


def _without_sparsity(written: DataParallelConfig, training: Training) -> Resolved:
    """Return the settings of a training for which no sparsity is known to be safe, and a line about it."""
    feedback = LocalFeedback() if isinstance(written.feedback, AutoFeedback) else written.feedback
    name = training.optimizer[0] if training.optimizer else "an optimizer that the plugin was not told"
    where = f"{training.ranks} ranks" + (f" under ZeRO-{training.stage}" if training.stage else "")
    line = (
        f"quality 'safe': no sparsity is known to lose nothing with {name} on {where}; all entries are sent, "
        "dense or in bf16"
    )
    return Resolved(changed(written, feedback=feedback, sparsity=0.0), line)
