"""Step-ahead error feedback: Megatron's optimizers, and when which part sees displaced weights.

Weights are displaced for the whole of a training iteration: all micro-batches and model chunks of a
schedule, and recomputed activations, see the same ones. The optimizer, parameter gathers, forward-only
iterations and checkpoints see the weights themselves.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from dct_plugin.data_parallel.step_units import StepUnit, units_of, unwrapped
from dct_plugin.policy.optimizers import OptimizerFamily, family_of

from ..host.patching import Function, Patches

_GROUPS, _LOOK_UP = "_dct_groups", "_dct_unit_of"


class Optimizers:
    """The units of Megatron's optimizers, which replace the parameters in their groups by main parameters
    or by the shards that a rank owns; which ones were there is noted before.
    """

    def __init__(self, patches: Patches) -> None:
        from megatron.core.optimizer.optimizer import MegatronOptimizer

        self._optimizers = weakref.WeakValueDictionary[int, Any]()
        self._count = itertools.count()
        patches.intercept(MegatronOptimizer, "__init__", self._init)

    def unit_of(self, parameter: torch.nn.Parameter) -> StepUnit | None:
        """Return the settings of the parameter's group as they are now; None: no optimizer has it.

        Raises:
            ConfigError: The unit of an optimizer's steps is not known.
        """
        for optimizer in reversed(list(self._optimizers.values())):  # the last one, of a model set up again
            if not hasattr(optimizer, _LOOK_UP):
                setattr(optimizer, _LOOK_UP, units_of(optimizer, getattr(optimizer, _GROUPS)))
            unit: StepUnit | None = getattr(optimizer, _LOOK_UP)(parameter)
            if unit is not None:
                return unit
        return None

    @property
    def least_known(self) -> Any:
        """The optimizer whose step is known least; None if there is none."""
        optimizers = [unwrapped(each) for each in self._optimizers.values()]
        known = {id(each): family_of(cls.__name__ for cls in type(each).__mro__) for each in optimizers}
        others = (each for each in optimizers if known[id(each)] is OptimizerFamily.OTHER)
        return next(others, optimizers[0] if optimizers else None)

    @property
    def param_groups(self) -> list[Any]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]

    def _init(
        self, original: Function, wrapper: Any, optimizer: Any, *arguments: Any, **keywords: Any
    ) -> None:
        if optimizer is not None:  # None: this rank has nothing to train
            groups = [list(group["params"]) for group in optimizer.param_groups]
            setattr(wrapper, _GROUPS, groups)
            self._optimizers[next(self._count)] = wrapper
        original(wrapper, optimizer, *arguments, **keywords)


def unavailable(model: Any) -> Iterator[str]:
    """Yield why the weights of a model cannot be displaced."""
    if model.config.cuda_graph_impl not in (None, "none"):
        yield "CUDA graphs (Megatron's cuda_graph_impl) keep the addresses of weights"
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and (
            parameter.dtype not in kinds or type(parameter.data) is not torch.Tensor
        ):
            yield (
                f"{name} is a {type(parameter.data).__name__} of {parameter.dtype}; weights must be fp32, "
                "bf16 or fp16 (no fp8_param_gather)"
            )
