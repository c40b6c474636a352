"""The optimizers that a script passes, and the settings that suit them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel.step_units import StepUnit, stepping, unwrapped
from dct_plugin.errors import ConfigError
from dct_plugin.policy import Training, resolve
from dct_plugin.policy.optimizers import OptimizerFamily


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


def refuse_unserved(config: DCTConfig, why: str, served: Collection[str] = ()) -> None:
    """Refuse the options that need more of a host than its gradients.

    Args:
        config: The section as it is written.
        why: What the host lacks, in words.
        served: Names of those options that the host serves nevertheless.

    Raises:
        ConfigError: Names the option, and what to set instead.
    """
    settings = config.data_parallel
    ahead, quality = settings.feedback.looks_ahead, settings.quality
    refused = {
        "feedback": (ahead, f" = '{settings.feedback.label()}'", '"local"'),
        "nodes": (settings.nodes not in ("auto", 1), f" = {settings.nodes}", "1"),
        "nonfinite_action": (settings.nonfinite_action == "skip", " = 'skip'", '"pass"'),
    }
    for key in ("parameters", "local_steps", "verify", "adaptive"):
        refused[key] = getattr(settings, key) is not None, "", "null"
    refused["quality"] = quality is not None, f" = '{quality}'", "null, and sparsity to a number"
    for key, (wrong, value, instead) in refused.items():
        if wrong and key not in served:
            raise ConfigError(f"dct.data_parallel.{key}{value}: {why}; set it to {instead}")


def resolve_settings(config: DCTConfig, optimizer: Any, training: Training) -> tuple[DCTConfig, str]:
    """Return the configuration with the feedback that suits the optimizer, and lines for rank 0 to log.

    They say what the feedback became, or that the settings are known to lose, and how updated weights are
    gathered; they may be empty.

    Args:
        config: The section as it was written.
        optimizer: The optimizer or a wrapper of it, None if it was not told; of several the one that suffers
            most by delay counts.
        training: The other facts of the training, as the host knows them.
    """
    if not config.enabled or training.ranks == 1:
        return config, ""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    trainings = [training_of(each, training) for each in optimizers or [None]]
    suffers_most = OptimizerFamily.OTHER, OptimizerFamily.MUON
    training = max(trainings, key=lambda each: (each.family in suffers_most, each.family.loses_by_delay))
    made = resolve(config.data_parallel, training)
    lines = "\n".join(filter(None, (made.line, made.updates)))
    return config.model_copy(update={"data_parallel": made.settings}), lines


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
