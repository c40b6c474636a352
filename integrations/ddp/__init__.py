"""torch ``DistributedDataParallel``: a communication hook that reduces gradients through compressed messages.

:mod:`.state` has the hook and its state; :mod:`.early_gradients` tracks which gradients of a bucket are there
before the bucket is full.
"""

from .state import DCTState, Owed, dct_hook

__all__ = ["DCTState", "Owed", "dct_hook"]
