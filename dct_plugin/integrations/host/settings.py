"""The optimizers that a script passes, and the facts of them that settings depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dct_plugin.data_parallel.step_units import StepUnit, stepping, unwrapped
from dct_plugin.errors import ConfigError
from dct_plugin.policy import Training


def optimizers_of(given: Any, call: str) -> list[torch.optim.Optimizer]:
    """Return the optimizers in what a script passed, without their wrappers.

    Args:
        given: An optimizer, a list or tuple of them, or None.
        call: The call that it was passed to, for messages.

    Raises:
        ConfigError: It is something else.
    """
    several = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for each in several:
        if not hasattr(unwrapped(each), "param_groups"):
            kind = type(each).__name__
            swapped = "; the section is the argument after it" if isinstance(each, Mapping) else ""
            raise ConfigError(
                f"{call}: a {kind} is in the place of the optimizer, and has no param_groups{swapped}. Pass "
                "an optimizer, a list of optimizers, or None"
            )
    return [unwrapped(each) for each in several]


def steps_of(scheduler: Any) -> int | None:
    """Return the optimizer steps for which a scheduler of learning rates is made; None if it does not say."""
    for name in ("total_num_steps", "total_steps", "T_max"):
        if isinstance(total := getattr(scheduler, name, None), int) and total > 0:
            return total
    # transformers: the number is bound into the function of a LambdaLR.
    bound = [getattr(each, "keywords", {}) for each in getattr(scheduler, "lr_lambdas", [])]
    return next((each["num_training_steps"] for each in bound if each.get("num_training_steps")), None)


def training_of(optimizer: Any, training: Training) -> Training:
    """Return ``training`` with the facts of its optimizer, or of a wrapper of it; as it is with None."""
    if optimizer is None:
        return training
    inner = stepping(optimizer)
    names = [cls.__name__ for cls in type(inner).__mro__]
    if hasattr(inner, "step_unit"):  # it says itself what its steps are
        units = [StepUnit.of(inner, group) for group in inner.param_groups]
        alike = "Adam" if any(unit.decay is not None for unit in units) else "Adagrad"
        names = [names[0], alike]
    momentum = max((float(group.get("momentum", 0.0)) for group in inner.param_groups), default=0.0)
    # At the start of a schedule rates may be 0: schedulers note the rates that they begin or end with.
    keys = ("lr", "initial_lr", "max_lr")
    rates = [float(group.get(key, 0.0)) for group in inner.param_groups for key in keys]
    return replace(training, optimizer=names, momentum=momentum, lr=max(rates, default=0.0) or math.inf)
