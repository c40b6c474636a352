"""``"feedback": "local_updates"`` at ZeRO stage 0: gradients stay on their rank, weights are exchanged.

Deleting this file and its row in :mod:`.paths` removes the feature from DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel.local import LocalUpdatesAddOn, Weight

from ..host.patches import Function, Patches
from .buckets import is_expert
from .part import EngineContext
from .section import inner_optimizer
from .stage0 import Stage0Path

#: Entries of a bucket of experts' gradients, DeepSpeed's own default.
_EXPERT_BUCKET = 500_000_000


class LocalPath(Stage0Path):
    """Local steps of every rank's optimizer; in the warm-up steps gradients are all-reduced."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        add_on = self.reducer.add_on(LocalUpdatesAddOn)
        self._local = add_on.prepare(self._weights, inner_optimizer(self.engine))

    @classmethod
    def applies(cls, engine: Any, config: DCTConfig) -> bool:
        return config.data_parallel.enabled and config.data_parallel.feedback.steps_locally

    def install(self, patches: Patches) -> None:
        super().install(patches)
        self._local.attach(self.engine.module)

    def before_step(self) -> None:
        self._local.show_local()

    def after_step(self) -> None:
        self._local.end_step()

    def saving(self) -> AbstractContextManager[None]:
        return self._local.anchored()

    def close(self) -> None:
        self._local.detach()

    def _reduce_gradients(self, original: Function, *args: Any, **keywords: Any) -> None:
        if not self._local.active:
            super()._reduce_gradients(original, *args, **keywords)
            return
        self.steps.begin()
        # As before a reduction: parameters that were not used get gradients of zeros, and step on.
        _, of_experts = self.engine._get_gradients_for_reduction()
        if self.engine.has_moe_layers:
            self.engine._reduce_expert_gradients(of_experts, _EXPERT_BUCKET)

    def _weights(self) -> Iterator[Weight]:
        """Yield what the optimizer steps, except experts."""
        optimizer = self.optimizer
        groups = getattr(optimizer, "fp16_groups", None)
        if groups is None:
            groups = masters = [group["params"] for group in optimizer.param_groups]
        elif hasattr(optimizer, "fp32_groups_flat"):
            masters = [
                _unflattened(flat, group)
                for flat, group in zip(optimizer.fp32_groups_flat, groups, strict=True)
            ]
        else:
            masters = optimizer.fp32_groups
        names = {id(parameter): name for name, parameter in self.engine.module.named_parameters()}
        for group, copies in zip(groups, masters, strict=True):
            for parameter, master in zip(group, copies, strict=True):
                if not is_expert(parameter):
                    yield Weight(names[id(parameter)], parameter, master)


def _unflattened(flat: Tensor, parameters: list[Any]) -> list[Tensor]:
    """Return views of FP16_Optimizer's fp32 copies of ``parameters``."""
    copies = flat.detach().split([parameter.numel() for parameter in parameters])
    return [copy.view(parameter.shape) for copy, parameter in zip(copies, parameters, strict=True)]
