"""FSDP2 and HSDP: ``from dct_plugin.fsdp import compress_replicas``.

Only the short name; the work is done by :mod:`dct_plugin.integrations.fsdp`.
"""

from .integrations.fsdp import ReplicaCompression, compress_replicas

__all__ = ["ReplicaCompression", "compress_replicas"]
