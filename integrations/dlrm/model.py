"""DLRM (Naumov et al. 2019, arXiv:1906.00091) in its smallest form.

Dense features pass a bottom MLP, every categorical field looks up an embedding vector; the bottom output and
the dot products of all pairs of vectors feed a top MLP that gives one logit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["DLRM", "EmbeddingTables"]


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
    """The model; initial weights depend on ``seed`` alone, the global random state stays as it was.

    ``bottom`` and ``top`` list the hidden widths; the bottom MLP ends in ``embedding_dim``, the top MLP in
    one logit. ``tables`` replaces the embedding tables: any module int [B, F] -> [B, F, embedding_dim].
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
        num_vectors = len(cardinalities) + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottom = _mlp([num_dense, *bottom, embedding_dim], last_relu=True)
            self.tables = EmbeddingTables(cardinalities, embedding_dim) if tables is None else tables
            self.top = _mlp([embedding_dim + num_vectors * (num_vectors - 1) // 2, *top, 1], last_relu=False)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, -1), persistent=False)

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """float [B, D], int [B, F] -> logits [B]."""
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), self.tables(categorical)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        row, column = self.pairs.unbind()
        return self.top(torch.cat([x, products[:, row, column]], dim=1)).squeeze(1)


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))
