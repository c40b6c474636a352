"""The plan of a reduction: its tensors, the owners of their parts, and a fingerprint of both.

Ranks remember plans in a :class:`BoundedTable`, from which all of them drop the same ones.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from ..codecs.message import Key
from ..kernels.job import Spans
from ..transport.exchange import most_bytes

#: Fewest entries of a shard when a tensor is split over owners: below, headers outweigh the balance.
MIN_SHARD = 16_384
#: Parts begin at multiples of so many entries: 16 bytes are read at once, and a packed residual's exponents
#: are not shared beyond a part.
ALIGNED = 64
#: A last chunk with a smaller share of the entries that a chunk is to send joins the one before.
SMALLEST_CHUNK = 0.25
#: Parts of a tensor that leave chunks as large as they are.
MESSAGES_OF_CHUNK = 8

Entries = Sequence[tuple[str, Tensor]]
#: Bounds of a part of a tensor.
Part = tuple[int, int]


class Sparsity(NamedTuple):
    """The sparsity of one tensor in one step."""

    density: float
    """Share of the entries that is sent."""
    label: str = ""
    """The metrics record the tensor as this part of its class, too."""


_ALL = Sparsity(1.0)


class Shard(NamedTuple):
    """Entries ``[start, stop)`` of a tensor, which rank ``owner`` of the group sums up."""

    owner: int
    start: int
    stop: int


class Shards(Key):
    """The parts of a tensor, as :class:`Shard`."""

    @functools.cached_property
    def bounds(self) -> Key:
        """First entry of each part, and the one behind it."""
        return Key([shard[1:] for shard in self])

    @functools.cached_property
    def owners(self) -> Key:
        """The owner of each part."""
        return Key([shard.owner for shard in self])


@functools.lru_cache(maxsize=4096)
def shards_of(name: str, numel: int, count: int, *, undivided: bool = False) -> Shards:
    """Return the parts of a tensor and their owners among ``count`` ranks; one part of all if ``undivided``.

    They depend on name and size only, so residuals do not depend on the host's bucket layout.
    """
    parts = 1 if undivided else max(1, min(count, numel // MIN_SHARD))
    first = zlib.crc32(name.encode())
    return Shards([Shard((first + i) % count, *bounds) for i, bounds in enumerate(divided(numel, parts))])


def common(one: Part, other: Part) -> Part:
    """Return what two parts have in common; the second bound is never below the first."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def divided(numel: int, parts: int) -> list[Part]:
    """Return the bounds of so many parts of a tensor, of nearly one size."""
    bounds = [numel * i // parts // ALIGNED * ALIGNED for i in range(parts)]
    return list(itertools.pairwise([*bounds, numel]))


@functools.lru_cache(maxsize=4096)
def shards_in(start: int, numel: int, each: int) -> Shards:
    """Return the parts of a tensor that lies at ``start`` of a buffer.

    Rank ``r`` owns the entries ``[r * each, (r + 1) * each)`` of the buffer.
    """
    owners = range(start // each, (start + numel - 1) // each + 1)
    ends = [(max(start, r * each) - start, min(start + numel, (r + 1) * each) - start) for r in owners]
    return Shards([Shard(r, *bounds) for r, bounds in zip(owners, ends, strict=True)])


_Tensors: TypeAlias = tuple[tuple[str, int, Shards], ...] | Key
"""Name, entries and shards of each tensor."""


@functools.lru_cache(maxsize=1024)
def fingerprint_of(operation: str, tensors: _Tensors, compared: tuple[str, ...] = ()) -> int:
    """Return a 62-bit description of an operation on tensors."""
    text = [operation, *(f"{name}:{numel}:{list(shards)}" for name, numel, shards in tensors), *compared]
    low = zlib.crc32("\n".join(text).encode())
    high = zlib.adler32("\n".join(text).encode())
    return (high << 31 ^ low) & ((1 << 62) - 1)


class Owners:
    """The owners of the parts of tensors, the same in every step.

    Raises:
        ValueError: The shards of a tensor do not cover it once.
    """

    def __init__(self, tensors: _Tensors) -> None:
        self._owned: dict[int, list[tuple[int, Shard]]] = {}
        for which, (name, numel, shards) in enumerate(tensors):
            covered = 0
            for _, start, stop in sorted(shards, key=lambda shard: shard.start):
                covered = stop if start == covered and stop >= start else -1
            if covered != numel:
                raise ValueError(f"{name}: shards {list(shards)} do not cover its {numel} entries once")
            for shard in shards:
                self._owned.setdefault(shard.owner, []).append((which, shard))

    def of(self, rank: int) -> list[tuple[int, Shard]]:
        """Return the shards of ``rank``, and the numbers of their tensors, in the order of the payloads in a
        message.
        """
        return self._owned.get(rank, [])

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (bounded: owners that are not asked for go)
    def largest_messages(self, ranks: range) -> list[int]:
        """Return bytes that messages with the shards of these ranks cannot reach, however they are coded."""
        return [sum(most_bytes(shard.stop - shard.start) for _, shard in self.of(rank)) for rank in ranks]

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def spans(self, ranks: range) -> Spans:
        """Return the shards of these ranks as :meth:`.kernels.Backend.prepare_sum` takes them."""
        return Spans([[(which, *shard[1:]) for which, shard in self.of(rank)] for rank in ranks])


@functools.lru_cache(maxsize=1024)
def _known(operation: str, tensors: _Tensors, compared: tuple[str, ...]) -> tuple[int, Owners]:
    """Return the fingerprint and the owners of a plan."""
    return fingerprint_of(operation, tensors, compared), Owners(tensors)


class PlannedTensor:
    """One tensor of a reduction, and where its parts go.

    Attributes:
        name, tensor, numel: The tensor.
        parts: Its shards, with what is derived from them.
        small: True if the tensor is sent dense.
        sparsity: Its sparsity in this step.
    """

    __slots__ = ("name", "numel", "parts", "small", "sparsity", "tensor")

    def __init__(
        self, name: str, tensor: Tensor, shards: Sequence[Shard], small: bool, sparsity: Sparsity = _ALL
    ) -> None:
        self.name, self.tensor, self.small, self.sparsity = name, tensor, small, sparsity
        self.numel = tensor.numel()
        self.parts = shards if isinstance(shards, Shards) else Shards(shards)

    @property
    def kept(self) -> float:
        """Number of entries that are sent."""
        return self.numel * self.sparsity.density

    def view(self, shard: Shard) -> Tensor:
        return self.tensor[shard.start : shard.stop]


@dataclass
class ReductionPlan:
    """Tensors that are exchanged together, and where their parts go; the same on every rank."""

    operation: str
    """Name of the topology or of what else is exchanged."""
    tensors: list[PlannedTensor]
    scale: float = 1.0
    """Factor of the sums."""
    compared: list[str] = field(default_factory=list)
    """Names of tensors that add-ons compare between ranks after the reduction."""
    sums_everywhere: bool = True
    """True if every rank gets the whole sums; otherwise each owner gets its part."""
    key: Key | None = None
    """Name, entries and parts of each tensor, where they are known."""
    sums: list[Tensor] | None = None
    """Memory for the sums of the shards of this rank, if it sends them on."""
    fingerprint: int = field(init=False)
    owners: Owners = field(init=False)

    def __post_init__(self) -> None:
        if self.key is None:
            self.key = Key([(each.name, each.numel, each.parts) for each in self.tensors])
        self.fingerprint, self.owners = _known(self.operation, self.key, tuple(self.compared))

    def chunks(self, entries: float) -> list[ReductionPlan]:
        """Cut the plan, in order, between tensors: while the message of a chunk travels, the next is made.

        Args:
            entries: Entries sent that are worth a message of their own; more in tensors of many parts, since
                each part has a message.
        """
        kept = 0.0
        for tensor in self.tensors:
            kept += tensor.numel * tensor.sparsity.density
        if kept < entries:
            return [self]
        parts = max((len(tensor.parts) for tensor in self.tensors), default=1)
        entries *= max(1.0, parts / MESSAGES_OF_CHUNK)
        groups: list[list[PlannedTensor]] = []
        kept = entries
        for tensor in self.tensors:
            if kept >= entries:
                groups.append([])
                kept = 0.0
            groups[-1].append(tensor)
            kept += tensor.kept
        if kept < SMALLEST_CHUNK * entries and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        if len(groups) <= 1:
            return [self]
        # The first chunk carries the names that are compared.
        compared = [self.compared] + [[]] * (len(groups) - 1)
        return [
            ReductionPlan(self.operation, group, self.scale, names, self.sums_everywhere)
            for group, names in zip(groups, compared, strict=True)
        ]

    def owned_by(self, rank: int) -> list[tuple[PlannedTensor, Shard]]:
        """Return the shards of ``rank``, in the order in which their payloads stand in a message."""
        return [(self.tensors[which], shard) for which, shard in self.owners.of(rank)]

    def parts_held(self, tensor: PlannedTensor, rank: int) -> list[Part]:
        """Return the bounds of the parts of a tensor whose sum ``rank`` gets."""
        return [(s.start, s.stop) for s in tensor.parts if self.sums_everywhere or s.owner == rank]

    def views_of(self, rank: int) -> list[Tensor]:
        """Return the parts of the tensors that ``rank`` owns."""
        return [each.view(shard) for each, shard in self.owned_by(rank)]


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

#: Sets of tensors that are remembered. A model has as many as it has buckets.
CAPACITY = 1024


class BoundedTable(OrderedDict[_Key, _Value]):
    """A table of the last :data:`CAPACITY` keys that were asked for or entered: fingerprints, most often.

    Ranks that ask and enter in the same order, as they do in collectives, hold the same entries.
    """

    def has(self, key: _Key) -> bool:
        """Return whether there is an entry, which then is the last one to be dropped."""
        found = key in self
        if found:
            self.move_to_end(key)
        return found

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > CAPACITY:
            self.popitem(last=False)
