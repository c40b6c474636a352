"""Embedding tables over several ranks: lookups through a compressed all-to-all."""

from __future__ import annotations

from .embedding_exchange import EmbeddingExchange, Route
from .placement import Table, place_tables
from .request_message import Bags
from .tables import ShardedTables, TableShard, load_tables

__all__ = [
    "Bags",
    "EmbeddingExchange",
    "Route",
    "ShardedTables",
    "Table",
    "TableShard",
    "load_tables",
    "place_tables",
]
