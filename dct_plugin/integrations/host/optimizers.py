"""The optimizers that a script passes: one or several, in wrappers or not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel.step_units import unwrapped
from dct_plugin.errors import ConfigError

logger = logging.getLogger("dct_plugin")


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


def check_parameters(
    optimizers: Sequence[torch.optim.Optimizer],
    model: torch.nn.Module,
    compressed: Mapping[str, Tensor],
    *,
    call: str,
    remedy: str,
    sparsity: float,
    warns: bool,
) -> None:
    """Check that each optimizer is one of the model's, and warn about parameters that are in none of them.

    Args:
        compressed: The parameters by name whose gradients are thresholded.
        call, remedy: The call that the optimizers were passed to, and what to do about a wrong one.
        sparsity: That of the gradients.
        warns: Whether this rank warns.

    Raises:
        ConfigError: An optimizer has no parameter of the model.
    """
    own = {id(parameter) for parameter in model.parameters()}
    told: set[int] = set()
    for number, optimizer in enumerate(optimizers, 1):
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not parameters & own:
            which = f"{type(optimizer).__name__}, {number} of {len(optimizers)}"
            raise ConfigError(f"{call}: the optimizer ({which}) has no parameter of the model; {remedy}")
        told |= parameters
    untold = [name for name, p in compressed.items() if p.requires_grad and id(p) not in told]
    if optimizers and untold and warns:
        logger.warning(
            "dct: %d parameters are in none of the optimizers that were passed, and get local error feedback "
            "at sparsity %g: %s%s; pass all optimizers in a list",
            len(untold),
            sparsity,
            ", ".join(untold[:5]),
            ", ..." if len(untold) > 5 else "",
        )
