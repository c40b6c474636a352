"""Models whose logit is a sum: of operators' results and of an MLP's, all on the same embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dct_plugin.embedding import Embeddings, Part

from .parts import FM, CrossNetwork, FirstLayer, Operator, Wide, evaluate, mlp, seeded

HIDDEN = (256, 128)


class _DeepSum(nn.Module):
    """The sum itself.

    Args:
        num_dense: Numeric features.
        tables: Embeddings of all fields.
        wide_tables: One weight per value of all fields (tables of width 1), for a linear form of all values.
        hidden: Widths of the MLP; none leaves it out.
        seed: Of the initial weights; the global random state stays as it was.
        settings: Those of the model's own operators.
    """

    def __init__(
        self,
        num_dense: int,
        tables: Embeddings,
        wide_tables: Embeddings | None = None,
        *,
        hidden: Sequence[int] = HIDDEN,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.tables, self.wide_tables = tables, wide_tables
        with seeded(seed):
            self.wide = None if wide_tables is None else Wide(num_dense)
            operators = self.operators(num_dense, **settings)
            for name, operator in operators.items():
                self.add_module(name, operator)
            self.first = FirstLayer(tables, num_dense, hidden[0]) if hidden else None
            self.rest = nn.Sequential(nn.ReLU(), *mlp([*hidden, 1])) if hidden else None
        self._operators = [*operators, *(["first"] if hidden else [])]

    def operators(self, num_dense: int) -> dict[str, Operator]:
        """Make the model's own operators on ``tables``, by the names of the sub-modules."""
        return {}

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """float [b, D], int [b, F] -> logits [b]."""
        results = []
        if self.wide is not None and self.wide_tables is not None:
            results += evaluate(self.wide_tables, self.wide_tables(categorical), [self.wide], dense)
        operators = [getattr(self, name) for name in self._operators]
        results += evaluate(self.tables, self.tables(categorical), operators, dense)
        if self.rest is not None:
            results[-1] = self.rest(results[-1]).squeeze(1)
        logit, *others = results
        for result in others:
            logit = logit + result
        return logit


class WideDeep(_DeepSum):
    """Wide & Deep (Cheng et al. 2016, arXiv:1606.07792): a linear form of all values, and an MLP."""

    @staticmethod
    def parts(num_fields: int, dim: int, hidden: Sequence[int] = HIDDEN) -> list[Part]:
        """List the parts that :func:`~dct_plugin.embedding.choice.choose` chooses an exchange for."""
        return [Part("wide", 1, "wide", num_fields, 1), _first_layer(num_fields, dim, hidden)]


class DeepFM(_DeepSum):
    """DeepFM (Guo et al. 2017, arXiv:1703.04247): Wide & Deep with a factorization machine."""

    def operators(self, num_dense: int) -> dict[str, Operator]:
        return {"fm": FM(self.tables)}

    @staticmethod
    def parts(num_fields: int, dim: int, hidden: Sequence[int] = HIDDEN) -> list[Part]:
        """List the parts that :func:`~dct_plugin.embedding.choice.choose` chooses an exchange for."""
        wide, first = WideDeep.parts(num_fields, dim, hidden)
        return [wide, Part("FM", dim + 1, "embedding", num_fields, dim), first]


class DCN(_DeepSum):
    """Deep & Cross Network, version 1 (Wang et al. 2017, arXiv:1708.05123): ``depth`` cross layers, and an
    MLP; the logit is a linear form of both outputs.
    """

    def operators(self, num_dense: int, depth: int = 6) -> dict[str, Operator]:
        return {"cross": CrossNetwork(self.tables, num_dense, depth)}

    @staticmethod
    def parts(num_fields: int, dim: int, hidden: Sequence[int] = HIDDEN, depth: int = 6) -> list[Part]:
        """List the parts that :func:`~dct_plugin.embedding.choice.choose` chooses an exchange for."""
        cross = Part("cross network", depth + 1, "embedding", num_fields, dim)
        return [cross, *([_first_layer(num_fields, dim, hidden)] if hidden else [])]


def _first_layer(num_fields: int, dim: int, hidden: Sequence[int]) -> Part:
    return Part("deep first layer", hidden[0], "embedding", num_fields, dim)
