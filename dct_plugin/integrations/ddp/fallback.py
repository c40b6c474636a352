"""The end of a compression: the mean of the ranks' residuals, and the hook that averages dense gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dct_plugin import checkpoint
from dct_plugin.host_traffic import own_traffic
from dct_plugin.transport import lost_ranks

from .parameters import ParameterNames


class DenseAverages:
    """DDP's own averages; the first ones contain the residuals.

    Args:
        residuals: The mean of the ranks' residuals by parameter, 1-D; may be empty.
        names: The names of the parameters.
        group: The group that DDP averages over.
    """

    def __init__(
        self, residuals: Mapping[str, Tensor], names: ParameterNames, group: dist.ProcessGroup | None
    ) -> None:
        self._residuals, self._names, self._group = dict(residuals), names, group

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if self._residuals and not bucket.buffer().is_sparse:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                residual = self._residuals.pop(self._names.name_of(parameter), None)
                if residual is not None:
                    gradient.view(-1).add_(residual.to(gradient))
        return default_hooks.allreduce_hook(self._group, bucket)  # type: ignore[arg-type]


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
    return {
        name: _mean(streams[name]["residual"] if name in streams else torch.zeros(numel), group)
        for name, numel in sizes.items()
    }


@own_traffic(recorded=False)
def _mean(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mean over the ranks, on CPU; a collective."""
    on_cuda = dist.get_backend(group) == "nccl"
    total = tensor.to("cuda" if on_cuda else "cpu", copy=True)
    with lost_ranks.reported("average of residuals", group):
        dist.all_reduce(total, group=group)
    return total.div_(dist.get_world_size(group)).cpu()
