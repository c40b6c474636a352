"""Embedding tables over several ranks: lookups through a compressed all-to-all, or partial results (DES)."""

from __future__ import annotations

from .choice import Choice, Part, choose
from .des import ColumnShards, Embeddings, FieldShards, LocalEmbeddings
from .embedding_exchange import EmbeddingExchange, Route
from .placement import Table, place_tables
from .request_message import Bags
from .tables import ShardedTables, TableShard, load_tables

__all__ = [
    "Bags",
    "Choice",
    "ColumnShards",
    "EmbeddingExchange",
    "Embeddings",
    "FieldShards",
    "LocalEmbeddings",
    "Part",
    "Route",
    "ShardedTables",
    "Table",
    "TableShard",
    "choose",
    "load_tables",
    "place_tables",
]
