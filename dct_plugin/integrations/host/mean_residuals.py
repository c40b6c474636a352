"""The mean of the ranks' residuals: what the weights still lack, which any number of ranks can go on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin import checkpoint
from dct_plugin.host_traffic import own_traffic
from dct_plugin.transport import lost_ranks


@own_traffic(recorded=False)
def mean_residuals(
    state: dict[str, Any], sizes: Mapping[str, int], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Return the mean of the ranks' residuals by parameter, fp32 [numel], on CPU; a collective.

    Args:
        state: This rank's state of the reducer.
        sizes: The entries of the parameters by name, in the same order on all ranks.
        group: The ranks.
    """
    content = checkpoint.content_of(state, rank=0, world_size=1, unit=1.0)
    streams = checkpoint.reshard([content])["streams"]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    means = {}
    for name, numel in sizes.items():
        total = (streams[name]["residual"] if name in streams else torch.zeros(numel)).to(device)
        with lost_ranks.reported("average of residuals", group):
            dist.all_reduce(total, group=group)
        means[name] = total.div_(dist.get_world_size(group)).cpu()
    return means
