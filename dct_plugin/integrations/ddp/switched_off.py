"""Switching the compression off while a training runs."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from .averaged_residuals import AveragedResiduals
from .parameter_names import ParameterNames
from .state import DCTState

logger = logging.getLogger("dct_plugin")


def detach(state: DCTState) -> None:
    """Let DDP exchange gradients after the next step, which sends all residuals.

    A collective, between two steps. The summary counts the steps so far.
    """
    saved = AveragedResiduals(state).state_dict()
    owed = {name: residual for name, residual in saved["residuals"].items() if residual.any()}
    state.close()
    state.successor = _DenseSums(owed, state.parameters, state.process_group)
    if dist.get_rank(state.process_group) == 0:
        norm = sum(float(residual.norm()) ** 2 for residual in owed.values()) ** 0.5
        logger.warning(
            "dct: switched off after %d steps; the next step brings what was owed: a gradient of norm %.3g "
            "in %d tensors", saved["step"], norm, len(owed),
        )  # fmt: skip


class _DenseSums:
    """DDP's own averages; the first ones contain what was owed.

    Args:
        owed: The mean of the ranks' residuals, by parameter.
        names: The names of the parameters.
        group: The group that DDP averages over.
    """

    def __init__(
        self, owed: dict[str, Tensor], names: ParameterNames, group: dist.ProcessGroup | None
    ) -> None:
        self._owed, self._names, self._group = owed, names, group

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            owed = self._owed.pop(self._names.name_of(parameter), None)
            if owed is not None:
                gradient.view(-1).add_(owed.to(gradient))
        return default_hooks.allreduce_hook(self._group, bucket)  # type: ignore[arg-type]
