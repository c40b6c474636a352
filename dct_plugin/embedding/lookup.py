"""Rows of a matrix, with a gradient that costs no more than what it adds up.

On the CPU torch's dense backward pass of an embedding adds row by row, through the dispatcher: some 0.5 us
for a row of 16 numbers, longer than all of the codec. The kernels add the same rows in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..autograd import with_gradient
from ..kernels.embedding_format import EmbeddingKernels


def take_rows(matrix: Tensor, rows: Tensor, kernels: EmbeddingKernels, *, sparse: bool = False) -> Tensor:
    """Return ``matrix[rows]``: [any, dim], int64 [...] -> [..., dim].

    Args:
        kernels: For matrices on the CPU.
        sparse: Make the gradient sparse, for optimizers that take them.
    """
    if sparse or matrix.device.type != "cpu" or matrix.dtype != torch.float32:
        return functional.embedding(rows, matrix, sparse=sparse)

    def add_up(gradient: Tensor) -> Tensor:
        out = torch.zeros(matrix.shape)
        x = gradient.reshape(-1, matrix.shape[1]).contiguous()
        kernels.add_rows(out, rows.reshape(-1).contiguous(), x)
        return out

    return with_gradient(matrix, lambda x: functional.embedding(rows, x), add_up)
