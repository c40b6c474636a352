"""Rows of a matrix, with a gradient that costs what it adds up.

torch's dense backward pass of an embedding on the CPU adds row by row, through the dispatcher: some 0.5 us
for a row of 16 numbers, which took longer than all of the codec. The kernels add the same rows in the same
order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.embedding_format import EmbeddingKernels

__all__ = ["take_rows"]


def take_rows(matrix: Tensor, rows: Tensor, kernels: EmbeddingKernels, *, sparse: bool = False) -> Tensor:
    """``matrix[rows]``: [any, dim], int64 [...] -> [..., dim].

    Args:
        kernels: For matrices on the CPU.
        sparse: A sparse gradient, for optimizers that take them.
    """
    if sparse or matrix.device.type != "cpu" or matrix.dtype != torch.float32:
        return functional.embedding(rows, matrix, sparse=sparse)
    taken: Tensor = _Rows.apply(matrix, rows, kernels)
    return taken


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Tensor, kernels: EmbeddingKernels) -> Tensor:
        ctx.shape, ctx.rows, ctx.kernels = matrix.shape, rows, kernels
        return functional.embedding(rows, matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        out = torch.zeros(ctx.shape)
        x = gradients[0].reshape(-1, ctx.shape[1]).contiguous()
        ctx.kernels.add_rows(out, ctx.rows.reshape(-1).contiguous(), x)
        return out, None, None
