"""Copies of the gathered weights, one in each node, which the gathers of FSDP2 and ZeRO-3 read.

The ranks at one position of all nodes are a *rail*. Each of them keeps the shards of the whole rail, in the
type that the framework gathers, or in int8. The first gather after the weights have changed brings the copies
up to date: what changed crosses between nodes in one exchange for the whole model, or all of it, where that
is faster. Every other gather, in forward and backward passes, stays inside the node. All ranks, owners too,
gather from the copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.parameters import ParameterUpdates

#: Entries of an int8 copy that share a scale, and its largest code.
BLOCK, _LARGEST = 128, 127
#: A scale is made for a maximum that is larger by this factor, and kept until the maximum is above its
#: largest code, or below this share of it.
_ROOM, _LEAST = 1.125, 1 / 2.6
#: Entries of a shard whose codes are exchanged at once: they take 2 bytes each meanwhile, of each rank.
_AT_ONCE = 1 << 22


class CopiedParameter(Protocol):
    """A parameter of which each rank has a shard."""

    @property
    def padded_numel(self) -> int:
        """Entries of a shard, the same on all ranks."""

    def shard(self) -> Tensor:
        """Return this rank's shard, 1-D; it may lack the padding at its end."""

    def version(self) -> tuple[int, ...]:
        """Return numbers that are others after the shard may have changed."""


