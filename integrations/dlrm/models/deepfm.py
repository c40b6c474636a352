"""DeepFM (Guo et al. 2017, arXiv:1703.04247)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dct_plugin.embedding.des import Embeddings, Part

from .parts import FM, FirstLayer, Wide, evaluate, rest_of_mlp, seeded

__all__ = ["DeepFM"]


class DeepFM(nn.Module):
    """A linear form of all values, a factorization machine and an MLP on the same embeddings; their sum is
    the logit.

    Arguments are those of :class:`~.wide_deep.WideDeep`.
    """

    def __init__(
        self,
        num_dense: int,
        tables: Embeddings,
        wide_tables: Embeddings,
        *,
        hidden: Sequence[int] = (256, 128),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tables, self.wide_tables = tables, wide_tables
        with seeded(seed):
            self.wide = Wide(num_dense)
            self.fm = FM(tables)
            self.first = FirstLayer(tables, num_dense, hidden[0])
            self.rest = rest_of_mlp(hidden)

    @staticmethod
    def parts(num_fields: int, dim: int, hidden: Sequence[int] = (256, 128)) -> list[Part]:
        """For :func:`~dct_plugin.embedding.des.choose`."""
        return [
            Part("wide", 1, "wide", num_fields, 1),
            Part("FM", dim + 1, "embedding", num_fields, dim),
            Part("deep first layer", hidden[0], "embedding", num_fields, dim),
        ]

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """float [b, D], int [b, F] -> logits [b]."""
        (wide,) = evaluate(self.wide_tables, self.wide_tables(categorical), [self.wide], dense)
        fm, deep = evaluate(self.tables, self.tables(categorical), [self.fm, self.first], dense)
        return wide + fm + self.rest(deep).squeeze(1)
