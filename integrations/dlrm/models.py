"""DLRM (Naumov et al. 2019, arXiv:1906.00091)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws what ``seed`` says; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def mlp(widths: Sequence[int], *, last_relu: bool = False) -> nn.Sequential:
    """Linear layers from each width to the next with ReLUs between them, and ``last_relu`` one at the end."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


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
        with torch.no_grad():
            for table in self.weight.split(list(cardinalities)):
                bound = 1 / math.sqrt(len(table))
                table.uniform_(-bound, bound)

    def forward(self, categorical: Tensor) -> Tensor:
        """int [B, F] -> [B, F, dim]."""
        return nn.functional.embedding(categorical + self.first_rows, self.weight)


class DLRM(nn.Module):
    """Dense features pass a bottom MLP, every categorical field looks up an embedding vector; the bottom
    output and the dot products of all pairs of vectors feed a top MLP that gives one logit.

    Args:
        num_dense: Numeric features.
        cardinalities: Rows of each field's table.
        embedding_dim: Width of the tables and of the bottom MLP's output.
        bottom, top: Hidden widths of the MLPs.
        tables: In place of :class:`EmbeddingTables`: any module int [b, F] -> [b, F, embedding_dim].
        seed: Of the initial weights; the global random state stays as it was.
    """

    def __init__(
        self,
        num_dense: int,
        cardinalities: Sequence[int],
        *,
        embedding_dim: int = 16,
        bottom: Sequence[int] = (128, 64),
        top: Sequence[int] = (256, 128),
        tables: nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        vectors = len(cardinalities) + 1
        with seeded(seed):
            self.bottom = mlp([num_dense, *bottom, embedding_dim], last_relu=True)
            self.tables = EmbeddingTables(cardinalities, embedding_dim) if tables is None else tables
            self.top = mlp([embedding_dim + vectors * (vectors - 1) // 2, *top, 1])
        self.pairs: Tensor
        row, column = torch.tril_indices(vectors, vectors, -1).unbind()
        self.register_buffer("pairs", row * vectors + column, persistent=False)

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """float [b, D], int [b, F] -> logits [b]."""
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), self.tables(categorical)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)
