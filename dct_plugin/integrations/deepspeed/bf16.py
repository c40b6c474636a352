"""bf16 with fp32 accumulation (``BF16_Optimizer``, ZeRO stage 1): the all-reduce of fp32 accumulators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime import bf16_optimizer

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel import GradientReducer

from .buckets import BucketSlice
from .stage0 import TARGETS, Stage0Path
from .support import precision_of, targets_of
from .weight_updates import WeightLayout


class Bf16Path(Stage0Path):
    """The all-reduce of a :class:`BF16_Optimizer`, whose gradients lie in one buffer for each group."""

    targets = (
        *TARGETS,
        *targets_of(
            "deepspeed.runtime.bf16_optimizer",
            "BF16_Optimizer",
            get_grads_for_reduction="",
            step="closure",
            update_lp_params="",
        ),
        *WeightLayout.targets("deepspeed.runtime.bf16_optimizer"),
    )
    attributes = (
        "bf16_groups", "fp32_groups_gradients", "fp32_groups_gradients_flat", "param_names",
        "bf16_groups_flat", "bf16_partitioned_groups", "fp32_groups_flat_partition",
    )  # fmt: skip
    weight_layout = WeightLayout(
        module=bf16_optimizer,
        flat="bf16_groups_flat",
        partitions="bf16_partitioned_groups",
        masters="fp32_groups_flat_partition",
        parameters="bf16_groups",
    )

    @classmethod
    def applies(cls, engine: Any, config: DCTConfig) -> bool:
        return type(engine.optimizer) is bf16_optimizer.BF16_Optimizer

    def describe(self) -> str:
        stage, precision = int(self.engine.zero_optimization_stage()), precision_of(self.engine)
        return f"ZeRO stage {stage}, {precision} with fp32 accumulation, all-reduce"

    def name_of(self, group: int, parameter: Any) -> str:
        names = self.optimizer.param_names
        return str(names[parameter]) if parameter in names else super().name_of(group, parameter)

    def _gradients(self) -> Iterator[tuple[int, GradientReducer, list[BucketSlice]]]:
        optimizer = self.optimizer
        for flat, grads, parameters in zip(
            optimizer.fp32_groups_gradients_flat,
            optimizer.fp32_groups_gradients,
            optimizer.bf16_groups,
            strict=True,
        ):
            reducers = {self.reducer_of(parameter) for parameter in parameters}
            reducer = reducers.pop() if len(reducers) == 1 else None
            # The padding at the end of the buffer is left alone.
            slices = [
                BucketSlice(
                    optimizer.param_names[parameter],
                    grad.storage_offset() - flat.storage_offset(),
                    grad.numel(),
                )
                for parameter, grad in zip(parameters, grads, strict=True)
                if grad.numel()
            ]
            if reducer is not None and slices:
                yield flat.data_ptr(), reducer, slices
