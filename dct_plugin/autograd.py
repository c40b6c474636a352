"""An autograd function made of two callables, for everything that sends its gradient back the way it came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_gradient(
    x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``forward(x)``; in the backward pass ``backward(gradient)`` gives the gradient of ``x``.

    Both run without autograd. What the backward pass needs of the forward pass they keep themselves.
    """
    return _WithGradient.apply(x, forward, backward)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.run_backward = backward
        return forward(x.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run_backward(gradients[0]), None, None
