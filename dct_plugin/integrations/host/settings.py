"""The feedback that suits an optimizer, and a warning about settings that are known to lose quality."""

from __future__ import annotations

from typing import Any

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel.step_units import StepUnit, unwrapped
from dct_plugin.policy import Training, resolve
from dct_plugin.policy.optimizers import OptimizerFamily


def resolve_settings(
    config: DCTConfig,
    optimizer: Any,
    *,
    ranks: int,
    stage: int = 0,
    steps: int | None = None,
    step_ahead_unavailable: str = "",
    optimizer_unknown_hint: str = "",
) -> tuple[DCTConfig, str]:
    """Return the configuration with the feedback that suits the optimizer, and a line for rank 0 to log.

    The line says what the feedback became, or that the settings are known to lose; it may be empty.

    Args:
        config: The section as it was written.
        optimizer: The optimizer or a wrapper of it, None if it was not told; of several the one that suffers
            most by delay counts.
        ranks: Data-parallel ranks.
        stage: ZeRO stage.
        steps: Optimizer steps of the run, None if not known.
        step_ahead_unavailable: Why this host cannot have step-ahead; empty if it can.
        optimizer_unknown_hint: What to do so that the optimizer is told.
    """
    if not config.enabled or ranks == 1:
        return config, ""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    trainings = [_training(each, ranks, stage) for each in optimizers or [None]]
    training = max(
        trainings, key=lambda each: (each.family is OptimizerFamily.OTHER, each.family.loses_by_delay)
    )
    made = resolve(
        config.data_parallel,
        training,
        steps=steps,
        step_ahead_unavailable=step_ahead_unavailable,
        optimizer_unknown_hint=optimizer_unknown_hint,
    )
    return config.model_copy(update={"data_parallel": made.settings}), made.line


def steps_of(scheduler: Any) -> int | None:
    """Return the optimizer steps for which a scheduler of learning rates is made; None if it does not say."""
    for name in ("total_num_steps", "total_steps", "T_max"):
        if isinstance(total := getattr(scheduler, name, None), int) and total > 0:
            return total
    # transformers: the number is bound into the function of a LambdaLR.
    bound = [getattr(each, "keywords", {}) for each in getattr(scheduler, "lr_lambdas", [])]
    return next((each["num_training_steps"] for each in bound if each.get("num_training_steps")), None)


def _training(optimizer: Any, ranks: int, stage: int) -> Training:
    if optimizer is None:
        return Training(stage=stage, ranks=ranks)
    inner = unwrapped(optimizer)
    names = [cls.__name__ for cls in type(inner).__mro__]
    if hasattr(inner, "step_unit"):  # it says itself what its steps are
        units = [StepUnit.of(inner, group) for group in inner.param_groups]
        alike = "Adam" if any(unit.decay is not None for unit in units) else "Adagrad"
        names = [names[0], alike]
    momentum = max((float(group.get("momentum", 0.0)) for group in inner.param_groups), default=0.0)
    return Training(names, momentum=momentum, stage=stage, ranks=ranks)
