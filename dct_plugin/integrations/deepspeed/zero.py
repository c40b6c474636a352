"""ZeRO-1 and ZeRO-2: gradients go to the ranks that own the optimizer's partitions.

DeepSpeed reduces a bucket of gradients in ``average_tensor`` (contiguous gradients) or ``allreduce_bucket``
(not contiguous) and afterwards copies the result into partitions. Streams, events, double buffers, copies and
accumulation stay DeepSpeed's; only the collectives inside are replaced:

=====================  ==================  ==================================  ==========================
contiguous_gradients   reduce_scatter      DeepSpeed's collective              here
=====================  ==================  ==================================  ==========================
true                   true                ``allreduce_and_scatter``           ``reduce_scatter`` to owners
true                   false               ``gradient_reduction_w_predivide``  ``all_reduce``
false                  true                ``allreduce_bucket``                ``reduce_scatter`` to owners
false                  false               ``allreduce_bucket``                ``all_reduce``
=====================  ==================  ==================================  ==========================

DeepSpeed copies the sums of a bucket into the gradients of its partition as soon as the reduction returns,
for the bucket's buffer is filled again. Two classes decide how long the CPU waits before:

- :class:`BucketReductions` waits for every bucket. With ``overlap_comm`` messages travel while the backward
  pass goes on, on CUDA on DeepSpeed's reduction stream. The copies are made before the next bucket is handed
  over, or at the end of the pass.
- :class:`DeferredReductions`, on a device, waits once, at the end of the backward pass, for figures.

The all-gather of updated parameters after the step stays dense, unless :mod:`.weight_updates` replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.reducer import Overlap, Reduction

from ..host.patching import Function, Patches, given
from .engine import EngineContext, is_expert, targets_of, tied_weights
from .path import CommunicationBuffer, GradientPath
from .weight_updates import WeightLayout

_CLASS = "DeepSpeedZeroOptimizer"


class _Parameter(NamedTuple):
    """A parameter in a bucket."""

    group: int
    """Index of its group in the optimizer."""
    identity: int
    """DeepSpeed's number for it."""
    parameter: Any


class BucketReductions:
    """Reductions of buckets whose sums have an owner.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer``.
        reducer: Reduces its gradients.
    """

    def __init__(self, optimizer: Any, reducer: GradientReducer) -> None:
        self._optimizer, self._reducer = optimizer, reducer
        # Where DeepSpeed leaves the buffer of a bucket alone while it is reduced.
        keeps_buffer = optimizer.contiguous_gradients and optimizer.reduce_scatter
        self._overlaps = bool(optimizer.overlap_comm and keeps_buffer and reducer.group.group_size > 1)
        # On CUDA DeepSpeed calls on its own reduction stream.
        self._overlap = Overlap(reducer, wanted=self._overlaps, own_stream=False)
        self._uses: list[Callable[[], None]] = []

    def reduce(self, reductions: Sequence[Reduction], use: Callable[[], None]) -> None:
        """Reduce a bucket.

        Args:
            reductions: Those of its gradients.
            use: Uses the sums.
        """
        for each in reductions:
            self._overlap.submit(each)
        self._uses.append(use)
        if not self._overlaps:
            self._complete()

    def install(self, patches: Patches) -> None:
        """Patch the optimizer instance."""
        patches.intercept(self._optimizer, "reduce_ipg_grads", self._reduce_buckets)
        patches.intercept(self._optimizer, "copy_grads_in_partition", self._copy)

    def _reduce_buckets(self, original: Function, comm_dtype: Any = None) -> None:
        self._complete()
        original(comm_dtype)
        if comm_dtype is None:  # the end of the backward pass
            self._complete()

    def _copy(self, original: Function, parameter: Any, *arguments: Any) -> None:
        if self._uses:
            self._uses.append(lambda: original(parameter, *arguments))
        else:
            original(parameter, *arguments)

    def _complete(self) -> None:
        """Wait for the reductions that run, and have DeepSpeed copy the sums."""
        if self._uses:
            with self._reduction_stream():
                self._overlap.wait()
                uses, self._uses = self._uses, []
                for use in uses:
                    use()

    def _reduction_stream(self) -> AbstractContextManager[Any]:
        """Return the context of DeepSpeed's reduction stream, where it has one."""
        stream = self._optimizer.reduction_stream if self._optimizer.overlap_comm else None
        on_cuda = stream is not None and self._reducer.group.device.type == "cuda"
        return torch.cuda.stream(stream) if on_cuda else nullcontext()


