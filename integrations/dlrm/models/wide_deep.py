"""Wide & Deep (Cheng et al. 2016, arXiv:1606.07792)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dct_plugin.embedding.des import Embeddings, Part

from .parts import FirstLayer, Wide, evaluate, rest_of_mlp, seeded

__all__ = ["WideDeep"]


class WideDeep(nn.Module):
    """A linear form of all values, and an MLP on the embeddings; their sum is the logit.

    Args:
        num_dense: Numeric features.
        tables: Embeddings of all fields.
        wide_tables: One weight per value of all fields: tables of width 1.
        hidden: Widths of the MLP.
        seed: Of the initial weights; the global random state stays as it was.
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
            self.first = FirstLayer(tables, num_dense, hidden[0])
            self.rest = rest_of_mlp(hidden)

    @staticmethod
    def parts(num_fields: int, dim: int, hidden: Sequence[int] = (256, 128)) -> list[Part]:
        """For :func:`~dct_plugin.embedding.des.choose`."""
        return [
            Part("wide", 1, "wide", num_fields, 1),
            Part("deep first layer", hidden[0], "embedding", num_fields, dim),
        ]

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """float [b, D], int [b, F] -> logits [b]."""
        (wide,) = evaluate(self.wide_tables, self.wide_tables(categorical), [self.wide], dense)
        (deep,) = evaluate(self.tables, self.tables(categorical), [self.first], dense)
        return wide + self.rest(deep).squeeze(1)
