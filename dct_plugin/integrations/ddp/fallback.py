"""The hook after the end of a compression, which averages dense gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from .parameters import ParameterNames


class DenseAverages:
    """DDP's own averages; the first ones contain the residuals.

    Args:
        residuals: This rank's residuals by parameter, 1-D, to be averaged with its gradients; may be empty.
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
