"""The measurements behind the settings: ``evidence.json``, a row for each, with its page and model.

What was not measured has no row. A test holds the figures against the pages that the rows name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import NamedTuple

from pydantic import TypeAdapter

from ..config import DataParallelConfig, ParametersConfig
from .optimizers import OptimizerFamily, family_of

#: Families whose rows count where a family has none.
_RELATIVES = {OptimizerFamily.RMSPROP: (OptimizerFamily.ADAM,)}
#: The highest learning rate that is taken for fine-tuning. Pre-training has 1.5e-4 and more up to 70B
#: parameters.
FINE_TUNING_LR = 1e-4


@dataclass(frozen=True)
class Training:
    """The facts of a training, besides the section, that decide what thresholds cost.

    Attributes:
        optimizer: Names of the optimizer's class and its base classes, or its type in DeepSpeed's JSON;
            empty if it is not known.
        momentum: The optimizer's ``momentum``.
        stage: ZeRO stage; 0 without ZeRO.
        ranks: Data-parallel ranks, 0 if not known.
        lr: Its highest learning rate; infinity if it is not known.
        clips: Whether gradients are known to be clipped by their norm.
        steps: Optimizer steps of the whole run; None if that is not known.
        step_ahead_unavailable: Why the host cannot have step-ahead, in words; empty if it can.
        optimizer_unknown_hint: What to do so that the plugin knows the optimizer, in words.
        exact_unavailable: Why exact updates of the weights cannot be had, in words; empty if they can, None
            where no weights are gathered after a step.
        precision: Type of the weights, in words; empty if it is not known.
        is_timed: Whether ranks can compare the time of steps: not where their number changes.
        shares_copy: Whether all ranks shard one copy of the model, without replicas (FSDP2 on one mesh).
        int8_copies: Whether weights are gathered from copies in int8 where exact updates cannot be had.
    """

    optimizer: Sequence[str] = ()
    momentum: float = 0.0
    stage: int = 0
    ranks: int = 0
    lr: float = math.inf
    clips: bool = False
    steps: int | None = None
    step_ahead_unavailable: str = ""
    optimizer_unknown_hint: str = ""
    exact_unavailable: str | None = None
    precision: str = ""
    is_timed: bool = True
    shares_copy: bool = False
    int8_copies: bool = False
    family: OptimizerFamily = field(init=False)

    def facts(self, compressors: int) -> str:
        """Return what settings depend on, in words; ``compressors`` exchange messages."""
        rate = f"learning rate {self.lr:g}" if self.lr < math.inf else ""
        ranks = f"{self.ranks} ranks" if self.ranks else ""
        nodes = f"{compressors} nodes" if self.ranks and compressors != self.ranks else ""
        return ", ".join(filter(None, (rate, ranks, nodes, self.precision)))

    def sharing_copy(self, *, in_halves: bool, has_nodes: bool, is_apart: bool) -> Training:
        """Return the facts of these ranks if they shard one copy of the model.

        Args:
            in_halves: Whether weights are gathered in a 16-bit type.
            has_nodes: Whether nodes have several ranks.
            is_apart: Whether every rank is on a machine of its own, or a node because the section says so.
        """
        unavailable = ""
        if not in_halves:
            unavailable = "nearly all fp32 weights change in a step (MixedPrecisionPolicy(param_dtype=bf16))"
        elif not has_nodes:
            unavailable = "every rank is a node, and an exact copy of all weights takes 2 bytes each"
        int8_copies = is_apart and in_halves
        return replace(self, shares_copy=True, exact_unavailable=unavailable, int8_copies=int8_copies)

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", family_of(self.optimizer, momentum=self.momentum))

    @property
    def name(self) -> str:
        """The name of the optimizer."""
        return self.optimizer[0] if self.optimizer else "an optimizer that the plugin was not told"

    @property
    def is_fine_tuning(self) -> bool:
        """True where Adam's learning rate, not noise, limits the steps that step-ahead foresees."""
        return self.family is OptimizerFamily.ADAM and self.lr <= FINE_TUNING_LR

    @property
    def clips_momentum(self) -> bool:
        """True where gradients of SGD with momentum are clipped, which thresholds lose by."""
        return self.family is OptimizerFamily.MOMENTUM and self.clips


class Measured(NamedTuple):
    """A measured figure, and the section of the results that has it."""

    what: str
    source: str
    """Page and section: ``quality.md#zero-3``."""


