"""Embedding tables over several ranks: lookups through a compressed all-to-all, or partial results (DES)."""

from __future__ import annotations

from .channel import EmbeddingChannel, Route
from .choice import Choice, Part, choose
from .des import ColumnShards, Embeddings, FieldShards, LocalEmbeddings
from .placement import Table, place_tables
from .request_message import Bags
from .tables import ShardedTables, TableShard, load_tables

__all__ = [
    "Bags",
    "Choice",
    "ColumnShards",
    "EmbeddingChannel",
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
