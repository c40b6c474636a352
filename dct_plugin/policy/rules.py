"""Rules for settings that depend on the number of compressors: ranks, or nodes that are summed first; and the
settings that are compared by measurement.
"""

from __future__ import annotations

from itertools import product
from typing import Literal, NamedTuple

from ..config import DataParallelConfig
from .evidence import THRESHOLDS, MeasuredThresholds, Training

#: Sparsities and value types that the automatic mode chooses from, within the limits of a configuration.
_SPARSITIES, _VALUES = (0.9, 0.97, 0.99), {"bf16": 16, "int8": 8, "int4": 4}
_BITS = {"sign": 1, "int2": 2, "log4": 4, "fp16": 16, "fp32": 32, **_VALUES}


class Setting(NamedTuple):
    """A sparsity and the type of its values, as the automatic mode chooses them."""

    sparsity: float = 0.0
    value_dtype: str | None = None
    """Type of the values; None: the dense exchange of the framework."""

    @property
    def is_dense(self) -> bool:
        return self.value_dtype is None

    @property
    def strength(self) -> tuple[float, int]:
        """Order from gentle to strong: by sparsity, then by bits left out."""
        return self.sparsity, -_BITS.get(self.value_dtype or "", 32)

    def __str__(self) -> str:
        if self.is_dense:
            return "dense"
        return f"sparsity {self.sparsity:g}, {self.value_dtype} values"


def settings_within(config: DataParallelConfig, *, all_types: bool = True) -> list[Setting]:
    """Return the settings that the automatic mode may choose, the dense exchange first.

    Args:
        config: Its sparsity is the highest one that its quality class allows, its value type the widest.
        all_types: Whether types of fewer bits may be chosen, too.
    """
    if config.quality == "dense":
        return [Setting()]
    if config.quality == "if_faster":
        all_entries = Setting(0.0, "int8" if all_types else config.value_dtype)
        return [*dict.fromkeys((Setting(), all_entries, Setting(config.sparsity, config.value_dtype)))]
    most_bits = bits_of(config)
    values = [name for name, bits in _VALUES.items() if bits <= most_bits]
    if not (values and all_types):
        values = [config.value_dtype]
    sparsities = [each for each in _SPARSITIES if each < config.sparsity]
    if not config.sparsity:
        return [Setting(), Setting(0.0, values[0])]
    sparsities.append(config.sparsity)
    return [Setting(), Setting(0.0, values[0]), *(Setting(*each) for each in product(sparsities, values))]


def every_default() -> list[Setting]:
    """Return the settings that sections without density may get, the dense exchange first."""
    rows = {Setting(row.sparsity, row.value_dtype): None for row in THRESHOLDS}
    return [Setting(), Setting(0.0, "int8"), *rows]


def compresses(settings: DataParallelConfig) -> bool:
    """Return whether fewer bytes cross than those of all entries in 16 bits, or may by measurement."""
    return bool(settings.sparsity or settings.quality is not None or bits_of(settings) < 16)


def bits_of(settings: DataParallelConfig) -> int:
    """Return the bits of a value on the wire."""
    return _BITS[settings.value_dtype]


#: Options that say how much of a gradient is sent: rules leave settings alone that have one of them.
DENSITY_OPTIONS = {"sparsity", "value_dtype", "quality", "adaptive"}
#: Up to so many compressors step-ahead sends its messages directly.
FEW_COMPRESSORS = 4


def says_density(settings: DataParallelConfig) -> bool:
    """Return whether settings say how much of a gradient is sent."""
    written = settings.model_fields_set & DENSITY_OPTIONS
    return bool(written - ({"quality"} if settings.quality in (None, "if_faster") else set()))


def changed(settings: DataParallelConfig, **changes: object) -> DataParallelConfig:
    """Return validated settings with changes; what was not written stays a default."""
    return DataParallelConfig.of({**settings.model_dump(exclude_unset=True), **changes})


def compressors_of(settings: DataParallelConfig, ranks: int, ranks_per_node: int = 1) -> int:
    """Return how many ranks, or nodes that are summed first, exchange messages.

    Args:
        settings: ``nodes`` says which ranks are a node.
        ranks: Data-parallel ranks; 0 if they are not known.
        ranks_per_node: Those of a machine, which ``"nodes": "auto"`` takes.
    """
    inside = ranks_per_node if settings.nodes == "auto" else settings.nodes
    is_one_machine = settings.nodes == "auto" and inside >= ranks
    is_flat = settings.local_steps is not None or ranks % inside or is_one_machine
    return ranks if is_flat else ranks // inside


def thresholds_of(training: Training, compressors: int, *, loses: bool = False) -> MeasuredThresholds | None:
    """Return the thresholds that were measured for an optimizer between so many compressors.

    Args:
        training: The optimizer.
        compressors: Ranks or nodes that exchange messages.
        loses: Also return a row that loses quality, rather than none.
    """
    rows = (
        row
        for row in THRESHOLDS
        if compressors <= row.most and training.family in row.families and (loses or not row.loses)
    )
    return next(rows, None)


def with_thresholds(settings: DataParallelConfig, training: Training, count: int) -> DataParallelConfig:
    """Return settings of step-ahead that say no density with the sparsity, the value type and the density of
    answers for so many compressors; an expert setting that is written stays. Others are returned as they are.
    """
    row = thresholds_of(training, count, loses=True)
    if says_density(settings) or not settings.feedback.looks_ahead or row is None:
        return settings
    if (row.sparsity, row.value_dtype) == (settings.sparsity, settings.value_dtype):
        return settings
    expert = {"server_density": row.server_density} | settings.expert.model_dump(exclude_unset=True)
    return changed(settings, sparsity=row.sparsity, value_dtype=row.value_dtype, expert=expert)


def exchange_by_rule(settings: DataParallelConfig, ranks: int) -> Literal["direct", "two_phase"]:
    """Return the topology that the settings ask for, or the one with the fewest bytes."""
    if settings.exchange != "auto":
        return settings.exchange
    # A rank sends P-1 messages directly, 2(P-1)/P in two phases: the same bytes for two ranks, one exchange
    # fewer. What owners hold back costs step-ahead quality (measured: docs/quality.md).
    return "direct" if ranks <= (FEW_COMPRESSORS if settings.feedback.looks_ahead else 2) else "two_phase"


def safe_sparsity(settings: DataParallelConfig, training: Training, compressors: int) -> float:
    """Return the highest sparsity that lost nothing measurable in a training (``docs/quality.md``)."""
    row, feedback = thresholds_of(training, compressors), settings.feedback
    ahead = training.family.loses_by_delay
    loses = training.is_fine_tuning or training.clips_momentum
    if row is None or loses or not feedback.keeps_residual or ahead > feedback.looks_ahead:
        return 0.0
    return row.sparsity
