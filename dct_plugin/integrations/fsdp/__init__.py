"""torch FSDP2 with a replica dimension (HSDP, ``replicate``): compressed messages replace its all-reduce.

:mod:`.compression` has :func:`compress_replicas`. The other modules are parts of it: what is read and
replaced in torch, the process group that FSDP calls, step-ahead through sharded parameters, saved states.
"""

from .compression import ReplicaCompression, compress_replicas

__all__ = ["ReplicaCompression", "compress_replicas"]
