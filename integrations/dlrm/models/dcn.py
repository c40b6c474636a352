"""Deep & Cross Network, version 1 (Wang et al. 2017, arXiv:1708.05123)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dct_plugin.embedding.des import Embeddings, Part

from .parts import CrossNetwork, FirstLayer, evaluate, rest_of_mlp, seeded

__all__ = ["DCN"]


class DCN(nn.Module):
    """A cross network and an MLP on the same embeddings; the logit is a linear form of both outputs.

    Args:
        num_dense: Numeric features.
        tables: Embeddings of all fields.
        hidden: Widths of the MLP; none leaves it out.
        depth: Cross layers.
        seed: Of the initial weights; the global random state stays as it was.
    """

    def __init__(
        self,
        num_dense: int,
        tables: Embeddings,
        *,
        hidden: Sequence[int] = (256, 128),
        depth: int = 6,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tables = tables
        with seeded(seed):
            self.cross = CrossNetwork(tables, num_dense, depth)
            self.first = FirstLayer(tables, num_dense, hidden[0]) if hidden else None
            self.rest = rest_of_mlp(hidden) if hidden else None

    @staticmethod
    def parts(num_fields: int, dim: int, hidden: Sequence[int] = (256, 128), depth: int = 6) -> list[Part]:
        """For :func:`~dct_plugin.embedding.des.choose`."""
        parts = [Part("cross network", depth + 1, "embedding", num_fields, dim)]
        if hidden:
            parts.append(Part("deep first layer", hidden[0], "embedding", num_fields, dim))
        return parts

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """float [b, D], int [b, F] -> logits [b]."""
        embeddings = self.tables(categorical)
        if self.first is None or self.rest is None:
            (cross,) = evaluate(self.tables, embeddings, [self.cross], dense)
            return cross
        cross, deep = evaluate(self.tables, embeddings, [self.cross, self.first], dense)
        return cross + self.rest(deep).squeeze(1)
