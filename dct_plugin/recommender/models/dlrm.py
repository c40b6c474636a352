"""DLRM (Naumov et al. 2019, arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dct_plugin.embedding import Embeddings, FieldShards, LocalEmbeddings, Part

from .parts import DotLayer, evaluate, mlp, seeded
from .tables import EmbeddingTables


class DLRM(nn.Module):
    """Dense features pass a bottom MLP, every categorical field looks up an embedding vector; the bottom
    output and the dot products of all pairs of vectors feed a top MLP that gives one logit.

    Args:
        num_dense: Numeric features.
        cardinalities: Rows of each field's table.
        embedding_dim: Width of the tables and of the bottom MLP's output.
        bottom, top: Hidden widths of the MLPs.
        tables: In place of :class:`~.tables.EmbeddingTables`: any module int [b, F] -> [b, F, embedding_dim],
            or one of :mod:`dct_plugin.embedding.des`. Field shards have no equivalent substitution here: a
            pair's product needs both vectors.
        seed: Of the initial weights; the global random state stays as it was.

    Raises:
        ValueError: ``tables`` are sharded by field.
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
        if isinstance(tables, FieldShards):
            raise ValueError("dot products need whole tables or column shards, not field shards")
        fields = len(cardinalities)
        with seeded(seed):
            self.bottom = mlp([num_dense, *bottom, embedding_dim], last_relu=True)
            self.tables = EmbeddingTables(cardinalities, embedding_dim) if tables is None else tables
            self.top = mlp([embedding_dim + fields * (fields + 1) // 2, *top, 1])
        first = self.top[0]
        assert isinstance(first, nn.Linear)
        made = self.tables
        source = made if isinstance(made, Embeddings) else LocalEmbeddings(made, fields, embedding_dim)
        self._source = (source,)  # in a tuple: the tables are registered above
        self.dot = DotLayer(fields + 1, first, contract=source is made)

    @staticmethod
    def parts(num_fields: int, dim: int, top: Sequence[int] = (256, 128), **_: Any) -> list[Part]:
        """List the parts that :func:`~dct_plugin.embedding.choice.choose` chooses an exchange for."""
        width = min(num_fields * (num_fields + 1) // 2, top[0])
        return [Part("dot interaction", width, "embedding", num_fields, dim, shipped=dim, layout="columns")]

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """float [b, D], int [b, F] -> logits [b]."""
        (source,) = self._source
        x = self.bottom(dense)
        vectors = torch.cat([source.columns_of(x).unsqueeze(1), source(categorical)], dim=1)
        (first,) = evaluate(source, vectors, [self.dot], x)
        return self.top[1:](first).squeeze(1)
