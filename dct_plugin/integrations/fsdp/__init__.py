"""torch FSDP2: compressed messages replace its all-reduce between replicas (HSDP, ``replicate``), or, where
all ranks shard one copy of the model, its reduce-scatter and gathers.

:mod:`.compression` has :func:`compress_replicas`, :mod:`.shards` has :func:`compress_shards`. The other
modules are parts of them: what is read and replaced in torch, the process group that FSDP calls, step-ahead
through sharded parameters, copies of the weights in nodes, saved states.
"""

from .compression import ReplicaCompression, compress_replicas
from .shards import ShardCompression, compress_shards

__all__ = ["ReplicaCompression", "ShardCompression", "compress_replicas", "compress_shards"]
