"""FSDP2 and HSDP: ``from dct_plugin.fsdp import compress_replicas``.

Short name of :mod:`dct_plugin.integrations.fsdp`.
"""

from .integrations.fsdp import ReplicaCompression, compress_replicas

__all__ = ["ReplicaCompression", "compress_replicas"]
