"""Rules for settings that depend on the number of ranks."""

from __future__ import annotations

from typing import Any, Literal

from ..config import DataParallelConfig
from .evidence import BY_COMPRESSORS, SAFE_WITH_STEP_AHEAD, Training
from .optimizers import OptimizerFamily

#: Options that say how much of a gradient is sent: rules leave settings alone that have one of them.
DENSITY_OPTIONS = {"sparsity", "value_dtype", "quality", "adaptive"}


def changed(settings: DataParallelConfig, **changes: object) -> DataParallelConfig:
    """Return validated settings with changes; what was not written stays a default."""
    return DataParallelConfig.of({**settings.model_dump(exclude_unset=True), **changes})


def for_compressors(settings: DataParallelConfig, count: int) -> DataParallelConfig:
    """Return the settings with the sparsity, the value type and the answers for so many compressors.

    Settings that name one of the first two stay as they are, and so do those without step-ahead.
    """
    written = settings.model_fields_set & DENSITY_OPTIONS
    row = next(row for row in BY_COMPRESSORS if count <= row.most)
    suits = (row.sparsity, row.value_dtype) == (settings.sparsity, settings.value_dtype)
    if written or suits or not settings.feedback.looks_ahead:
        return settings
    expert: dict[str, Any] = {"server_density": row.server_density}
    expert |= settings.expert.model_dump(exclude_unset=True)
    return changed(settings, sparsity=row.sparsity, value_dtype=row.value_dtype, expert=expert)


def exchange_by_rule(settings: DataParallelConfig, ranks: int) -> Literal["direct", "two_phase"]:
    """Return the topology that the settings ask for, or the one with the fewest bytes."""
    if settings.exchange != "auto":
        return settings.exchange
    # A rank sends P-1 messages directly, 2(P-1)/P in two phases: the same bytes for two ranks, one exchange
    # fewer. What owners hold back costs step-ahead quality (measured: docs/quality.md).
    return "direct" if ranks <= (4 if settings.feedback.looks_ahead else 2) else "two_phase"


def safe_sparsity(settings: DataParallelConfig, training: Training) -> float:
    """Return the highest sparsity that lost nothing measurable in a training (``docs/quality.md``)."""
    family = training.family
    if family in (OptimizerFamily.ADAGRAD, OptimizerFamily.SGD):
        return 0.99 if settings.feedback.keeps_residual else 0.0
    if family.loses_by_delay and settings.feedback.looks_ahead and not training.is_fine_tuning:
        measured = [row for row in SAFE_WITH_STEP_AHEAD if family in row.families]
        return next((row.sparsity for row in measured if training.ranks <= row.ranks), 0.0)
    return 0.0
