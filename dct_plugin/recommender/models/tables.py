"""Embedding tables that are all here, dense weights like any other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dct_plugin.embedding.placement import draw_table, seed_of_tables


class EmbeddingTables(nn.Module):
    """One embedding table per field, stored below each other in one dense matrix.

    One lookup instead of F and one gradient tensor instead of F: most fields have a handful of values, and
    tensors that small would each cost a message. Gradients are dense (``sparse=False``), so that the host
    framework's gradient synchronisation sees them like those of any other weight.
    """

    def __init__(self, cardinalities: Sequence[int], dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(sum(cardinalities), dim))
        self.first_rows: Tensor
        first_rows = torch.tensor([0, *cardinalities[:-1]]).cumsum(0)
        self.register_buffer("first_rows", first_rows, persistent=False)
        seed = seed_of_tables()
        for number, table in enumerate(self.weight.detach().split(list(cardinalities))):
            draw_table(table, number, seed)

    def forward(self, categorical: Tensor) -> Tensor:
        """int [B, F] -> [B, F, dim]."""
        return nn.functional.embedding(categorical + self.first_rows, self.weight)
