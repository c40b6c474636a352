"""``DistributedDataParallel.join()``: a rank without further batches reduces gradients of zeros."""

from __future__ import annotations

import torch.distributed as dist

from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.errors import ConfigError


def refuse_join(settings: DataParallelConfig, reducer: GradientReducer, *, has_scaler: bool) -> None:
    """Stop, and tell the other ranks, where a rank without batches cannot go along with them.

    Raises:
        ConfigError: Names the setting.
    """
    if has_scaler:
        problem = "a GradScaler: this rank does not see how the others change their loss scale"
    elif settings.nonfinite_action == "skip":
        problem = "nonfinite_action = 'skip': this rank does not see which steps the others skip"
    elif settings.verify is not None:
        problem = "verify: this rank's weights stay behind until all ranks have joined"
    elif settings.feedback.looks_ahead:
        problem = "feedback = 'step_ahead': this rank makes no optimizer steps"
    else:
        return
    reducer.exchange.abort()
    raise ConfigError(
        f"rank {dist.get_rank()}: this rank has no more inputs, and DistributedDataParallel.join() does "
        f"not work with {problem}; give all ranks the same number of batches (DistributedSampler, "
        "drop_last=True), or leave that setting out"
    )
