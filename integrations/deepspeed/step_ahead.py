"""Step-ahead error feedback: which of DeepSpeed's parameters are whose, and what their optimizer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.step_ahead import StepAhead, units_of

#: Where DeepSpeed's wrappers keep the model's parameters, one list for each parameter group of the optimizer.
_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")


def named_parameters(engine: Any, name_of: Callable[[int, Any], str]) -> list[list[tuple[str, Any]]]:
    """``(name of the stream, parameter)`` for the parameters of each of the optimizer's groups."""
    optimizer = engine.optimizer
    groups = next((getattr(optimizer, name) for name in _GROUPS if hasattr(optimizer, name)), None)
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    return [[(name_of(i, parameter), parameter) for parameter in group] for i, group in enumerate(groups)]


def prepared(
    engine: Any, reducer: GradientReducer, name_of: Callable[[int, Any], str], unit: float
) -> StepAhead:
    """What displaces the engine's weights, not attached yet.

    Args:
        engine: DeepSpeed's engine.
        reducer: Of its gradients.
        name_of: Name of a parameter's stream, from the index of its group and the parameter.
        unit: See :meth:`~dct_plugin.data_parallel.GradientReducer.step_ahead`.

    Raises:
        ConfigError: The step of the engine's optimizer is not known.
    """
    named = named_parameters(engine, name_of)
    unit_of = units_of(engine.optimizer, [[parameter for _, parameter in group] for group in named])
    return reducer.step_ahead([pair for group in named for pair in group], unit_of, unit=unit)
