"""ZeRO stage 0, and bf16 with fp32 accumulation: the all-reduce at the accumulation boundary.

DeepSpeed collects the gradients in ``buffered_allreduce_fallback``, packs them into buckets and reduces a
bucket in ``allreduce_and_copy``. Only the latter is replaced. The gradients of experts are left to DeepSpeed
unless they are thresholded, and so are sparse gradients, which it gathers in a way of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer

from ..host.patching import Function, Patches
from .engine import EngineContext, precision_of, targets_of
from .path import CommunicationBuffer, GradientPath
from .weight_updates import WeightLayout

_BF16, _BF16_MODULE = "BF16_Optimizer", "deepspeed.runtime.bf16_optimizer"
#: Attributes of DeepSpeed's wrappers for 16 bits, and keys of their states: the fp32 masters of each group,
#: or all of a group in one tensor.
_MASTERS, _FLAT_MASTERS = "fp32_groups", "fp32_groups_flat"
#: Name, offset in the buffer of a gradient, and number of entries of a parameter.
_Slice = tuple[str, int, int]

TARGETS = targets_of(
    "deepspeed.runtime.engine",
    "DeepSpeedEngine",
    buffered_allreduce_fallback="grads elements_per_buffer",
    allreduce_and_copy="small_bucket dp_group dp_world_size",
    _get_gradients_for_reduction="",
    _reduce_expert_gradients="expert_grads elements_per_buffer",
)


class Stage0Path(GradientPath):
    """The all-reduce of an engine that does not shard its optimizer."""

    targets = TARGETS
    trains_unfrozen = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._names = {id(parameter): name for name, parameter in self.engine.module.named_parameters()}
        self._layout: dict[int, tuple[GradientReducer, list[_Slice]]] | None = None
        """By the address of a gradient, what reduces it and the parameters in it; for the current step."""
        self._reduced: list[CommunicationBuffer] = []
        """Buffers of this step, to be written back when the reductions are finished."""

    def describe(self) -> str:
        return f"stage 0, {precision_of(self.engine)}, all-reduce"

    def install(self, patches: Patches) -> None:
        patches.intercept(self.engine, "buffered_allreduce_fallback", self._reduce_gradients)
        patches.intercept(self.engine, "allreduce_and_copy", self._reduce_bucket)
        if self.reducer.add_ons.local_steps is not None and self.masters():
            patches.intercept(self.optimizer, "state_dict", self._save_common_masters)

    def masters(self) -> dict[str, tuple[Tensor, Any]]:
        found: dict[str, tuple[Tensor, Any]] = {}
        parameters, optimizer = self.named_parameters(), self.optimizer
        for named, tensors in zip(parameters, getattr(optimizer, _MASTERS, ()), strict=False):
            found |= {name: (tensor, ...) for (name, _), tensor in zip(named, tensors, strict=True)}
        for named, flat in zip(parameters, getattr(optimizer, _FLAT_MASTERS, ()), strict=False):
            stop = 0
            for name, parameter in named:
                start, stop = stop, stop + parameter.numel()
                found[name] = flat, slice(start, stop)
        return found

    def _save_common_masters(self, original: Function, *args: Any, **keywords: Any) -> dict[str, Any]:
        """Save the weights that all ranks hold; the plugin's files have those of each rank."""
        state: dict[str, Any] = original(*args, **keywords)
        groups = [
            [self.reducer.shared_weight(name, p.data).view(p.shape) for name, p in group]
            for group in self.named_parameters()
        ]
        if _MASTERS in state:
            return state | {_MASTERS: groups}
        return state | {_FLAT_MASTERS: [torch.cat([each.view(-1) for each in group]) for group in groups]}

    def _reduce_gradients(self, original: Function, *args: Any, **keywords: Any) -> None:
        self._layout = None  # gradients are other tensors in every step
        self.steps.begin()
        try:
            with self.uncompressed("sparse"):
                original(*args, **keywords)
        finally:
            self._layout = None
        for reducer in self.reducers:
            reducer.finish()
        for buffer in self._reduced:
            buffer.write_back()
        self._reduced.clear()

    def _reduce_bucket(
        self, original: Function, bucket: list[Tensor], dp_group: Any, dp_world_size: float | None = None
    ) -> None:
        """Reduce a bucket of gradients in place; DeepSpeed does it if they are not all known."""
        if self._layout is None:
            # Not before DeepSpeed asks: it first makes gradients of zeros for parameters that were not used.
            self._layout = {address: (reducer, slices) for address, reducer, slices in self._gradients()}
        found = [self._layout.get(tensor.data_ptr()) for tensor in bucket]
        known = [layout for layout in found if layout is not None]
        if len(known) < len(bucket):
            experts = dp_group in self.engine.expert_data_parallel_group.values()
            with self.uncompressed("experts" if experts else "unknown_tensors"):
                original(bucket, dp_group, dp_world_size)
            return
        reducer = known[0][0]  # a bucket belongs to one group of ranks
        dtype, factors = self.engine.communication_data_type, self.factors()
        with torch.no_grad():
            buffers = [CommunicationBuffer(grad, dtype, factors.before) for grad in bucket]
            entries = [
                (name, buffer.flat.narrow(0, offset, numel))
                for buffer, (_, slices) in zip(buffers, known, strict=True)
                for name, offset, numel in slices
            ]
            reducer.begin(entries, scale=factors.after).finish()
        self._reduced += buffers

    def name_of(self, group: int, parameter: Any) -> str:
        return self._names.get(id(parameter), "unused")

    def _gradients(self) -> Iterator[tuple[int, GradientReducer, list[_Slice]]]:
        """Yield the address, the reducer and the parameters of every gradient that is reduced here."""
        for name, parameter in self.engine.module.named_parameters():
            grad, reducer = parameter.grad, self.reducer_of(parameter)
            if grad is not None and not grad.is_sparse and reducer is not None:
                yield grad.data_ptr(), reducer, [(name, 0, grad.numel())]


class Bf16Path(Stage0Path):
    """The all-reduce of a :class:`BF16_Optimizer`, whose gradients lie in one buffer for each group."""

    targets = (
        *TARGETS,
        *targets_of(_BF16_MODULE, _BF16, get_grads_for_reduction="", step="closure", update_lp_params=""),
    )
    wrapper = _BF16
    weight_layout = WeightLayout("bf16_groups", "bf16_partitioned_groups")

    def describe(self) -> str:
        return f"{self.setting} with fp32 accumulation, all-reduce"

    def name_of(self, group: int, parameter: Any) -> str:
        names = self.optimizer.param_names
        return str(names[parameter]) if parameter in names else super().name_of(group, parameter)

    def _gradients(self) -> Iterator[tuple[int, GradientReducer, list[_Slice]]]:
        optimizer = self.optimizer
        flats, names = optimizer.fp32_groups_gradients_flat, optimizer.param_names
        groups = zip(flats, optimizer.fp32_groups_gradients, optimizer.bf16_groups, strict=True)
        for flat, grads, parameters in groups:
            reducers = {self.reducer_of(parameter) for parameter in parameters}
            reducer = reducers.pop() if len(reducers) == 1 else None
            # The padding at the end of the buffer is left alone.
            slices = [
                (names[parameter], grad.storage_offset() - flat.storage_offset(), grad.numel())
                for parameter, grad in zip(parameters, grads, strict=True)
                if grad.numel()
            ]
            if reducer is not None and slices:
                yield flat.data_ptr(), reducer, slices
