"""What one reduction moves where: tensors, the owners of their parts, and a fingerprint of it all."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..transport.exchange import most_bytes

#: A tensor is split over owners only into shards of at least this many entries: below, headers outweigh
#: the balance.
MIN_SHARD = 16_384
#: Entries sent that are worth a message of their own, some 100 kB; and what is not, at the end.
PIECE, SCRAP = 50_000, 12_500


class Shard(NamedTuple):
    """Entries ``[start, stop)`` of a tensor, summed up at rank ``owner`` of the group."""

    owner: int
    start: int
    stop: int


def shards_of(name: str, numel: int, count: int, *, whole: bool = False) -> list[Shard]:
    """The parts of a tensor and their owners among ``count`` ranks; ``whole`` tensors have one.

    By name and size only, so that residuals do not depend on the host's bucket layout.
    """
    parts = 1 if whole else max(1, min(count, numel // MIN_SHARD))
    first = zlib.crc32(name.encode())
    bounds = [numel * i // parts for i in range(parts + 1)]
    return [Shard((first + i) % count, bounds[i], bounds[i + 1]) for i in range(parts)]


def shards_in(start: int, numel: int, each: int) -> list[Shard]:
    """The parts of a tensor that lies at ``start`` of a buffer whose rank ``r`` owns entries
    ``[r * each, (r + 1) * each)``.
    """
    return [
        Shard(owner, max(start, owner * each) - start, min(start + numel, (owner + 1) * each) - start)
        for owner in range(start // each, (start + numel - 1) // each + 1)
    ]


@functools.lru_cache(maxsize=1024)
def _fingerprint(
    kind: str, items: tuple[tuple[str, int, tuple[Shard, ...]], ...], sampled: tuple[str, ...], framed: bool
) -> int:
    text = [kind, *(f"{name}:{numel}:{list(shards)}" for name, numel, shards in items)]
    text += [*sampled, *(["in frames"] if framed else [])]
    low = zlib.crc32("\n".join(text).encode())
    high = zlib.adler32("\n".join(text).encode())
    return (high << 31 ^ low) & (2**63 - 1)


class Change(NamedTuple):
    """What a rank owes of one tensor, for :meth:`~.reducer.GradientReducer.exchange_changes`."""

    name: str
    tensor: Tensor
    """fp32 [numel]; becomes the mean of what the ranks sent."""
    left: Tensor
    """fp32 [numel], apart from ``tensor``; becomes what this rank did not send."""
    entry_bytes: float
    """What the host would have sent of an entry since the last exchange."""


@dataclass
class Item:
    """One tensor of a reduction and where its parts go."""

    name: str
    tensor: Tensor
    shards: list[Shard]
    small: bool
    left: Tensor | None = None
    """Becomes what is not sent (fp32 [numel]); None: the stream keeps it."""
    entry_bytes: float = 0.0
    """Of an entry, had the host exchanged it; 0 takes the tensor's."""

    def __post_init__(self) -> None:
        self.entry_bytes = self.entry_bytes or self.tensor.element_size()
        if len(self.shards) == 1 and self.shards[0][1:] == (0, self.tensor.numel()):
            return
        covered = 0
        for shard in sorted(self.shards, key=lambda s: s.start):
            if shard.start != covered or shard.stop < shard.start:
                break
            covered = shard.stop
        if covered != self.tensor.numel():
            raise ValueError(
                f"{self.name}: shards {self.shards} do not cover its {self.tensor.numel()} entries once"
            )

    def view(self, shard: Shard) -> Tensor:
        return self.tensor[shard.start : shard.stop]


@dataclass
class Plan:
    """What one reduction moves where; the same on every rank."""

    kind: str
    items: list[Item]
    sampled: list[str] = field(default_factory=list)
    """Streams whose residuals are compared afterwards, see :class:`.step_ahead.StepAhead`."""
    framed: bool = False
    """Whether messages travel in frames."""
    fingerprint: int = field(init=False)

    def __post_init__(self) -> None:
        items = tuple([(item.name, item.tensor.numel(), tuple(item.shards)) for item in self.items])
        self.fingerprint = _fingerprint(self.kind, items, tuple(self.sampled), self.framed)

    def pieces(self, density: Callable[[Item], float]) -> list[Plan]:
        """The plan in order, in pieces of whole tensors: while the message of one is on its way, the next is
        made.

        Args:
            density: Share of a tensor's entries that is sent; the same on every rank.
        """
        groups: list[list[Item]] = []
        kept = float(PIECE)
        for item in self.items:
            if kept >= PIECE:
                groups.append([])
                kept = 0.0
            groups[-1].append(item)
            kept += item.tensor.numel() * (1.0 if item.small else density(item))
        if kept < SCRAP and len(groups) > 1:
            scrap = groups.pop()
            groups[-1] += scrap
        if self.framed or len(groups) <= 1:
            return [self]
        # What the whole says besides is compared with the first.
        sampled = [self.sampled] + [[]] * (len(groups) - 1)
        return [Plan(self.kind, group, names) for group, names in zip(groups, sampled, strict=True)]

    def bound(self, rank: int) -> int:
        """Bytes that a message with the shards of ``rank`` cannot reach, however its payloads are coded."""
        return sum(most_bytes(shard.stop - shard.start) for _, shard in self.owned_by(rank))

    def owned_by(self, rank: int) -> list[tuple[Item, Shard]]:
        """Shards of ``rank`` in the order in which their payloads stand in a message."""
        return [(item, shard) for item in self.items for shard in item.shards if shard.owner == rank]
