"""torch ``DistributedDataParallel``: a communication hook that reduces gradients by compressed messages.

:mod:`.state` has the hook, its state, and residuals for ``torch.distributed.checkpoint``.
"""

from .state import AveragedResiduals, DCTState, dct_hook

__all__ = ["AveragedResiduals", "DCTState", "dct_hook"]
