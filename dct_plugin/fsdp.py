"""FSDP2 and HSDP: ``from dct_plugin.fsdp import compress_replicas, compress_shards``.

Short name of :mod:`dct_plugin.integrations.fsdp`.
"""

from .integrations.fsdp import ReplicaCompression, ShardCompression, compress_replicas, compress_shards

__all__ = ["ReplicaCompression", "ShardCompression", "compress_replicas", "compress_shards"]