class MeasuredDefault(NamedTuple):
    """The figures of what a section without density becomes, for an optimizer and a number of ranks."""

    family: OptimizerFamily
    ranks: tuple[int, int]
    """The least and the greatest number of ranks; measured with the greatest."""
    stages: tuple[int, ...]
    """ZeRO stages; 0 without ZeRO."""
    fewer_bytes: Measured
    quality: Measured
    step: Measured | None
    """Times of a step; None: not measured."""
    model: str
    """The model of ``quality``."""
    most_lr: float = math.inf
    """The highest learning rate; such rows are for fine-tuning."""

    @property
    def where(self) -> str:
        """The training that the row was measured in, in words."""
        rate = f", fine-tuning at {self.most_lr:g}" if self.most_lr < math.inf else ""
        return f"{self.family.value} on {self.ranks[1]} ranks, ZeRO {self.stages[0]}{rate}"

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the measurements, each with its label."""
        fewer = ("fewer bytes than fp32", self.fewer_bytes)
        for label, measured in (fewer, ("quality", self.quality), ("step", self.step)):
            model = f", {size_of(self.model)}" if label == "quality" else ""
            found = "not measured" if measured is None else f"{measured.what} (docs/{measured.source}{model})"
            yield label, found

    def suits(self, training: Training) -> bool:
        """Return whether the row was measured for a training."""
        return (
            self.family is training.family
            and self.ranks[0] <= training.ranks <= self.ranks[1]
            and training.stage in self.stages
            and training.lr <= self.most_lr
            and (self.most_lr < math.inf or not training.is_fine_tuning)
        )


class KnownLoss(NamedTuple):
    """A setting that is known to lose; it applies where all of its conditions do."""

    loss: str
    """The measured loss, and the training that lost it."""
    source: str
    """The section of docs/quality.md."""
    model: str
    change: str = ""
    """The line of the section to change; empty: step-ahead, or all entries where a framework has none."""
    families: tuple[OptimizerFamily, ...] = tuple(OptimizerFamily)
    feedback: tuple[str, ...] = ("local", "auto")
    """Kinds of feedback; ``auto`` is local where the optimizer is not known."""
    sparsity: float = 0.0
    """The least sparsity."""
    stage: int | None = None
    """The ZeRO stage; None: any."""
    ranks: int = 0
    """The least number of compressors."""
    without_start: bool = False
    """Only without dense steps and ramp."""
    updates: float | None = None
    """Only with thresholded updates of the weights (``parameters``), of at least this sparsity."""
    most_lr: float = math.inf
    """The highest learning rate."""
    clips: bool = False
    """Only with gradients clipped by their norm."""

    def applies(self, settings: DataParallelConfig, training: Training, compressors: int) -> bool:
        """Return whether a training has this setting."""
        return (
            training.family in self.families
            and settings.feedback.label() in self.feedback
            and settings.sparsity >= self.sparsity
            and self.stage in (None, training.stage)
            and compressors >= self.ranks
            and training.lr <= self.most_lr
            and training.clips >= self.clips
            and not (self.without_start and settings.dense_steps + settings.ramp_steps)
            and (self.updates is None or self._has_updates(settings))
        )

    def better(self, training: Training) -> str:
        """Return what to change in the section of a training."""
        if self.change:
            return self.change
        if training.step_ahead_unavailable:
            return 'leave "sparsity" and "feedback" out, which sends all entries in int8'
        return 'leave "feedback" out, or set it to "step_ahead"'

    def _has_updates(self, settings: DataParallelConfig) -> bool:
        updates = settings.parameters
        return isinstance(updates, ParametersConfig) and updates.sparsity >= (self.updates or 0.0)


class MeasuredThresholds(NamedTuple):
    """Thresholds for optimizers and a number of compressors, which the row was measured with."""

    sparsity: float
    value_dtype: str
    loses: bool
    """True where the thresholds lost quality, or were not measured with these optimizers: nothing takes them
    unless the section asks for thresholds.
    """
    model: str
    source: str
    server_density: float | None = None
    """Density of owners' answers, as a multiple of the density of what they receive."""
    families: tuple[OptimizerFamily, ...] = tuple(OptimizerFamily)
    most: float = math.inf
    """The greatest number of compressors."""


_DATA = json.loads((resources.files(__package__) / "evidence.json").read_text(encoding="utf-8"))


#: The first row that suits has the figures.
MEASURED_DEFAULTS = TypeAdapter(tuple[MeasuredDefault, ...]).validate_python(_DATA["measured_defaults"])
#: The first one that applies to a training is the one to tell.
KNOWN_LOSSES = TypeAdapter(tuple[KnownLoss, ...]).validate_python(_DATA["known_losses"])
#: The first row for an optimizer and a number of compressors counts: loss grows with that number at one
#: density, and fewer bits pay for a higher one.
THRESHOLDS = TypeAdapter(tuple[MeasuredThresholds, ...]).validate_python(_DATA["thresholds"])
#: An exchange of updates by optimizer.
MEASURED_UPDATES = TypeAdapter(dict[OptimizerFamily, Measured]).validate_python(_DATA["exchange_of_updates"])
EXACT_UPDATES = TypeAdapter(Measured).validate_python(_DATA["exact_updates"])


def size_of(model: str) -> str:
    """Return a model of the evidence with its size, in words: ``GPT of 0.35M parameters``."""
    return f"{model} of {_DATA['models'][model]['parameters'] / 1e6:.2f}M parameters"


def measured_with(family: OptimizerFamily) -> str:
    """Return the model that the defaults of a family, or of one like it, were measured with."""
    families = (family, *_RELATIVES.get(family, ()))
    return size_of(next(row.model for row in MEASURED_DEFAULTS if row.family in families))


def known_losses(settings: DataParallelConfig, training: Training, compressors: int) -> Iterator[KnownLoss]:
    """Yield what the settings are known to lose in a training, the one to tell first."""
    if settings.enabled:
        yield from (loss for loss in KNOWN_LOSSES if loss.applies(settings, training, compressors))
