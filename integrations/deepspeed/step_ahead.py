"""Step-ahead error feedback: which of DeepSpeed's parameters are whose, and what their optimizer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.step_ahead import StepAhead, StepAheadAddOn, units_of

from ..host.patches import Patches

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
    engine: Any,
    reducer: GradientReducer,
    name_of: Callable[[int, Any], str],
    unit: float,
    updates: ParameterUpdates | None,
) -> StepAhead:
    """What displaces the engine's weights, not attached yet.

    Args:
        engine: DeepSpeed's engine.
        reducer: Of its gradients.
        name_of: Name of a parameter's stream, from the index of its group and the parameter.
        unit: See :meth:`~dct_plugin.data_parallel.step_ahead.StepAheadAddOn.prepare`.
        updates: Of the engine's weights, if they are thresholded.

    Raises:
        ConfigError: The step of the engine's optimizer is not known.
    """
    named = named_parameters(engine, name_of)
    unit_of = units_of(engine.optimizer, [[parameter for _, parameter in group] for group in named])
    pairs = [pair for group in named for pair in group]
    ahead = reducer.add_on(StepAheadAddOn)
    if updates is None:
        return ahead.prepare(pairs, unit_of, unit=unit)
    return ahead.prepare(pairs, unit_of, unit=unit, pending_of=updates.pending_of)


def displace_in_batches(engine: Any, ahead: StepAhead, patches: Patches) -> None:
    """In a pipeline the passes of several micro-batches overlap: the weights are displaced from the start of
    ``train_batch`` to the optimizer's step in it.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_batch(*args: Any, **keywords: Any) -> Any:
            ahead.forget()
            ahead.displace()
            try:
                return original(*args, **keywords)
            finally:
                ahead.restore()

        return train_batch

    patches.wrap(engine, "train_batch", make)
