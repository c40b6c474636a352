"""Optimizers whose step the plugin does not know, for the studies of what they lose."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, algorithm 2)."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(mean.lerp(parameter.grad, 0.1).sign_(), alpha=group["lr"])
                mean.lerp_(parameter.grad, 0.01)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free Adam (Defazio et al., 2024, algorithm 1), without decay. Parameters are *y*, where
    gradients are taken; the result is *x*.
    """

    beta = 0.9

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step."""
        for group in self.param_groups:
            group["steps"] = steps = group.get("steps", 0) + 1
            rate = group["most"] = max(group["lr"], group.get("most", 0.0))  # constant after the warm-up
            group["sum"] = group.get("sum", 0.0) + rate**2
            share = rate**2 / group["sum"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                z = state.setdefault("z", parameter.clone())
                square = state.setdefault("square", torch.zeros_like(parameter))
                square.lerp_(gradient.square(), 0.001)
                change = gradient / (square / (1 - 0.999**steps)).sqrt().add_(1e-8)
                parameter.lerp_(z, share).add_(change, alpha=rate * (self.beta * (1 - share) - 1))
                z.sub_(change, alpha=rate)

    @torch.no_grad()
    def finish(self) -> None:
        """Let the parameters hold *x*; the mean of the ranks' *z* is the model's. A collective."""
        for parameter, state in self.state.items():
            dist.all_reduce(state["z"])
            parameter.lerp_(state["z"] / dist.get_world_size(), 1 - 1 / self.beta)
