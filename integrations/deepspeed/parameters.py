"""ZeRO-1 and 2, and bf16 with fp32 accumulation: updated weights, from the owners of their masters to all.

DeepSpeed copies a rank's masters into its part of the flat weights, and gathers all parts
(``all_gather_dp_groups``). Here the copy is made to go nowhere: for the time of the optimizer's step the
rank's part in DeepSpeed's list of partitions is the master itself, so that the flat weights keep what all
ranks know, without a buffer for it. Then the gather is replaced, or, for the steps in which everything is
sent, the copy is made and DeepSpeed gathers. Groups of expert parameters are left to DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from dct_plugin.data_parallel import Shard
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.plan import shards_in

from ..host.patches import Patches
from .stage0 import is_expert

_GATHER = "all_gather_dp_groups"


class _Names(NamedTuple):
    """Where a wrapper keeps its groups: flat weights, their partitions, own masters, parameters in order."""

    flat: str
    partitions: str
    masters: str
    parameters: str


_KINDS = {
    "zero": (
        stage_1_and_2,
        _Names(
            "bit16_groups_flat",
            "parallel_partitioned_bit16_groups",
            "single_partition_of_fp32_groups",
            "bit16_groups",
        ),
    ),
    "bf16": (
        bf16_optimizer,
        _Names("bf16_groups_flat", "bf16_partitioned_groups", "fp32_groups_flat_partition", "bf16_groups"),
    ),
}


class _Piece(NamedTuple):
    """A parameter in its group's flat weights."""

    name: str
    start: int
    numel: int
    shards: list[Shard]


class GatherHooks:
    """Replaces the gather of updated weights of a DeepSpeed optimizer.

    Args:
        kind: ``"zero"`` or ``"bf16"``, see :func:`.support.check_engine`.
        optimizer: DeepSpeed's optimizer.
        updates: Over the optimizer's data-parallel group.
        name_of: Name of a parameter's stream, from the index of its group and the parameter.
    """

    def __init__(
        self, kind: str, optimizer: Any, updates: ParameterUpdates, name_of: Callable[[int, Any], str]
    ) -> None:
        self.optimizer, self.updates = optimizer, updates
        self._module, self._names = _KINDS[kind]
        self._groups: dict[int, list[_Piece]] = {}
        """By index, the groups whose updates are thresholded."""
        for index, (parameters, flat) in enumerate(
            zip(self._list("parameters"), self._list("flat"), strict=True)
        ):
            if not any(is_expert(parameter) for parameter in parameters):
                self._groups[index] = [
                    self._piece(name_of(index, parameter), parameter, flat)
                    for parameter in parameters
                    if parameter.numel()
                ]
        self._parts: dict[int, Tensor] = {}
        """While the optimizer steps: this rank's parts of the flat weights."""

    def install(self, patches: Patches) -> None:
        """Patch the optimizer instance."""
        patches.wrap(self.optimizer, "step", self._make_step)

    def gather(self) -> None:
        """Bring all working weights to the masters, in full; a collective."""
        self.optimizer.update_lp_params()
        for index in self._groups:
            self._record_full(self._list("flat")[index])

    def _make_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **keywords: Any) -> Any:
            partitions, rank = self._list("partitions"), self.updates.rank
            self._parts = {index: partitions[index][rank] for index in self._groups}
            for index in self._parts:
                partitions[index][rank] = self._list("masters")[index].data
            # For this step alone: the function is that of all engines.
            patches = Patches()
            patches.wrap(self._module, _GATHER, self._make_gather)
            try:
                return original(*args, **keywords)
            finally:
                patches.undo()
                for index, part in self._parts.items():
                    partitions[index][rank] = part

        return step

    def _make_gather(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def all_gather_dp_groups(
            groups_flat: Sequence[Tensor],
            partitioned_param_groups: Sequence[list[Tensor]],
            dp_process_group: Sequence[Any],
            **keywords: Any,
        ) -> None:
            dense = self._gather(groups_flat, partitioned_param_groups)
            original(
                groups_flat=[groups_flat[i] for i in dense],
                partitioned_param_groups=[partitioned_param_groups[i] for i in dense],
                dp_process_group=[dp_process_group[i] for i in dense],
                **keywords,
            )

        return all_gather_dp_groups

    @torch.no_grad()
    def _gather(self, flats: Sequence[Tensor], partitions: Sequence[list[Tensor]]) -> list[int]:
        """What is to be thresholded; the groups that are left for DeepSpeed."""
        dense, entries = [], []
        masters: dict[str, Tensor] = {}
        for index, flat in enumerate(flats):
            if index not in self._groups:
                dense.append(index)
                continue
            part, master = self._parts[index], self._list("masters")[index].data
            if self.updates.full(flat.dtype):
                partitions[index][self.updates.rank] = part
                part.copy_(master)
                self._record_full(flat)
                dense.append(index)
                continue
            begin = self.updates.rank * part.numel()
            for piece in self._groups[index]:
                entries.append((piece.name, flat[piece.start : piece.start + piece.numel], piece.shards))
                for shard in piece.shards:
                    if shard.owner == self.updates.rank:
                        offset = piece.start - begin
                        masters[piece.name] = master[offset + shard.start : offset + shard.stop]
        if entries:
            self.updates.update(entries, masters.__getitem__)
        return dense

    # -- where things are ---

    def _list(self, what: str) -> Any:
        return getattr(self.optimizer, getattr(self._names, what))

    def _piece(self, name: str, parameter: Any, flat: Tensor) -> _Piece:
        start = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
        each = flat.numel() // self.updates.world_size
        return _Piece(name, start, parameter.numel(), shards_in(start, parameter.numel(), each))

    def _record_full(self, flat: Tensor) -> None:
        self.updates.record_full(flat.numel(), flat.element_size())
