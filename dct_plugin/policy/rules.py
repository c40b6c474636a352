"""Rules for settings that depend on the number of compressors: ranks, or nodes that are summed first."""

from __future__ import annotations

from typing import Literal

from ..config import DataParallelConfig
from .evidence import THRESHOLDS, MeasuredThresholds, Training

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
    if row is None or training.is_fine_tuning or not feedback.keeps_residual or ahead > feedback.looks_ahead:
        return 0.0
    return row.sparsity
