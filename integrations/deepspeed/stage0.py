"""Stage 0, and bf16 with fp32 accumulation: the all-reduce at the accumulation boundary.

DeepSpeed collects the gradients in ``buffered_allreduce_fallback``, packs them into buckets and reduces a
bucket in ``allreduce_and_copy``. Only the latter is replaced. Expert parameters (reduced over another group)
and sparse gradients (an all-gather of their own) never come there, or are passed on to DeepSpeed's own path.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.local import LocalUpdates, LocalUpdatesAddOn, Weight

from ..host.patches import Patches
from ..host.steps import StepHooks
from .buckets import Averaging, CommBuffer, Piece

logger = logging.getLogger("dct_plugin")

#: Entries of a bucket of experts' gradients, DeepSpeed's own default.
_EXPERT_BUCKET = 500_000_000


class BoundaryHooks:
    """Replaces the all-reduce of an engine without gradient partitioning.

    Args:
        engine: Stage 0 in any precision, or ZeRO-1 with :class:`BF16_Optimizer`.
        reducer: Over the engine's data-parallel group.
        steps: Of the engine's optimizer.
        experts: Over the groups of ranks with the same experts, by the group's name; experts of others are
            left to DeepSpeed.
    """

    def __init__(
        self,
        engine: Any,
        reducer: GradientReducer,
        steps: StepHooks,
        experts: Mapping[str, GradientReducer],
    ) -> None:
        self.engine = engine
        self.reducer = reducer
        self.experts = experts
        self.steps = steps
        self.local: LocalUpdates | None = None
        self._layout: dict[int, tuple[GradientReducer, list[Piece]]] | None = None
        self._reduced: list[CommBuffer] = []
        """Of this step, to be written back when the reductions are finished."""
        self._unknown_reported = False

    def install(self, patches: Patches) -> None:
        """Patch the engine instance."""
        engine = self.engine
        collect, reduce = engine.buffered_allreduce_fallback, engine.allreduce_and_copy
        reducers = [self.reducer, *self.experts.values()]
        for reducer in reducers:
            reducer.deferred = True

        def buffered_allreduce_fallback(*args: Any, **keywords: Any) -> None:
            self._layout = None  # gradients are other tensors in every step
            self.steps.begin()
            if self.local is not None and self.local.active:
                self._leave_gradients()
                return
            try:
                collect(*args, **keywords)
            finally:
                self._layout = None
            for reducer in reducers:
                reducer.finish()
            for buffer in self._reduced:
                buffer.write_back()
            self._reduced.clear()

        def allreduce_and_copy(
            small_bucket: list[Tensor], dp_group: Any, dp_world_size: float | None = None
        ) -> None:
            if not self._reduce(small_bucket):
                reduce(small_bucket, dp_group, dp_world_size)

        patches.replace(engine, "buffered_allreduce_fallback", buffered_allreduce_fallback)
        patches.replace(engine, "allreduce_and_copy", allreduce_and_copy)

    def update_locally(self) -> LocalUpdates:
        """For ``"feedback": "local_updates"``: gradients stay as they are, and weights are exchanged."""
        optimizer = self.engine.optimizer
        self.local = self.reducer.add_on(LocalUpdatesAddOn).prepare(
            self._weights, getattr(optimizer, "optimizer", optimizer)
        )
        return self.local

    def _leave_gradients(self) -> None:
        # As before a reduction: parameters that were not used get gradients of zeros, and step on.
        _, of_experts = self.engine._get_gradients_for_reduction()
        if self.engine.has_moe_layers:
            self.engine._reduce_expert_gradients(of_experts, _EXPERT_BUCKET)

    def _weights(self) -> Iterator[Weight]:
        """What the optimizer steps, but for experts."""
        optimizer = self.engine.optimizer
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

    @property
    def scale(self) -> float:
        """Factor that makes the gradient of the sum over the ranks."""
        return self._averaging().after

    def _averaging(self) -> Averaging:
        engine = self.engine
        return Averaging.of(
            self.reducer.world_size,
            average=engine.gradient_average,
            postscale=engine.postscale_gradients(),
            predivide=engine.gradient_predivide_factor(),
        )

    def name_of(self, _: int, parameter: Any) -> str:
        """Name of a parameter's stream."""
        names = getattr(self.engine.optimizer, "param_names", None)  # of BF16_Optimizer
        if names is not None and parameter in names:
            return str(names[parameter])
        return next(
            (name for name, other in self.engine.module.named_parameters() if other is parameter), "unused"
        )

    def _reduce(self, bucket: list[Tensor]) -> bool:
        """Reduce a bucket of gradients in place; False, and nothing done, if they are not all ours."""
        if self._layout is None:
            # Not before DeepSpeed asks: it first makes gradients of zeros for parameters that were not used.
            self._layout = {
                pointer: (reducer, parts) for pointer, reducer, parts in self._gradients() if parts
            }
        found = [self._layout.get(tensor.data_ptr()) for tensor in bucket]
        known = [layout for layout in found if layout is not None]
        if len(known) < len(bucket):
            self._report_unknown(len(bucket) - len(known))
            return False
        reducer = known[0][0]  # a bucket is of one group of ranks
        dtype, averaging = self.engine.communication_data_type, self._averaging()
        with torch.no_grad():
            buffers = [CommBuffer(grad, dtype, averaging.before) for grad in bucket]
            entries = [
                (piece.name, piece.of(buffer.flat))
                for buffer, (_, layout) in zip(buffers, known, strict=True)
                for piece in layout
            ]
            reducer.all_reduce(entries, scale=averaging.after)
        self._reduced += buffers
        return True

    def _gradients(self) -> Iterator[tuple[int, GradientReducer, list[Piece]]]:
        """Address of every dense gradient that is ours, what reduces it, and the parameters in it."""
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "get_grads_for_reduction"):
            yield from self._flat_gradients(optimizer)
            return
        for name, parameter in self.engine.module.named_parameters():
            grad = parameter.grad
            reducer = self._reducer_of(parameter)
            if grad is not None and not grad.is_sparse and reducer is not None:
                yield grad.data_ptr(), reducer, [Piece(name, 0, grad.numel())]

    def _reducer_of(self, parameter: Any) -> GradientReducer | None:
        return self.experts.get(parameter.group_name) if is_expert(parameter) else self.reducer

    def _flat_gradients(self, optimizer: Any) -> Iterator[tuple[int, GradientReducer, list[Piece]]]:
        """BF16_Optimizer: one flat buffer per parameter group, with padding (left alone) at its end."""
        groups = zip(
            optimizer.fp32_groups_gradients_flat,
            optimizer.fp32_groups_gradients,
            optimizer.bf16_groups,
            strict=True,
        )
        for flat, grads, parameters in groups:
            reducers = {self._reducer_of(parameter) for parameter in parameters}
            reducer = reducers.pop() if len(reducers) == 1 else None
            if reducer is None:
                continue
            yield (
                flat.data_ptr(),
                reducer,
                [
                    Piece(
                        optimizer.param_names[p], grad.storage_offset() - flat.storage_offset(), grad.numel()
                    )
                    for p, grad in zip(parameters, grads, strict=True)
                    if grad.numel()
                ],
            )

    def _report_unknown(self, count: int) -> None:
        if not self._unknown_reported and not self.engine.has_moe_layers:
            self._unknown_reported = True
            logger.warning(
                "dct: %d gradients that belong to no parameter of the model are reduced dense", count
            )


def _unflattened(flat: Tensor, parameters: list[Any]) -> list[Tensor]:
    """Views of FP16_Optimizer's fp32 copies of ``parameters``."""
    parts = flat.detach().split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


def is_expert(parameter: Any) -> bool:
    """Whether DeepSpeed treats the parameter as an expert's: reduced over a group of its own."""
    return not getattr(parameter, "allreduce", True)
