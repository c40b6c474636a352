"""Copies of the gathered weights, one in each node, which FSDP's gathers read.

Position ``j`` of every node holds the shards of all ranks with position ``j``, in the type that FSDP gathers
(a *rail*). The first gather after the weights have changed brings the copies up to date: the weights whose
bits changed cross between nodes in one exchange for the whole model, or all weights do, where that is faster.
Every other gather, in forward and backward passes, stays inside the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.parameters import ParameterUpdates

from .parameter_groups import ShardedParameter


class NodeCopies:
    """The copies of this rank's rail.

    Args:
        reducer: Sums the gradients of the same ranks.
        updates: Exchanges weights over the rail.
        dtype: The type that FSDP gathers; groups of others are gathered by FSDP.

    Attributes:
        gathers: Gathers that read the copies so far.
    """

    def __init__(self, reducer: GradientReducer, updates: ParameterUpdates, dtype: torch.dtype) -> None:
        self._reducer, self._updates, self._dtype = reducer, updates, dtype
        self._layout = reducer.layout or [[rank] for rank in range(reducer.group_size)]
        self._position = 0 if reducer.node is None else reducer.node.position
        self._parameters: list[Any] = []
        self._numel, self.gathers = 0, 0
        self._copy: Tensor | None = None
        """The weights of the rail, [nodes, entries of a rank]; None before the first gather."""
        self._seen: list[tuple[int, ...]] = []
        """Memory and versions of each shard in the copies; empty after an optimizer's step, which need not
        change them.
        """

    def note_step(self, *_: Any) -> None:
        """Note that an optimizer has made a step; a hook of all optimizers."""
        self._seen = []

    def add(self, parameters: Sequence[ShardedParameter]) -> tuple[int, int]:
        """Keep copies of a parameter group; return the place of its entries, without the node."""
        start = self._numel
        self._parameters += [each.fsdp for each in parameters]
        self._numel += sum(each.padded_numel for each in parameters)
        return start, self._numel

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return the copies by name, the same on all ranks of the rail."""
        return [] if self._copy is None else [("copies of the weights in nodes", self._copy.view(-1))]

    def nbytes(self) -> int:
        """Return the memory that the copies take on this rank."""
        return len(self._layout) * self._numel * self._dtype.itemsize

    @torch.no_grad()
    def gather(self, name: str, place: tuple[int, int], output: Tensor) -> None:
        """Fill the output of a gather, 1-D, of the shards of all ranks; a collective of the node's ranks, and
        of all ranks if weights have changed since the last one.
        """
        self.gathers += 1
        # A backward pass gathers what its forward pass gathered.
        if self._copy is None or (torch._C._current_graph_task_id() < 0 and self._versions() != self._seen):
            self._refresh()
        assert self._copy is not None
        table, node = output.view(self._reducer.group_size, -1), self._reducer.node
        rows = [[table[rank] for rank in ranks] for ranks in zip(*self._layout, strict=True)]
        torch._foreach_copy_(rows[self._position], list(self._copy[:, slice(*place)].unbind()))
        if node is not None:
            node.gather_rows("copies", rows, [(name, output)])

    def _versions(self) -> list[tuple[int, ...]]:
        pairs = ((each.sharded_param, each.sharded_param._local_tensor) for each in self._parameters)
        return [(local.data_ptr(), local._version, sharded._version) for sharded, local in pairs]

    def _refresh(self) -> None:
        """Bring the copies to the weights of the shards; a collective of the rail."""
        updates, whole = self._updates, True
        if self._copy is not None:
            whole = updates.full(self._dtype)
        else:
            self._copy = torch.empty(len(self._layout), self._numel, dtype=self._dtype, device=updates.device)
            updates.choice.clear()
        own = self._copy[updates.rank]
        before = None if whole else own.clone()
        sizes = [each._sharded_param_data.numel() for each in self._parameters]
        torch._foreach_copy_(list(own.split(sizes)), [each._sharded_param_data for each in self._parameters])
        flat = self._copy.view(-1)
        if before is None:
            with updates.choice.timed(flat.numel(), whole=True):
                updates.gather_whole(flat)
        else:
            shards = [Shard(r, r * len(own), (r + 1) * len(own)) for r in range(updates.world_size)]
            updates.update([("copies", flat, shards)], lambda _: before)
        updates.end_step()
        self._seen = self._versions()