class DeferredReductions(BucketReductions):
    """Reductions that are waited for at the end of the backward pass; arguments as of the base class."""

    def reduce(self, reductions: Sequence[Reduction], use: Callable[[], None]) -> None:
        for each in reductions:
            each.finish()
        use()

    def _reduce_buckets(self, original: Function, comm_dtype: Any = None) -> None:
        original(comm_dtype)
        if comm_dtype is None:  # the end of the backward pass
            with self._reduction_stream():
                self._reducer.finish()


class ZeroPath(GradientPath):
    """The gradient collectives of a ``DeepSpeedZeroOptimizer`` (stage 1 or 2)."""

    targets = targets_of(
        "deepspeed.runtime.zero.stage_1_and_2",
        _CLASS,
        average_tensor="tensor communication_data_type",
        allreduce_and_scatter="bucket communication_data_type numel_per_bucket log divide process_group",
        gradient_reduction_w_predivide="tensor communication_data_type",
        allreduce_bucket="bucket communication_data_type rank log divide process_group",
        get_param_id="param",
        step="closure",
        update_lp_params="",
    )
    wrapper = _CLASS
    weight_layout = WeightLayout("bit16_groups", "parallel_partitioned_bit16_groups")

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        optimizer = self.optimizer
        self._expert_reducers = {
            optimizer.expert_dp_process_group[name]: reducer for name, reducer in self.experts.items()
        }
        # Other stages of a pipeline, with partitions of their own, have copies of these weights that must
        # stay bitwise the same: their gradients are reduced as if nobody owned a part of them.
        self._tied_weights = {id(weight) for weight, _ in tied_weights(self.engine)}
        self._to_owners = bool(optimizer.reduce_scatter)
        # Before 0.19.5, ZeRO knew no gradient_allreduce_op and always averaged.
        self.averages = bool(getattr(optimizer, "gradient_average", True))
        # With contiguous gradients to their owners, average_tensor has divided by the number of ranks before.
        if self._to_owners and self.averages and optimizer.contiguous_gradients:
            self.unit = 1.0 / self.reducer.group.group_size
        for reducer in self.reducers:
            # DeepSpeed reduces whole buckets on all ranks, or each part on its owner.
            together = getattr(optimizer, "use_multi_rank_bucket_allreduce", True)
            reducer.group.host_collective = "all_reduce" if together else "reduce"
        self._bucket: Tensor | None = None
        kind = BucketReductions if self.reducer.group.backend.lengths_on_host else DeferredReductions
        self._reductions = kind(optimizer, self.reducer)
        self._shards: dict[tuple[int, int], list[Shard]] = {}

    def describe(self) -> str:
        form = "reduce-scatter" if self._to_owners else "all-reduce"
        layout = "contiguous" if self.optimizer.contiguous_gradients else "separate"
        return f"{self.setting}, {form}, {layout} gradients"

    def install(self, patches: Patches) -> None:
        self._reductions.install(patches)
        # One bucket for all owners instead of one per owner: then everything comes through
        # allreduce_and_scatter.
        patches.replace(self.optimizer, "use_multi_rank_bucket_allreduce", True)
        patches.intercept(self.optimizer, "average_tensor", self._average_tensor)
        patches.intercept(self.optimizer, "allreduce_and_scatter", self._allreduce_and_scatter)
        patches.intercept(self.optimizer, "gradient_reduction_w_predivide", self._reduce_whole_bucket)
        patches.intercept(self.optimizer, "allreduce_bucket", self._reduce_separate_gradients)

    @property
    def scale(self) -> float:
        if not self.optimizer.contiguous_gradients:
            return 1.0 / self.reducer.group.group_size if self.averages else 1.0
        return 1.0 if self._to_owners else super().scale

    def name_of(self, group: int, parameter: Any) -> str:
        name = self.optimizer.param_names.get(parameter)
        return str(name) if name is not None else f"group{group}.{parameter.param_idx_in_group}"

    # -- DeepSpeed's collectives ---

    def _average_tensor(
        self, original: Function, tensor: Tensor, communication_data_type: torch.dtype
    ) -> None:
        """Note which bucket DeepSpeed's ``average_tensor`` is about to reduce."""
        self.steps.begin()
        with self.uncompressed("unknown_bucket"), Patches() as patches:
            patches.replace(self, "_bucket", tensor)
            original(tensor, communication_data_type)

    def _allreduce_and_scatter(
        self,
        original: Function,
        bucket: list[Any],
        communication_data_type: torch.dtype,
        *args: Any,
        process_group: Any = None,
        **keywords: Any,
    ) -> None:
        """Reduce a contiguous bucket to its owners: the gradients of all ranks, or of a group of experts.

        Args:
            bucket: ``(owners, slice of the bucket[, fp32 accumulator of the slice if it is owned here])``.
                Its gradients are divided by the number of ranks already.
        """
        ours = process_group is self.optimizer.dp_process_group
        reducer = self.reducer if ours else self._expert_reducers.get(process_group)
        if self._bucket is None or reducer is None:
            with self.uncompressed(self._reason(process_group)):
                original(bucket, communication_data_type, *args, process_group=process_group, **keywords)
            return
        parameters, first = self._parameters(communication_data_type), self._bucket.storage_offset()
        buffer = CommunicationBuffer(self._bucket, communication_data_type)

        def use() -> None:
            for owners, part, *accumulators in bucket:
                if reducer.group.group_rank in (owners if isinstance(owners, frozenset) else (owners,)):
                    result = buffer.flat.narrow(0, part.storage_offset() - first, part.numel())
                    if accumulators and accumulators[0] is not None:
                        accumulators[0].add_(result.to(accumulators[0].dtype))
                    if result.data_ptr() != part.data_ptr():
                        part.copy_(result)

        if reducer is self.reducer:
            self._reductions.reduce(self._reductions_of(buffer.flat, parameters, reducer), use)
        else:
            self._reduce(buffer.flat, parameters, reducer)
            use()

    def _reason(self, process_group: Any) -> str:
        """Return why a bucket is left to DeepSpeed, which reduces it over ``process_group``."""
        if process_group in (self.optimizer.expert_dp_process_group or {}).values():
            return "experts"
        is_known = process_group in (None, self.optimizer.dp_process_group)
        return "unknown_bucket" if is_known else "unknown_group"

    def _reduce_whole_bucket(
        self, original: Function, tensor: Tensor, communication_data_type: torch.dtype
    ) -> Tensor:
        """Reduce a contiguous bucket, the whole to every rank; return it in the communication type."""
        parameters = self._parameters(communication_data_type)
        if tensor.numel() == 0 or any(is_expert(each.parameter) for each in parameters):
            with self.uncompressed("experts"):
                return original(tensor, communication_data_type)
        factors = self.factors()
        buffer = CommunicationBuffer(tensor, communication_data_type, factors.before)
        self._reduce(buffer.flat, parameters, self.reducer, scale=factors.after)
        buffer.write_back()
        return buffer.flat

    def _reduce_separate_gradients(
        self,
        original: Function,
        bucket: list[Tensor],
        communication_data_type: torch.dtype,
        *more: Any,
        **keywords: Any,
    ) -> Tensor:
        """Reduce gradients that lie apart; return them in one tensor, in the communication type."""
        call = bucket, communication_data_type, *more
        names = "rank", "divide", "process_group"
        rank, divide, group = (given(original, name, call, keywords) for name in names)
        parameters = self._separate_parameters(bucket, communication_data_type)
        if rank is not None or not divide or parameters is None:
            with self.uncompressed(self._reason(group)):
                return original(*call, **keywords)
        self.steps.begin()
        flat = CommunicationBuffer(self.optimizer.flatten(bucket), communication_data_type).flat
        self._reduce(flat, parameters, self.reducer, scale=self.scale)
        return flat

    def _reduce(
        self, flat: Tensor, parameters: Sequence[_Parameter], reducer: GradientReducer, *, scale: float = 1.0
    ) -> None:
        """Reduce the gradients in ``flat`` that ``reducer`` reduces."""
        for each in self._reductions_of(flat, parameters, reducer, scale=scale):
            each.finish()
        reducer.finish()

    def _reductions_of(
        self, flat: Tensor, parameters: Sequence[_Parameter], reducer: GradientReducer, *, scale: float = 1.0
    ) -> list[Reduction]:
        """Return the reductions of the gradients that ``reducer`` reduces: whole, or each part at its owner.

        Args:
            flat: The gradients of ``parameters``, one after the other.
        """
        everywhere, sharded, stop = [], [], 0
        for each in parameters:
            start, stop = stop, stop + each.parameter.numel()
            if self.reducer_of(each.parameter) is not reducer:
                continue
            name, gradient = self.name_of(each.group, each.parameter), flat[start:stop]
            if self._to_owners and not self._is_whole(each):
                sharded.append((name, gradient, self._shards_of(each)))
            else:
                everywhere.append((name, gradient))
        reductions = [reducer.begin(everywhere, scale=scale)] if everywhere else []
        return [*reductions, reducer.begin_scatter(sharded, scale=scale)] if sharded else reductions

    # -- parameters and their owners ---

    def _is_whole(self, each: _Parameter) -> bool:
        """Return whether all ranks need the whole gradient: that of tied weights, and of a Muon matrix with
        several owners, which orthogonalise all of it.
        """
        is_muon = getattr(each.parameter, "use_muon", False) and len(self._shards_of(each)) > 1
        return is_muon or id(each.parameter) in self._tied_weights

    def _parameters(self, dtype: torch.dtype) -> list[_Parameter]:
        """Return the parameters of the bucket being reduced, in its order."""
        optimizer = self.optimizer
        return [
            _Parameter(group, identity, optimizer.bit16_groups[group][index])
            for group, index, identity in optimizer.ipg_buckets[dtype].params
        ]

    def _separate_parameters(self, bucket: Sequence[Tensor], dtype: torch.dtype) -> list[_Parameter] | None:
        """Return the parameters that separate gradients belong to; None unless all are reduced here."""
        grads = self.optimizer.ipg_buckets[dtype].grads
        known = {g.data_ptr(): each for g, each in zip(grads, self._parameters(dtype), strict=True)}
        found = []
        for tensor in bucket:
            each = known.get(tensor.data_ptr())
            if each is None or each.parameter.numel() != tensor.numel() or is_expert(each.parameter):
                return None
            found.append(each)
        return found

    def _shards_of(self, each: _Parameter) -> list[Shard]:
        """Return the owners of a parameter's parts: a partition boundary may cut it, even several times."""
        key = each.group, each.identity
        if key not in self._shards:
            offsets = self.optimizer.grad_start_offset[each.group]
            starts = sorted(
                (int(offsets[partition][each.identity]), partition)
                for partition in self.optimizer.param_to_partition_ids[each.group][each.identity]
            )
            ends = [start for start, _ in starts[1:]] + [each.parameter.numel()]
            self._shards[key] = [
                Shard(partition, start, stop) for (start, partition), stop in zip(starts, ends, strict=True)
            ]
        return self._shards[key]
