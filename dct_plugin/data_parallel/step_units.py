"""Units of an optimizer's steps: the factor from a gradient to the change of a weight."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..policy.optimizers import OptimizerFamily, family_of, unknown_step


class StepUnit(NamedTuple):
    """The step for a gradient: ``lr * g``, divided by ``sqrt(second moment) + eps`` if there is one.

    Attributes:
        lr: Learning rate times what momentum makes of one gradient in the long run.
        preconditioned: Whether the step is divided by the root of a second moment.
        decay: Decay of the second moment; None: it is a sum (Adagrad).
        eps: Beside the root, in the optimizer's unit of gradients.
    """

    lr: float
    preconditioned: bool = False
    decay: float | None = None
    eps: float = 0.0

    @classmethod
    def of(cls, optimizer: Any, group: Mapping[str, Any]) -> StepUnit:
        """Return the unit of a parameter group, as its settings are now (schedulers change them).

        Raises:
            ConfigError: The unit of this optimizer's steps is not known.
        """
        if hasattr(optimizer, "step_unit"):  # it says so itself
            return optimizer.step_unit(group)
        unit = _rule_of(optimizer.__class__)(group)
        return unit._replace(lr=-unit.lr) if group.get("maximize") else unit


#: By tensor, its version counter and its value: a learning rate that is a tensor (``capturable``) may be on a
#: device, and is read once after each change.
_READ: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _number(setting: Any) -> float:
    """Return a setting of a group as a number."""
    if setting.__class__ is float:
        return setting
    if not isinstance(setting, torch.Tensor):
        return float(setting)
    version, number = _READ.get(setting, (None, 0.0))
    if version != setting._version:
        number = float(setting)
        _READ[setting] = (setting._version, number)
    return number


def _adam(group: Mapping[str, Any]) -> StepUnit:
    return StepUnit(_number(group["lr"]), True, _number(group["betas"][1]), _number(group["eps"]))


def _rmsprop(group: Mapping[str, Any]) -> StepUnit:
    lr = _number(group["lr"]) / (1.0 - _number(group.get("momentum", 0.0)))
    return StepUnit(lr, True, _number(group["alpha"]), _number(group["eps"]))


def _adagrad(group: Mapping[str, Any]) -> StepUnit:
    # What the sum starts with lies beside its root like eps, within a factor of sqrt(2).
    start = math.sqrt(_number(group.get("initial_accumulator_value", 0.0)))
    return StepUnit(_number(group["lr"]), True, None, _number(group["eps"]) + start)


def _sgd(group: Mapping[str, Any]) -> StepUnit:
    momentum = _number(group.get("momentum", 0.0))
    damped = 1.0 - _number(group.get("dampening", 0.0)) if momentum else 1.0
    return StepUnit(_number(group["lr"]) * damped / (1.0 - momentum))


_RULES: dict[OptimizerFamily, Callable[[Mapping[str, Any]], StepUnit]] = {
    OptimizerFamily.ADAM: _adam,
    OptimizerFamily.RMSPROP: _rmsprop,
    OptimizerFamily.ADAGRAD: _adagrad,
    OptimizerFamily.SGD: _sgd,
}


@functools.lru_cache(maxsize=64)
def _rule_of(kind: type) -> Callable[[Mapping[str, Any]], StepUnit]:
    rule = _RULES.get(family_of(cls.__name__ for cls in kind.__mro__))
    if rule is None:
        raise unknown_step(kind.__name__)
    return rule


#: The settings that the rules read, and the types of those that may be written in place.
_SETTINGS = ("lr", "betas", "eps", "momentum", "alpha", "dampening", "initial_accumulator_value", "maximize")
_MUTABLE = {torch.Tensor, list}
#: Attributes in which wrappers keep the optimizer: most of them, Lightning.
_INNER = ("optimizer", "_optimizer")


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers such as Accelerate's, Lightning's, DeepSpeed's and apex's, and
    inside torch's ``PostLocalSGDOptimizer``, which runs no hooks of its own.
    """
    while True:
        names = _INNER if hasattr(optimizer, "_optimizer_step_pre_hooks") else (*_INNER, "optim")
        inner = next((getattr(optimizer, n, None) for n in names if hasattr(optimizer, n)), None)
        if not hasattr(inner, "param_groups"):
            return optimizer
        optimizer = inner


def stepping(optimizer: Any) -> Any:
    """Return the optimizer whose rule makes the steps: the one inside wrappers, or inside of torch's
    ``ZeroRedundancyOptimizer``, which has this rank's share of the parameters.
    """
    inner = unwrapped(optimizer)
    share = getattr(inner, "optim", None)
    return share if hasattr(share, "param_groups") else inner


def units_of(
    *optimizers: Any, groups: Sequence[Sequence[torch.nn.Parameter]] | None = None
) -> Callable[[torch.nn.Parameter], StepUnit | None]:
    """Return a look-up of a parameter's unit in the first of the optimizers that has it. The settings of its
    group are read at every call, and parameters of groups that are added later are found.

    Args:
        optimizers: With ``param_groups`` as in torch; may be wrappers, see :func:`unwrapped`.
        groups: Parameters of each group, where the groups hold others (flat or sharded master weights).

    Raises:
        ConfigError: The unit of an optimizer's steps is not known.
    """
    rules = [(optimizer, stepping(optimizer)) for optimizer in optimizers]
    for optimizer, rule in rules:
        for settings in optimizer.param_groups:  # refused now rather than in a forward pass
            StepUnit.of(rule, settings)
    found: dict[int, tuple[Any, Any, int]] = {}
    last: dict[tuple[int, int], tuple[tuple[Any, ...], StepUnit]] = {}
    known = 0

    def unit_of(parameter: torch.nn.Parameter) -> StepUnit | None:
        nonlocal known
        number = 0
        for optimizer in optimizers:
            number += len(optimizer.param_groups)
        if number != known:
            known = number
            for optimizer, rule in reversed(rules):
                own = [each["params"] for each in optimizer.param_groups] if groups is None else groups
                found.update((id(p), (optimizer, rule, at)) for at, group in enumerate(own) for p in group)
        if (place := found.get(id(parameter))) is None:
            return None
        optimizer, rule, at = place
        group = optimizer.param_groups[at]
        settings = tuple(map(group.get, _SETTINGS))
        before, unit = last.get((id(rule), at), ((), None))
        if unit is None or not all(map(operator.is_, settings, before)):
            unit = StepUnit.of(rule, group)
            if _MUTABLE.isdisjoint(map(type, settings)) and not hasattr(rule, "step_unit"):
                last[id(rule), at] = settings, unit
        return unit

    return unit_of


class ParameterGroups:
    """The parameter groups of several optimizers, as those of one."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]
