from typing import Any

import torch

from . import distributed, fp8, module, ops
from .module import LayerNormLinear, Linear


class LayerNorm(torch.nn.LayerNorm):
    """A layer norm whose gradients Megatron sums over tensor-parallel ranks."""

    def __init__(self, hidden_size: int, eps: float, sequence_parallel: bool, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel


class DotProductAttention(torch.nn.Module):
    """Empty."""


class GroupedLinear(torch.nn.Module):
    """Empty."""


__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "distributed",
    "fp8",
    "module",
    "ops",
]
