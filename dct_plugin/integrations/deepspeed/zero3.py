"""ZeRO-3: gradients go to the ranks that own the parameters' partitions.

DeepSpeed averages a bucket of gradients and scatters it in ``__avg_scatter_grads``, or, with
``reduce_scatter: false``, in ``__avg_scatter_contiguous_grads``, which moves a whole all-reduce. Both become
the reducer's ``reduce_scatter`` to the owners: rank ``r`` of ``P`` has the ``r``-th ``ceil(numel / P)``
entries of every parameter. Buckets, streams, accumulation over micro-batches, clipping, and the gathers of
parameters before each module stay DeepSpeed's; what they gather from is kept by :mod:`.hpz_copies` with hpZ,
and by :mod:`.resident_copies` without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel import Shard
from dct_plugin.data_parallel.plan import shards_in

from ..host.patching import Function, Patches
from .engine import EngineContext, targets_of
from .hpz_copies import HpzCopies
from .path import GradientPath
from .resident_copies import ResidentCopies
from .weight_updates import WeightUpdates

_CLASS = "DeepSpeedZeroOptimizer_Stage3"
_SCATTER = f"_{_CLASS}__avg_scatter_grads"
_SCATTER_CONTIGUOUS = f"_{_CLASS}__avg_scatter_contiguous_grads"


class Zero3Path(GradientPath):
    """The gradient collectives of a ``DeepSpeedZeroOptimizer_Stage3``."""

    wrapper = _CLASS
    targets = targets_of(
        "deepspeed.runtime.zero.stage3",
        _CLASS,
        **{
            _SCATTER: "params_to_reduce communication_data_type",
            _SCATTER_CONTIGUOUS: "buffer_to_reduce communication_data_type",
            "invalidate_secondary_tensor": "",
            "_partition_all_parameters": "",
        },
    )

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        if not self.optimizer.reduce_scatter:
            self.reducer.group.host_collective = "all_reduce"
        settings = context.config.data_parallel
        self._residuals = f", residuals in {settings.residual_dtype}" * settings.feedback.keeps_residual

    def describe(self) -> str:
        return f"{self.setting}, reduce-scatter{self._residuals}"

    def weight_updates(self, context: EngineContext) -> WeightUpdates:
        if self.engine.zero_hpz_partition_size() <= 1:
            return ResidentCopies(context, self.reducer)
        pairs = [pair for group in self.named_parameters() for pair in group]
        return HpzCopies(context, self.reducer, pairs)

    def install(self, patches: Patches) -> None:
        patches.intercept(self.optimizer, _SCATTER, self._scatter)
        patches.intercept(self.optimizer, _SCATTER_CONTIGUOUS, self._scatter_contiguous)

    def _scatter_contiguous(self, original: Function, _: Tensor, dtype: torch.dtype) -> list[Tensor]:
        # The buffer is the bucket's, in which the gradients of its parameters lie.
        return self._scatter(original, self.optimizer.ipg_buckets[dtype].params, dtype)

    def _scatter(self, _: Function, parameters: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
        """Return this rank's part of the average of each parameter's gradient, in the accumulation type.

        DeepSpeed's operations are made in its order, except the division by the number of ranks, which comes
        after the sum: residuals are in the unit of the gradients.
        """
        self.steps.begin()
        optimizer = self.optimizer
        predivide = optimizer.gradient_predivide_factor
        predivides = optimizer.postscale_gradients and predivide != 1.0
        entries = []
        for parameter in parameters:
            flat = parameter.grad.reshape(-1).to(dtype)
            if predivides:
                flat = flat.div(predivide)
            numel, size = parameter.ds_numel, parameter.partition_numel()
            entries.append((self.name_of(0, parameter), flat, shards_in(0, numel, size) if numel else []))
        self.reducer.reduce_scatter(entries, scale=self.scale)
        averages = []
        rank = self.reducer.group.group_rank
        for _name, flat, shards in entries:
            own = next((s for s in shards if s.owner == rank), Shard(rank, 0, 0))
            part = flat[own.start : own.stop]
            if predivides and predivide != self.reducer.group.group_size:
                part = part.mul(predivide)
            averages.append(part.to(optimizer.gradient_accumulation_dtype))
        return averages

    @property
    def scale(self) -> float:
        return 1.0 / self.reducer.group.group_size

    def name_of(self, group: int, parameter: Any) -> str:
        return str(self.optimizer.param_names[parameter])
