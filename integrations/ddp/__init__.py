"""torch ``DistributedDataParallel``: a communication hook that reduces gradients by compressed messages.

:mod:`.state` has the hook and its state. The other modules are parts of the state: gradients that leave
before their bucket is full, local updates, names of parameters, residuals for
``torch.distributed.checkpoint``.
"""

from .averaged_residuals import AveragedResiduals
from .state import DCTState, dct_hook
from .switched_off import detach

__all__ = ["AveragedResiduals", "DCTState", "dct_hook", "detach"]
