"""Recommender models, each on local tables, behind an all-to-all, or in shards (DES)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from dct_plugin.embedding import Choice, ColumnShards, Embeddings, FieldShards, LocalEmbeddings, Part, choose
from dct_plugin.metrics import Metrics

from ..settings import WIDTHS
from .deep import DCN, DeepFM, WideDeep
from .dlrm import DLRM
from .parts import seeded
from .tables import EmbeddingTables

__all__ = [
    "DCN",
    "DLRM",
    "MODELS",
    "DeepFM",
    "EmbeddingTables",
    "MakeTables",
    "TableExchange",
    "WideDeep",
    "build",
]

MODELS: dict[str, Any] = {"dlrm": DLRM, "deepfm": DeepFM, "widedeep": WideDeep, "dcn": DCN}

#: (cardinalities, dim, seed, name) -> module int [b, F] -> [b, F, dim]
MakeTables = Callable[[Sequence[int], int, int, str], nn.Module]


def local_tables(cardinalities: Sequence[int], dim: int, seed: int, name: str) -> nn.Module:
    """Make tables that are all on this rank."""
    with seeded(seed):
        return EmbeddingTables(cardinalities, dim)


@dataclass(frozen=True)
class TableExchange:
    """The exchange that brings embeddings to the samples of a rank.

    Attributes:
        kind: ``all_to_all`` makes every table with ``make_tables``; ``des`` shards where there is an
            equivalent substitution; ``auto`` picks what sends fewer floats.
        make_tables: Gives the embeddings of the local samples, from local tables or through an all-to-all.
        group: Process group of the shards.
        compression: How many times smaller the all-to-all of ``make_tables`` is than fp32, for ``auto``.
        average_gradients: Of the shards; see :class:`~dct_plugin.embedding.des.FieldShards`.
        metrics: Of the shards.
    """

    kind: Literal["all_to_all", "des", "auto"] = "all_to_all"
    make_tables: MakeTables = local_tables
    group: dist.ProcessGroup | None = None
    compression: float = 1.0
    average_gradients: bool = True
    metrics: Metrics | None = None

    def choose(self, parts: Sequence[Part]) -> list[Choice]:
        """Choose how each part of a model exchanges its embeddings.

        Raises:
            ValueError: ``kind`` is unknown.
        """
        if self.kind not in ("all_to_all", "des", "auto"):
            raise ValueError(f"exchange {self.kind!r}: must be 'all_to_all', 'des' or 'auto'")
        world_size = dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1
        force = None if self.kind == "auto" else self.kind
        return choose(parts, world_size=world_size, compression=self.compression, force=force)

    def shards(self, cardinalities: Sequence[int], dim: int, seed: int, layout: str) -> Embeddings:
        """Make shards of tables by columns or by fields."""
        kind = ColumnShards if layout == "columns" else FieldShards
        return kind(
            cardinalities,
            dim,
            group=self.group,
            seed=seed,
            average_gradients=self.average_gradients,
            metrics=self.metrics,
        )


def build(
    name: str,
    num_dense: int,
    cardinalities: Sequence[int],
    *,
    embedding_dim: int = 16,
    seed: int = 0,
    exchange: TableExchange | None = None,
    **settings: Any,
) -> tuple[nn.Module, list[Choice]]:
    """Return a model by name, and how each of its parts exchanges embeddings.

    Args:
        name: Key of :data:`MODELS`.
        num_dense: Numeric features.
        cardinalities: Rows of each field's table.
        embedding_dim: Embedding width.
        seed: Seed of the initial weights, which do not depend on the exchange.
        exchange: None takes local tables.
        settings: Further arguments of the model: ``bottom``, ``top``, ``hidden``, ``depth``.

    Raises:
        ValueError: An unknown model, exchange or setting.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known models: {', '.join(MODELS)}")
    exchange = exchange or TableExchange()
    model_class = MODELS[name]
    if unknown := settings.keys() - set(WIDTHS[name]):
        raise ValueError(f"{name} has no setting {sorted(unknown)[0]!r}; it has {', '.join(WIDTHS[name])}")
    parts: list[Part] = model_class.parts(len(cardinalities), embedding_dim, **settings)
    choices = exchange.choose(parts)

    def source(tables: str, dim: int, table_seed: int) -> Embeddings:
        strategy = next(choice.strategy for choice in choices if choice.tables == tables)
        if strategy == "all_to_all":
            made = exchange.make_tables(cardinalities, dim, table_seed, tables)
            return LocalEmbeddings(made, len(cardinalities), dim)
        layout = next(part.layout for part in parts if part.tables == tables)
        return exchange.shards(cardinalities, dim, table_seed, layout)

    made: dict[str, Any] = {"tables": source("embedding", embedding_dim, seed)}
    if any(part.tables == "wide" for part in parts):
        made["wide_tables"] = source("wide", 1, seed + 1)
    if model_class is DLRM:
        made |= {"cardinalities": cardinalities, "embedding_dim": embedding_dim}
    return model_class(num_dense, **made, seed=seed, **settings), choices
