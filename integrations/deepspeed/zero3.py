"""ZeRO-3: gradients go to the ranks that own the parameters' partitions.

DeepSpeed averages a bucket of gradients and scatters it in ``__avg_scatter_grads``, or, with
``reduce_scatter: false``, in ``__avg_scatter_contiguous_grads``, which moves a whole all-reduce. Both become
the reducer's ``reduce_scatter`` to the owners: rank ``r`` of ``P`` has the ``r``-th ``ceil(numel / P)``
entries of every parameter. Buckets, streams, accumulation over micro-batches, clipping, and the gathers of
parameters before each module stay DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dct_plugin.config import DataParallelConfig, DCTConfig
from dct_plugin.config.options import show
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.errors import ConfigError

from ..host.patches import Patches
from ..host.steps import StepHooks

#: Of DeepSpeed's optimizer; both take ``(self, gradients or parameters, communication type)``.
SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
SCATTER_CONTIGUOUS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"


class ScatterHooks:
    """Replaces the gradient collectives of a ``DeepSpeedZeroOptimizer_Stage3``.

    Args:
        optimizer: DeepSpeed's optimizer.
        reducer: Over the optimizer's data-parallel group.
        steps: Of the optimizer.
    """

    def __init__(self, optimizer: Any, reducer: GradientReducer, steps: StepHooks) -> None:
        self.optimizer = optimizer
        self.reducer = reducer
        self.steps = steps
        self.scale = 1.0 / reducer.world_size

    def install(self, patches: Patches) -> None:
        """Patch the optimizer instance."""

        def scatter(parameters: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
            return self._scatter(parameters, dtype)

        def scatter_contiguous(_: Tensor, dtype: torch.dtype) -> list[Tensor]:
            # The buffer is the bucket's, in which the gradients of its parameters lie.
            return self._scatter(self.optimizer.ipg_buckets[dtype].params, dtype)

        patches.replace(self.optimizer, SCATTER, scatter)
        patches.replace(self.optimizer, SCATTER_CONTIGUOUS, scatter_contiguous)

    def _scatter(self, parameters: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
        """This rank's part of the average of each parameter's gradient, in DeepSpeed's accumulation type.

        Its operations in its order, but for the division by the number of ranks, which comes after the sum:
        residuals are in the unit of the gradients.
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
            entries.append((self.name_of(0, parameter), flat, self._shards_of(parameter)))
        self.reducer.reduce_scatter(entries, scale=self.scale)
        found = []
        for _, flat, shards in entries:
            own = next((s for s in shards if s.owner == self.reducer.rank), Shard(self.reducer.rank, 0, 0))
            part = flat[own.start : own.stop]
            if predivides and predivide != self.reducer.world_size:
                part = part.mul(predivide)
            found.append(part.to(optimizer.gradient_accumulation_dtype))
        return found

    def _shards_of(self, parameter: Any) -> list[Shard]:
        return shards_in(0, parameter.ds_numel, parameter.partition_numel()) if parameter.ds_numel else []

    def name_of(self, _: int, parameter: Any) -> str:
        """Name of a parameter's stream."""
        return str(self.optimizer.param_names[parameter])


def settings_for_zero3(engine: Any, config: DCTConfig) -> DCTConfig:
    """The section as it is applied under ZeRO-3, where residuals are in int8 unless it says otherwise.

    Raises:
        ConfigError: It asks for what ZeRO-3 cannot give; says why.
    """
    settings = config.data_parallel
    automatic = settings.residual_dtype == "auto" and settings.feedback.keeps_residual
    in_place = (
        "residuals are in int8 here unless residual_dtype says otherwise, and it needs them in fp32; leave "
        "it out, or set residual_dtype to 'fp32' (4 bytes per parameter and rank)"
    )
    refused = {
        "feedback": (
            settings.feedback.looks_ahead or settings.feedback.steps_locally,
            "no rank has the whole weights that passes are displaced from, or that its optimizer would step; "
            "set it to 'local'",
        ),
        "parameters": (
            settings.parameters is not None,
            "modules gather their parameters when they need them, there is no update that all ranks take "
            "over; leave it out (zero_optimization.zero_quantized_weights is DeepSpeed's own way)",
        ),
        "verify": (
            settings.verify is not None,
            "every rank has a part of its own of the parameters, there is nothing to compare; leave it out",
        ),
        "nonfinite_action": (
            settings.nonfinite_action == "skip" and not engine.fp16_enabled(),
            "DeepSpeed looks for such gradients in fp16 alone here; set it to 'pass'",
        ),
        "feedback.momentum": (automatic and settings.feedback.worker_momentum > 0, in_place),
        "expert.error_averaging": (automatic and settings.expert.error_averaging is not None, in_place),
    }
    for key, (asked, reason) in refused.items():
        if asked:
            given = show(attrgetter(key)(settings))
            raise ConfigError(
                f"rank {engine.global_rank}: dct.data_parallel.{key} = {given} under ZeRO stage 3: {reason}"
            )
    if not automatic:
        return config
    changed = DataParallelConfig.of(settings.model_dump(), residual_dtype="int8")
    return config.model_copy(update={"data_parallel": changed})
