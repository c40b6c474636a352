"""Embedding tables over several ranks: lookups through a compressed all-to-all, or partial results (DES)."""

from __future__ import annotations

from .choice import Choice as Choice
from .choice import Part as Part
from .choice import choose as choose
from .des import ColumnShards as ColumnShards
from .des import Embeddings as Embeddings
from .des import FieldShards as FieldShards
from .des import LocalEmbeddings as LocalEmbeddings
from .embedding_exchange import EmbeddingExchange as EmbeddingExchange
from .embedding_exchange import Route as Route
from .placement import Table as Table
from .placement import place_tables as place_tables
from .request_message import Bags as Bags
from .tables import ShardedTables as ShardedTables
from .tables import TableShard as TableShard
from .tables import load_tables as load_tables
