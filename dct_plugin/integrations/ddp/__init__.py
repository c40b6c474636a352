"""torch ``DistributedDataParallel``: a communication hook that reduces gradients by compressed messages.

:mod:`.state` has the hook and its state. :mod:`.averaged_residuals` stores residuals with
``torch.distributed.checkpoint``.
"""

from .averaged_residuals import AveragedResiduals
from .state import DCTState, dct_hook

__all__ = ["AveragedResiduals", "DCTState", "dct_hook"]