class NodeCopies(ABC):
    """The copies of this rank's rail.

    Args:
        settings: The settings of the training.
        reducer: Sums the gradients of the same ranks.
        dtype: The type that the framework gathers.
        counts_steps: Whether each time that the copies are brought up to date counts as a step of
            ``updates``; False where the framework counts them.

    Attributes:
        updates: Exchanges weights over the rail.
        gathers: Gathers that read the copies so far.
    """

    bytes_per_weight: float
    alignment = 1
    """Shards of parameters begin at multiples of so many entries."""

    def __init__(
        self,
        settings: DataParallelConfig,
        reducer: GradientReducer,
        dtype: torch.dtype,
        *,
        counts_steps: bool = True,
    ) -> None:
        self._reducer, self.dtype, self._counts_steps = reducer, dtype, counts_steps
        group = reducer.group
        self.updates = ParameterUpdates.of_copies(settings, group)
        self._layout = group.layout or [[rank] for rank in range(group.group_size)]
        self._position = 0 if group.node is None else group.node.position
        self._parameters: list[CopiedParameter] = []
        self._bounds: list[tuple[int, int]] = []
        """The places of the parameters' shards in a rank's part of the copies."""
        self._numel, self.gathers, self._held = 0, 0, False
        self._seen: list[tuple[int, ...]] = []
        """Memory and versions of each shard in the copies; empty if they do not tell of a change."""

    def note_change(self) -> None:
        """Note that weights may have changed without a new version; on all ranks alike."""
        self._seen = []

    def add(self, parameters: Sequence[CopiedParameter]) -> slice:
        """Keep copies of a parameter group; return their places among all parameters."""
        first = len(self._parameters)
        for each in parameters:
            self._parameters.append(each)
            self._bounds.append((self._numel, self._numel + each.padded_numel))
            self._numel = -(-self._bounds[-1][1] // self.alignment) * self.alignment
        return slice(first, len(self._parameters))

    def nbytes(self) -> float:
        """Return the memory that the copies take on this rank."""
        return len(self._layout) * self._numel * self.bytes_per_weight

    @torch.no_grad()
    def gather(self, name: str, places: Sequence[slice], outputs: Sequence[Tensor]) -> None:
        """Fill outputs, 1-D, with the shards of all ranks of the parameters at each place; a collective of
        the node's ranks, and of all ranks if weights have changed since the last one.
        """
        self.gathers += 1
        # A backward pass gathers what its forward pass gathered.
        if not self._held or (torch._C._current_graph_task_id() < 0 and self._versions() != self._seen):
            with torch.inference_mode(False), torch.no_grad():  # training writes what is made here
                self._refresh()
                if self._counts_steps:
                    self.updates.end_step()
            self._held, self._seen = True, self._versions()
        node = self._reducer.group.node
        rows: list[list[Tensor]] = [[] for _ in self._layout[0]]
        for place, output in zip(places, outputs, strict=True):
            table = output.view(self._reducer.group.group_size, -1)
            for row, ranks in zip(rows, zip(*self._layout, strict=True), strict=True):
                row += [table[rank] for rank in ranks]
            self._read(rows[self._position][-len(self._layout) :], self._bounds[place])
        if node is not None:
            node.gather_rows("copies", rows, [(name, output) for output in outputs])

    def _versions(self) -> list[tuple[int, ...]]:
        return [each.version() for each in self._parameters]

    def _write_shard(self, out: Tensor) -> None:
        """Write this rank's shards into ``out`` [entries of a shard], in its type."""
        shards = [each.shard() for each in self._parameters]
        places = zip(self._bounds, shards, strict=True)
        torch._foreach_copy_([out[start : start + len(shard)] for (start, _), shard in places], shards)

    def _shards_of(self, numel: int) -> list[Shard]:
        ranks = range(self.updates.group.world_size)
        return [Shard(rank, rank * numel, (rank + 1) * numel) for rank in ranks]

    def state_dict(self) -> dict[str, Any]:
        """Return what copies of the same weights need to be the same again."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._seen = []

    @abstractmethod
    def weights(self) -> list[tuple[str, Tensor]]:
        """Return the copies by name, the same on all ranks of the rail."""

    @abstractmethod
    def _refresh(self) -> None:
        """Bring the copies to the weights of the shards; a collective of the rail."""

    @abstractmethod
    def _read(self, rows: Sequence[Tensor], bounds: Sequence[tuple[int, int]]) -> None:
        """Fill a row for each node with these adjoining shards of the rail."""


class ExactCopies(NodeCopies):
    """Copies in a 16-bit type, of which the bits that changed cross."""

    bytes_per_weight = 2.0
    _copy: Tensor
    """The weights of the rail, [nodes, entries of a shard]."""

    def weights(self) -> list[tuple[str, Tensor]]:
        return [("copies of the weights in nodes", self._copy.view(-1))] if self._held else []

    def _refresh(self) -> None:
        updates = self.updates
        if not self._held:
            updates.choice.clear()
            device = updates.group.device
            self._copy = torch.zeros(len(self._layout), self._numel, dtype=self.dtype, device=device)
        whole = updates.full(self.dtype)
        own, flat = self._copy[updates.group.rank], self._copy.view(-1)
        before = own.clone() if not whole else own
        self._write_shard(own)
        if whole:
            with updates.choice.timed(len(flat), whole=True):
                updates.gather_whole(flat)
        else:
            updates.update([("copies", flat, self._shards_of(len(own)))], lambda _: before)

    def _read(self, rows: Sequence[Tensor], bounds: Sequence[tuple[int, int]]) -> None:
        torch._foreach_copy_(list(rows), list(self._copy[:, bounds[0][0] : bounds[-1][1]].unbind()))


class Int8Copies(NodeCopies):
    """Copies in int8, a scale in bf16 for 128 entries, of which the codes and scales that changed cross.

    A code is the weight divided by the scale, rounded, and a scale is kept while the maximum of its block
    stays in its range. So nothing accumulates, and few codes change in a step.
    """

    bytes_per_weight = 1 + 2 / BLOCK
    alignment = BLOCK  # a bias may be far smaller than the weights beside it

    _codes: Tensor
    _scales: Tensor
    _loaded: Tensor | None = None
    """Scales of this rank's shards, of a checkpoint."""

    def weights(self) -> list[tuple[str, Tensor]]:
        named = [("codes of the weights", self._codes), ("scales of the weights", self._scales)]
        return [(name, each.view(-1)) for name, each in named] if self._held else []

    def state_dict(self) -> dict[str, Any]:
        return {"scales": self._scales[self.updates.group.rank].cpu()} if self._held else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded = state.get("scales")

    def _refresh(self) -> None:
        updates, device = self.updates, self.updates.group.device
        if not self._held:
            shape = len(self._layout), self._numel
            self._codes = torch.zeros(shape, dtype=torch.int8, device=device)
            self._scales = torch.zeros(shape[0], shape[1] // BLOCK, dtype=torch.bfloat16, device=device)
        own = self._scales[updates.group.rank]
        before = own.clone()
        if self._loaded is not None and self._loaded.shape == own.shape:
            own.copy_(self._loaded)
        self._loaded = None
        shard = torch.zeros(self._numel, device=device, dtype=torch.float32)
        self._write_shard(shard)
        blocks = shard.view(-1, BLOCK)
        largest, held = blocks.abs().amax(dim=1), own.float()
        # What is not finite makes a scale that is not, and with it the weights of the block.
        renewed = ~((largest <= (_LARGEST + 0.5) * held) & (largest >= _LEAST * _LARGEST * held))
        own.copy_(torch.where(renewed, largest * (_ROOM / _LARGEST), held))
        divisor = own.float().clamp_(min=1e-30)[:, None]
        codes = torch.div(blocks, divisor, out=blocks).round_().clamp_(-_LARGEST, _LARGEST).view(-1)
        scales = ("scales", self._scales.view(-1), self._shards_of(len(own)))
        for start in range(0, self._numel, _AT_ONCE):
            part = self._codes[:, start : start + _AT_ONCE]
            # int16, viewed as bf16: positive ones are in the order of their bits.
            numbers = part.to(torch.int16).add_(128)
            was = numbers[updates.group.rank].view(torch.bfloat16).clone()
            numbers[updates.group.rank] = (
                codes[start : start + _AT_ONCE].nan_to_num_(nan=0.0).to(torch.int16) + 128
            )
            named = ("codes", numbers.view(-1).view(torch.bfloat16), self._shards_of(numbers.shape[1]))
            old = {"codes": was, "scales": before}
            updates.update([named, scales] if start == 0 else [named], old.__getitem__)
            part.copy_(numbers.sub_(128))

    def _read(self, rows: Sequence[Tensor], bounds: Sequence[tuple[int, int]]) -> None:
        start, stop = bounds[0][0], -(-bounds[-1][1] // BLOCK) * BLOCK
        sizes = [each for first, last in bounds for each in (last - first, -(last - first) % BLOCK)]
        for row, codes, scales in zip(rows, self._codes, self._scales, strict=True):
            blocks = codes[start:stop].view(-1, BLOCK) * scales[start // BLOCK : stop // BLOCK, None].float()
            row.copy_(torch.cat(blocks.view(-1).split(sizes)[::2]))


#: The copies that the option ``parameters`` asks for.
COPIES: dict[object, type[NodeCopies]] = {"exact": ExactCopies, "int8": Int8Copies}
