"""DLRM (Naumov et al. 2019, arXiv:1906.00091) with a choice of where its embeddings come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dct_plugin.embedding.des import Embeddings, FieldShards, Part

from ..model import _mlp
from .parts import DotLayer, evaluate
from .wide_deep import rest_of_mlp

__all__ = ["DLRM"]


class DLRM(nn.Module):
    """Like :class:`..model.DLRM`, on tables at home or in column shards.

    Tables in field shards have no equivalent substitution here: a pair's product needs both vectors.

    Args:
        num_dense: Numeric features.
        tables: Embeddings of all fields, or columns of them.
        bottom, top: Hidden widths of the MLPs.
        seed: Of the initial weights; the global random state stays as it was.
    """

    def __init__(
        self,
        num_dense: int,
        tables: Embeddings,
        *,
        bottom: Sequence[int] = (128, 64),
        top: Sequence[int] = (256, 128),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if isinstance(tables, FieldShards):
            raise ValueError("dot products need tables at home or in column shards, not in field shards")
        self.tables = tables
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottom = _mlp([num_dense, *bottom, tables.dim], last_relu=True)
            self.dot = DotLayer(tables.num_fields + 1, tables.dim, top[0])
            self.rest = rest_of_mlp(top)

    @staticmethod
    def parts(num_fields: int, dim: int, top: Sequence[int] = (256, 128)) -> list[Part]:
        """For :func:`~dct_plugin.embedding.des.choose`."""
        width = min(num_fields * (num_fields + 1) // 2, top[0])
        return [Part("dot interaction", width, "embedding", num_fields, dim, shipped=dim, layout="columns")]

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """float [b, D], int [b, F] -> logits [b]."""
        x = self.bottom(dense)
        vectors = torch.cat([self.tables.columns_of(x).unsqueeze(1), self.tables(categorical)], dim=1)
        (first,) = evaluate(self.tables, vectors, [self.dot], x)
        return self.rest(first).squeeze(1)
