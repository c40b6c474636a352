"""Local updates (feedback ``local_updates``) of a model that DDP wraps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.local import LocalUpdates, LocalUpdatesAddOn, Weight
from dct_plugin.errors import ConfigError

from ..host.steps import StepHooks


def check(
    named: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, *, has_scaler: bool
) -> None:
    """Refuse what does not work with local updates.

    Raises:
        ConfigError: There is a gradient scaler, or ``optimizer`` does not hold all weights on this rank.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    if has_scaler:
        problem = "a gradient scaler skips steps on single ranks, while the others wait for their changes"
    elif any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        # By name: importing its module compiles scripts, for seconds.
        problem = "ZeroRedundancyOptimizer has a part of the weights on each rank, and all are needed"
    elif missing:
        problem = f"the optimizer does not have {', '.join(missing[:3])}: ranks would drift apart there"
    else:
        return
    raise ConfigError(
        f"rank {dist.get_rank()}: dct.data_parallel.feedback = 'local_updates': {problem}; set it to 'local'"
    )


def attach(
    model: torch.nn.Module,
    named: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    reducer: GradientReducer,
    steps: StepHooks,
) -> LocalUpdates:
    """Let ``optimizer`` step each rank's own weights, and exchange their changes in its ``step``."""
    names = {id(parameter): name for name, parameter in named.items()}

    def weights() -> Iterator[Weight]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    yield Weight(names[id(parameter)], parameter, parameter)

    local = reducer.add_on(LocalUpdatesAddOn).prepare(weights, optimizer)
    local.attach(model)

    def stepped(*_: Any) -> None:
        local.end_step()
        steps.end()

    optimizer.register_step_pre_hook(lambda *_: local.show_local())
    optimizer.register_step_post_hook(stepped)
    return local
