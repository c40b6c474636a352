"""ZeRO-1 and ZeRO-2: gradients go to the ranks that own the optimizer's partitions.

DeepSpeed reduces a bucket of gradients in ``average_tensor`` (contiguous gradients) or ``allreduce_bucket``
(not contiguous) and afterwards files the result into partitions. Streams, events, double buffers, filing and
accumulation stay DeepSpeed's; only the collectives inside are replaced:

=====================  ==================  ==================================  ==========================
contiguous_gradients   reduce_scatter      DeepSpeed's collective              here
=====================  ==================  ==================================  ==========================
true                   true                ``allreduce_and_scatter``           ``reduce_scatter`` to owners
true                   false               ``gradient_reduction_w_predivide``  ``all_reduce``
false                  true                ``allreduce_bucket``                ``reduce_scatter`` to owners
false                  false               ``allreduce_bucket``                ``all_reduce``
=====================  ==================  ==================================  ==========================

The all-gather of updated parameters after the step stays dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer, Shard

from ..host.patches import Patches
from ..host.steps import StepHooks
from .buckets import Averaging, CommBuffer, Piece, pieces
from .filing import Filing
from .overlap import Overlap
from .stage0 import is_expert


class PartitionHooks:
    """Replaces the gradient collectives of a ``DeepSpeedZeroOptimizer`` (stage 1 or 2).

    Args:
        optimizer: DeepSpeed's optimizer.
        reducer: Over the optimizer's data-parallel group.
        steps: Of the optimizer.
        whole: Weights of which other ranks, with partitions of their own, have a copy that must stay bitwise
            the same: they are reduced as if nobody owned a part of them.
        experts: As for :class:`.stage0.BoundaryHooks`; used where DeepSpeed reduces contiguous buckets to
            their owners.
    """

    def __init__(
        self,
        optimizer: Any,
        reducer: GradientReducer,
        steps: StepHooks,
        *,
        whole: Sequence[Tensor] = (),
        experts: Mapping[str, GradientReducer],
    ) -> None:
        self.optimizer = optimizer
        self._experts = {optimizer.expert_dp_process_group[name]: each for name, each in experts.items()}
        self._whole = {id(weight) for weight in whole}
        self.reducer = reducer
        self.steps = steps
        self.to_owners = bool(optimizer.reduce_scatter)
        # Before 0.19.5, ZeRO knew no gradient_allreduce_op and always averaged.
        self.average = bool(getattr(optimizer, "gradient_average", True))
        self._bucket: Tensor | None = None
        self._overlap: Overlap | None = None
        self._filing: Filing | None = None
        self._shards: dict[tuple[int, int], list[Shard]] = {}

    @property
    def prescaled(self) -> bool:
        """Whether ``average_tensor`` divides gradients by the number of ranks before they come here."""
        return self.to_owners and self.average and bool(self.optimizer.contiguous_gradients)

    @property
    def scale(self) -> float:
        """Factor that makes the gradient of the sum over the ranks."""
        if not self.optimizer.contiguous_gradients:
            return 1.0 / self.reducer.world_size if self.average else 1.0
        return 1.0 if self.to_owners else self._averaging().after

    def _averaging(self) -> Averaging:
        return Averaging.of(
            self.reducer.world_size,
            average=self.average,
            postscale=self.optimizer.postscale_gradients,
            predivide=self.optimizer.gradient_predivide_factor,
        )

    def install(self, patches: Patches) -> None:
        """Patch the optimizer instance."""
        optimizer = self.optimizer
        self._filing = Filing.of(optimizer, self.reducer)
        self._overlap = Overlap.of(optimizer, self.reducer) if self._filing is None else None
        for part in (self._filing, self._overlap):
            if part is not None:
                part.install(patches)
        average, scatter = optimizer.average_tensor, optimizer.allreduce_and_scatter
        predivide, reduce = optimizer.gradient_reduction_w_predivide, optimizer.allreduce_bucket
        # One bucket for all owners instead of one per owner: then everything comes through
        # allreduce_and_scatter.
        patches.replace(optimizer, "use_multi_rank_bucket_allreduce", True)

        def average_tensor(tensor: Tensor, communication_data_type: torch.dtype) -> None:
            self.steps.begin()
            self._bucket = tensor
            try:
                average(tensor, communication_data_type)
            finally:
                self._bucket = None

        def allreduce_and_scatter(
            bucket: list[Any],
            communication_data_type: torch.dtype,
            *args: Any,
            process_group: Any = None,
            **keywords: Any,
        ) -> None:
            ours = process_group is optimizer.dp_process_group
            reducer = self.reducer if ours else self._experts.get(process_group)
            if self._bucket is None or reducer is None:
                scatter(bucket, communication_data_type, *args, process_group=process_group, **keywords)
            else:
                self._scatter(bucket, communication_data_type, reducer)

        def gradient_reduction_w_predivide(tensor: Tensor, communication_data_type: torch.dtype) -> Tensor:
            found = self._parameters(communication_data_type)
            if tensor.numel() == 0 or any(is_expert(parameter) for _, _, parameter in found):
                return predivide(tensor, communication_data_type)
            return self._all_reduce(tensor, communication_data_type)

        def allreduce_bucket(
            bucket: list[Tensor],
            communication_data_type: torch.dtype,
            rank: int | None = None,
            log: Any = None,
            divide: bool = True,
            process_group: Any = None,
        ) -> Tensor:
            layout = self._layout_of(bucket, communication_data_type) if rank is None and divide else None
            if layout is None:
                return reduce(
                    bucket,
                    communication_data_type,
                    rank=rank,
                    log=log,
                    divide=divide,
                    process_group=process_group,
                )
            self.steps.begin()
            return self._reduce_loose(bucket, layout, communication_data_type)

        for method in average_tensor, allreduce_and_scatter, gradient_reduction_w_predivide, allreduce_bucket:
            patches.replace(optimizer, method.__name__, method)

    def close(self) -> None:
        """The engine is gone."""
        if self._overlap is not None:
            self._overlap.close()

    # -- the three collectives -------------------------------------------------------------------------------

    def _scatter(self, bucket: Sequence[Any], dtype: torch.dtype, reducer: GradientReducer) -> None:
        """Contiguous bucket, of it what ``reducer`` reduces, to its owners.

        Args:
            bucket: ``(owners, slice of the bucket[, fp32 accumulator of the slice if it is owned here])``;
                gradients are divided by the number of ranks already.
            dtype: Communication type.
        """
        tensor = self._bucket
        assert tensor is not None
        found = self._parameters(dtype)
        layout, first = self._pieces_of(found), tensor.storage_offset()
        buffer = CommBuffer(tensor, dtype)

        def work() -> None:
            self._to_owners(buffer.flat, layout, found, reducer)

        def after() -> None:
            for owners, part, *accumulators in bucket:
                if reducer.rank in (owners if isinstance(owners, frozenset) else (owners,)):
                    result = buffer.flat.narrow(0, part.storage_offset() - first, part.numel())
                    if accumulators and accumulators[0] is not None:
                        accumulators[0].add_(result.to(accumulators[0].dtype))
                    if result.data_ptr() != part.data_ptr():
                        part.copy_(result)

        if self._overlap is not None and reducer is self.reducer:
            self._overlap.submit(work, after)
        else:
            work()
            if self._filing is not None and reducer is self.reducer:
                named = ((self.name_of(group, parameter), parameter) for group, _, parameter in found)
                self._filing.begin(tensor, dtype, named)
            after()

    def _all_reduce(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Contiguous bucket, the whole result to every rank; returns it in the communication type."""
        averaging = self._averaging()
        buffer = CommBuffer(tensor, dtype, averaging.before)
        found = self._parameters(dtype)
        layout = self._pieces_of(found)
        self.reducer.all_reduce(
            [(piece.name, piece.of(buffer.flat)) for piece in layout], scale=averaging.after
        )
        buffer.write_back()
        return buffer.flat

    def _reduce_loose(
        self, bucket: Sequence[Tensor], layout: Sequence[tuple[int, int, Any]], dtype: torch.dtype
    ) -> Tensor:
        """Gradients that lie apart; returns them packed, reduced, in the communication type."""
        flat = self.optimizer.flatten(bucket)
        buffer = CommBuffer(flat, dtype)
        parts = self._pieces_of(layout)
        if self.to_owners:
            self._to_owners(buffer.flat, parts, layout, self.reducer, scale=self.scale)
        else:
            self.reducer.all_reduce(
                [(piece.name, piece.of(buffer.flat)) for piece in parts], scale=self.scale
            )
        return buffer.flat

    def _to_owners(
        self,
        flat: Tensor,
        layout: Sequence[Piece],
        found: Sequence[tuple[int, int, Any]],
        reducer: GradientReducer,
        *,
        scale: float = 1.0,
    ) -> None:
        """Reduce the gradients in ``flat`` that ``reducer`` reduces, each part at its owner."""
        ours = [
            (piece, part)
            for piece, part in zip(layout, found, strict=True)
            if self._reducer_of(part[2]) is reducer
        ]
        cut = [(piece, part) for piece, part in ours if id(part[2]) not in self._whole]
        if whole := [(piece.name, piece.of(flat)) for piece, part in ours if id(part[2]) in self._whole]:
            reducer.all_reduce(whole, scale=scale)
            reducer.finish()  # nobody owns these: the bucket alone holds the sums
        if cut:
            entries = [(piece.name, piece.of(flat), self._shards_of(*part)) for piece, part in cut]
            reducer.reduce_scatter(entries, scale=scale)

    def _reducer_of(self, parameter: Any) -> GradientReducer | None:
        if not is_expert(parameter):
            return self.reducer
        return self._experts.get(self.optimizer.expert_dp_process_group[parameter.group_name])

    # -- where things are ------------------------------------------------------------------------------------

    def _parameters(self, dtype: torch.dtype) -> list[tuple[int, int, Any]]:
        """``(group index, parameter id, parameter)`` of the bucket being reduced, in its order."""
        optimizer = self.optimizer
        return [
            (group, identity, optimizer.bit16_groups[group][index])
            for group, index, identity in optimizer.ipg_buckets[dtype].params
        ]

    def _layout_of(self, bucket: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[int, int, Any]] | None:
        """The parameters that loose gradients belong to; None unless all are ours."""
        known = {
            grad.data_ptr(): found
            for grad, found in zip(
                self.optimizer.ipg_buckets[dtype].grads, self._parameters(dtype), strict=True
            )
        }
        layout = []
        for tensor in bucket:
            found = known.get(tensor.data_ptr())
            if found is None or found[2].numel() != tensor.numel() or is_expert(found[2]):
                return None
            layout.append(found)
        return layout

    def _pieces_of(self, parameters: Sequence[tuple[int, int, Any]]) -> list[Piece]:
        """Layout of a buffer that holds their gradients one after the other."""
        return pieces([(self.name_of(group, p), p.numel()) for group, _, p in parameters])

    def _shards_of(self, group: int, identity: int, parameter: Any) -> list[Shard]:
        """Owners of a parameter's parts: a partition boundary may cut it, even several times."""
        shards = self._shards.get((group, identity))
        if shards is None:
            optimizer = self.optimizer
            starts = sorted(
                (int(optimizer.grad_start_offset[group][partition][identity]), partition)
                for partition in optimizer.param_to_partition_ids[group][identity]
            )
            ends = [start for start, _ in starts[1:]] + [parameter.numel()]
            shards = [
                Shard(partition, start, stop) for (start, partition), stop in zip(starts, ends, strict=True)
            ]
            self._shards[group, identity] = shards
        return shards

    def name_of(self, group: int, parameter: Any) -> str:
        name = self.optimizer.param_names.get(parameter)
        return str(name) if name is not None else f"group{group}.{parameter.param_idx_in_group}"
