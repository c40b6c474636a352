"""Settings that are known to lose quality: the measured loss of each, and what to change.

The figures are rows of ``docs/quality.md``. A setting that is not here was not measured, or lost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .data_parallel import DataParallelConfig
from .optimizers import OptimizerFamily, family_of

_F = OptimizerFamily
_NEEDS_MOMENTS = (_F.ADAM, _F.RMSPROP)


@dataclass(frozen=True)
class Training:
    """The facts of a training, besides the section, that decide what thresholds cost.

    Attributes:
        optimizer: Names of the optimizer's class and its base classes, or its type in DeepSpeed's JSON;
            empty if it is not known.
        momentum: The optimizer's ``momentum``.
        stage: ZeRO stage; 0 without ZeRO.
        ranks: Data-parallel ranks, 0 if not known.
    """

    optimizer: Sequence[str] = ()
    momentum: float = 0.0
    stage: int = 0
    ranks: int = 0
    family: OptimizerFamily = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", family_of(self.optimizer, momentum=self.momentum))


class KnownLoss(NamedTuple):
    """A setting that is known to lose; it applies where all of its conditions do."""

    loss: str
    """The measured loss, and the training that lost it."""
    change: str
    """The line of the section to change."""
    source: str
    """The section of docs/quality.md."""
    families: Sequence[OptimizerFamily]
    feedback: Sequence[str] = ("local", "auto")
    """Kinds of feedback; ``auto`` is local where the optimizer is not known."""
    sparsity: float = 0.0
    """The least sparsity."""
    stage: int | None = None
    """The ZeRO stage; None: any."""
    ranks: int = 0
    """The least number of ranks."""
    without_start: bool = False
    """Only without dense steps and ramp."""
    updates: float | None = None
    """Only with thresholded updates of the weights (``parameters``), of at least this sparsity."""

    def applies(self, settings: DataParallelConfig, training: Training) -> bool:
        """Return whether a training has this setting."""
        return (
            training.family in self.families
            and settings.feedback.label() in self.feedback
            and settings.sparsity >= self.sparsity
            and self.stage in (None, training.stage)
            and training.ranks >= self.ranks
            and not (self.without_start and settings.dense_steps + settings.ramp_steps)
            and (self.updates is None or self._has_updates(settings))
        )

    def _has_updates(self, settings: DataParallelConfig) -> bool:
        return settings.parameters is not None and settings.parameters.sparsity >= (self.updates or 0.0)


_STEP_AHEAD = 'leave "feedback" out, or set it to "step_ahead"'
_START = '"warmup_steps": 60, "sparsity_warmup_steps": 180'

#: The first one that applies to a training is the one to tell.
KNOWN_LOSSES = (
    KnownLoss(
        "0.013 to 0.020 AUC (DLRM, 477 steps, any optimizer)",
        'leave "feedback" out',
        "error-feedback-and-the-optimizer",
        tuple(_F),
        feedback=("none",),
        sparsity=0.97,
    ),
    KnownLoss(
        "0.23 nats at 0.99 (char GPT, AdamW, 1,200 steps, 2 ranks)",
        '"sparsity": 0.9, or step-ahead, which ZeRO stage 1 and 2 have, and copies in nodes '
        "(docs/nodes.md#zero-3)",
        "zero-3",
        _NEEDS_MOMENTS,
        sparsity=0.97,
        stage=3,
    ),
    KnownLoss(
        "0.05 nats at 0.9 (char GPT, AdamW, 1,200 steps, 2 ranks)",
        "step-ahead, which ZeRO stage 1 and 2 have, and copies in nodes (docs/nodes.md#zero-3)",
        "zero-3",
        _NEEDS_MOMENTS,
        sparsity=0.9,
        stage=3,
    ),
    KnownLoss(
        "0.08 nats with updates at 0.97 (char GPT, AdamW, 1,200 steps, 2 ranks)",
        _STEP_AHEAD,
        "updated-weights-under-zero-1",
        _NEEDS_MOMENTS,
        updates=0.0,
    ),
    KnownLoss(
        "0.2 nats after 1,200 steps and 0.9 after 300 at 0.99 (char GPT, Adam, 2 ranks)",
        _STEP_AHEAD,
        "the-first-hour",
        _NEEDS_MOMENTS,
        sparsity=0.97,
    ),
    KnownLoss(
        "with Adam 0.2 nats after 1,200 steps and 0.9 after 300 at 0.99 (char GPT, 2 ranks)",
        'leave "feedback" out, which takes "sparsity": 0.9',
        "the-first-hour",
        (_F.OTHER,),
        sparsity=0.97,
    ),
    KnownLoss(
        "with Adam 0.05 nats after 1,200 steps and 0.18 after 300 at 0.9 (char GPT, 2 ranks)",
        "a method step_unit(group) of the optimizer, for step-ahead",
        "the-first-hour",
        (_F.OTHER,),
        sparsity=0.9,
    ),
    KnownLoss(
        "0.10 nats after 300 steps at 0.99 (char GPT, Adam, 2 ranks, no start)",
        f'leave "feedback" out, or {_START}',
        "the-first-hour",
        _NEEDS_MOMENTS,
        feedback=("step_ahead",),
        sparsity=0.97,
        without_start=True,
    ),
    KnownLoss(
        "0.05 nats after 1,200 steps and 0.18 after 300 at 0.9 (char GPT, Adam, 2 ranks)",
        _STEP_AHEAD,
        "the-first-hour",
        _NEEDS_MOMENTS,
        sparsity=0.9,
    ),
    KnownLoss(
        "0.017 AUC at 0.99 (DLRM, 477 steps, momentum 0.9, 2 workers)",
        _STEP_AHEAD,
        "error-feedback-and-the-optimizer",
        (_F.MOMENTUM,),
        sparsity=0.97,
    ),
    KnownLoss(
        "0.034 AUC in one run of three at 0.99 (DLRM, Adagrad, 2 ranks)",
        f'leave "feedback" out, or {_START}',
        "step-ahead-adam-at-99-",
        (_F.ADAGRAD,),
        feedback=("step_ahead",),
        sparsity=0.97,
        without_start=True,
    ),
    KnownLoss(
        "0.06 nats with updates at 0.97 on 8 ranks (char GPT, AdamW, 1,200 steps)",
        '"sparsity": 0.96 and "parameters": {"sparsity": 0.9}, both with "value_dtype": "int4"',
        "many-compressors",
        _NEEDS_MOMENTS,
        feedback=("step_ahead",),
        sparsity=0.97,
        ranks=8,
        updates=0.97,
    ),
)


def known_losses(settings: DataParallelConfig, training: Training) -> Iterator[KnownLoss]:
    """Yield what the settings are known to lose in a training, the one to tell first."""
    if settings.enabled:
        yield from (each for each in KNOWN_LOSSES if each.applies(settings, training))
