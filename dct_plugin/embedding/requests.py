"""Requests for rows: which rows of a rank's tables the samples of another rank need.

With de-duplication a request names each distinct row of a table once, in ascending order, which is also the
order in which the rows come back: forward and backward messages need no index. Pooled (multi-hot) vectors are
taken apart into their rows when that is less and nothing lossy applies; otherwise each distinct bag crosses
once.

Requests are written on the host, but for ids that are one row per sample and on the tables' device
(:mod:`.device_requests`): there distinct rows are found, in any case.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..config import EmbeddingChannelConfig
from ..errors import PayloadError
from ..kernels import Backend
from ..kernels.embedding_format import EmbeddingKernels, OutOfRange
from .distinct import DistinctRows
from .request_message import Answer, Bags, Wanted, answer_to, read_request, write_request

__all__ = ["Request", "Requests"]

_NO_IDS = torch.empty(0, dtype=torch.int64)
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Request(NamedTuple):
    """What a rank wants from every owner, and how its samples are put together from the answers.

    Attributes:
        samples: Of this rank.
        messages: Per owner, uint8 on the host; nothing for this rank itself.
        own: What this rank wants of itself.
        rows: Per owner: rows of each segment of its answer.
        positions: Row of the answers for every sample and table, int64 [samples, tables]; or, where rows are
            pooled here, a list of int64 [samples], None for the tables that are.
        pooled: Per table that is pooled here: rows of the answers, and how many for each sample.
        distinct_ms, encode_ms: What finding the distinct rows, and writing the messages, has taken.
    """

    samples: int
    messages: list[Tensor]
    own: Answer
    rows: list[list[int]]
    positions: Tensor | list[Tensor | None]
    pooled: dict[int, tuple[Tensor, Tensor]]
    distinct_ms: float
    encode_ms: float


class _Assembly(NamedTuple):
    """See the attributes of :class:`Request`."""

    samples: int
    positions: Tensor | list[Tensor | None]
    pooled: dict[int, tuple[Tensor, Tensor]]


class _Bag(NamedTuple):
    """:class:`Bags` of one table, int64; ``one_hot``: every sample has one row."""

    ids: Tensor
    lengths: Tensor
    one_hot: bool


class Requests:
    """Writes and reads the requests of one set of sharded tables.

    Args:
        cardinalities: Rows of each table.
        placement: Tables of each rank.
        rank: This one.
        config: ``dct.embedding``.
        name: Name in errors.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        placement: Sequence[Sequence[int]],
        *,
        rank: int,
        config: EmbeddingChannelConfig,
        name: str,
    ) -> None:
        self.cardinalities = cardinalities
        self.placement = placement
        self.rank = rank
        self.name = name
        self._deduplicates = config.enabled and config.deduplicate
        # A bound on rows is none on their sum, and a threshold is meant for what the model sees.
        self._keeps_bags = config.sparsity > 0 or config.error_bound is not None
        # Rows of every rank are numbered through its tables.
        self.first_rows = [
            list(itertools.accumulate((cardinalities[t] for t in tables), initial=0)) for tables in placement
        ]
        self._limits = np.array(cardinalities, dtype=np.int64)
        self._order = np.array([t for tables in placement for t in tables], dtype=np.int64)
        self._on_device: dict[torch.device, DistinctRows] = {}
        self._base = np.zeros(len(cardinalities), dtype=np.int64)
        for tables, first_rows in zip(placement, self.first_rows, strict=True):
            self._base[tables] = first_rows[:-1]

    def write(
        self,
        categorical: Tensor | Sequence[Bags],
        device: torch.device,
        backend: Backend,
        kernels: EmbeddingKernels,
    ) -> Request:
        """The request of this rank's samples.

        Args:
            categorical: int [B, F]; or int [B, F, L]; or one :class:`Bags` per table.
            device: Of the tables; positions will be there.
            backend, kernels: For tensors on the host.

        Raises:
            IndexError: an id is outside its table.
            ValueError: ids of another shape.
        """
        began = time.perf_counter()
        if isinstance(categorical, Tensor) and categorical.dim() == 2:
            assembly, wanted = self._of_rows(self.checked(categorical, device), kernels)
        else:
            assembly, wanted = self._of_bags(_as_bags(categorical, len(self.cardinalities)))
        found = time.perf_counter()
        messages = [
            _NO_BYTES
            if owner == self.rank
            else write_request(assembly.samples, want, first_rows[-1], backend)
            for owner, (want, first_rows) in enumerate(zip(wanted, self.first_rows, strict=True))
        ]
        own = answer_to(wanted[self.rank], assembly.samples, self.first_rows[self.rank])
        if device.type != "cpu":
            assembly = _on_device(assembly, device)
        written = time.perf_counter()
        return Request(
            assembly.samples,
            messages,
            own,
            [want.counts for want in wanted],
            assembly.positions,
            assembly.pooled,
            distinct_ms=1e3 * (found - began),
            encode_ms=1e3 * (written - found),
        )

    def read(self, message: Tensor, source: int, backend: Backend) -> Answer:
        """What rank ``source`` of the group asks of this one.

        Args:
            backend: For tensors on the host.

        Raises:
            PayloadError: the request is damaged, or about other tables.
        """
        try:
            return read_request(message, self.first_rows[self.rank], backend)
        except PayloadError as error:
            raise PayloadError(
                f"{self.name}: rank {self.rank}: request from rank {source} of the group: {error}"
            ) from error

    def ids_to_peers(self, request: Request) -> int:
        """Ids that would be asked for one by one."""
        total = 0
        for owner, tables in enumerate(self.placement):
            if owner != self.rank:
                total += sum(
                    request.pooled[t][0].numel() if t in request.pooled else request.samples for t in tables
                )
        return total

    # -- one row per sample ---

    def _of_rows(self, ids: Tensor, kernels: EmbeddingKernels) -> tuple[_Assembly, list[Wanted]]:
        """Of ids, int64 [B, F] on the host, or where distinct rows are found."""
        samples = len(ids)
        sizes = [len(tables) for tables in self.placement]
        if not self._deduplicates:
            self._check_ids(ids)
            columns = ids.t()[torch.from_numpy(self._order)]
            wanted = [
                Wanted([False] * len(part), _NO_IDS, [samples] * len(part), part.reshape(-1), None)
                for part in columns.split(sizes)
            ]
            turns = torch.empty(len(self._order), dtype=torch.int64)
            turns[torch.from_numpy(self._order)] = torch.arange(len(self._order))
            return _Assembly(samples, turns * samples + torch.arange(samples).unsqueeze(1), {}), wanted
        try:
            if ids.device.type == "cpu":
                rows, counts, positions = kernels.distinct_rows(ids, self._order, self._limits, self._base)
            else:
                rows, counts, positions = self.distinct_on(ids.device)(ids)
        except OutOfRange as error:
            raise self.outside(error.column, error.found) from None
        wanted = []
        at = row = 0
        for size in sizes:
            each = counts[at : at + size].tolist()
            wanted.append(Wanted([True] * size, rows[row : row + sum(each)], each, _NO_IDS, None))
            at, row = at + size, row + sum(each)
        return _Assembly(samples, positions, {}), wanted

    def distinct_on(self, device: torch.device) -> DistinctRows:
        """What finds distinct rows on a device."""
        if device not in self._on_device:
            self._on_device[device] = DistinctRows(self._order, self._limits, self._base, device)
        return self._on_device[device]

    def checked(self, ids: Tensor, device: torch.device) -> Tensor:
        """int64, where distinct rows are found. Raises ``ValueError`` for ids of another shape."""
        if ids.shape[1] != len(self.cardinalities):
            raise ValueError(_odd_shape(ids, len(self.cardinalities)))
        return (ids.to(torch.int64) if self.stays(ids, device) else _on_host(ids)).contiguous()

    def stays(self, categorical: Tensor | Sequence[Bags], device: torch.device) -> bool:
        """Whether distinct rows are found on the tables' device."""
        if not isinstance(categorical, Tensor) or categorical.dim() != 2 or not self._deduplicates:
            return False
        return categorical.device == device and categorical.numel() > 0

    # -- any number of rows per sample ---

    def _of_bags(self, bags: Sequence[_Bag]) -> tuple[_Assembly, list[Wanted]]:
        """Of one bag of ids per table, on the host."""
        positions: list[Tensor | None] = [None] * len(bags)
        pooled: dict[int, tuple[Tensor, Tensor]] = {}
        for table, bag in enumerate(bags):
            if bag.ids.numel():
                low, high = torch.stack(torch.aminmax(bag.ids)).tolist()
                if low < 0 or high >= self.cardinalities[table]:
                    raise self.outside(table, low if low < 0 else high)
        wanted = []
        first = 0
        for tables in self.placement:
            as_rows = [self._takes_rows(bags[t]) for t in tables]
            distinct, kept = [_NO_IDS], [Bags(_NO_IDS, _NO_IDS)]
            counts: list[int] = []
            for table in (t for t, rows in zip(tables, as_rows, strict=True) if rows):
                ids, inverse = torch.unique(bags[table].ids, return_inverse=True)
                where = inverse + (first + sum(counts))
                if bags[table].one_hot:
                    positions[table] = where
                else:
                    pooled[table] = (where, bags[table].lengths)
                distinct.append(ids + int(self._base[table]))
                counts.append(len(ids))
            for table in (t for t, rows in zip(tables, as_rows, strict=True) if not rows):
                bag = bags[table]
                if self._deduplicates:
                    bag, where = _distinct_bags(bag)
                else:
                    where = torch.arange(len(bag.lengths))
                positions[table] = where + (first + sum(counts))
                kept.append(Bags(bag.ids, bag.lengths))
                counts.append(len(bag.lengths))
            first += sum(counts)
            lengths = torch.cat([bag.lengths for bag in kept])
            ids = torch.cat([bag.ids for bag in kept])
            one_hot = bool((lengths == 1).all())
            wanted.append(Wanted(as_rows, torch.cat(distinct), counts, ids, None if one_hot else lengths))
        return _Assembly(len(bags[0].lengths) if bags else 0, positions, pooled), wanted

    def _takes_rows(self, bag: _Bag) -> bool:
        """Whether a table's rows cross one by one (de-duplicated), rather than pooled."""
        if not self._deduplicates or bag.one_hot:
            return self._deduplicates
        return not self._keeps_bags and len(torch.unique(bag.ids)) <= len(bag.lengths)

    def _check_ids(self, ids: Tensor) -> None:
        outside = ((ids < 0) | (ids >= torch.from_numpy(self._limits))).nonzero()
        if len(outside):
            sample, table = outside[0].tolist()
            raise self.outside(table, int(ids[sample, table]))

    def outside(self, table: int, found: int) -> IndexError:
        """The error for an id that its table does not have."""
        return IndexError(
            f"{self.name}: rank {self.rank}: id {found} is outside table {table}, "
            f"which has {self.cardinalities[table]} rows"
        )


def _odd_shape(ids: Tensor, tables: int) -> str:
    return f"expected ids [B, {tables}] or [B, {tables}, L], got shape {tuple(ids.shape)}"


def _as_bags(categorical: Tensor | Sequence[Bags], tables: int) -> list[_Bag]:
    """Ids of every table, on the host."""
    if isinstance(categorical, Tensor):
        if categorical.dim() != 3 or categorical.shape[1] != tables:
            raise ValueError(_odd_shape(categorical, tables))
        samples, _, length = categorical.shape
        lengths = torch.full((samples,), length, dtype=torch.int64)
        columns = _on_host(categorical).transpose(0, 1).reshape(tables, -1)
        return [_Bag(column, lengths, length == 1) for column in columns]
    if len(categorical) != tables:
        raise ValueError(f"expected bags for {tables} tables, got {len(categorical)}")
    flat = [part.reshape(-1) for bag in categorical for part in bag]
    if {part.device.type for part in flat} <= {"cpu"}:
        there = iter([part.to(torch.int64) for part in flat])
    else:  # one copy for all tables
        where = next(part.device for part in flat if part.device.type != "cpu")
        joined = torch.cat([part.to(where, torch.int64) for part in flat])
        there = iter(_on_host(joined).split([len(part) for part in flat]))
    bags = []
    for number, (ids, lengths) in enumerate(zip(there, there, strict=True)):
        if int(lengths.sum()) != len(ids) or len(lengths) != len(categorical[0].lengths):
            raise ValueError(f"table {number}: {len(ids)} ids do not fit the lengths of its bags")
        bags.append(_Bag(ids, lengths, bool((lengths == 1).all())))
    return bags


def _distinct_bags(bag: _Bag) -> tuple[_Bag, Tensor]:
    """Each distinct sequence of ids once, and which one each sample has."""
    count = len(bag.lengths)
    longest = int(bag.lengths.max()) if count else 0
    padded = bag.ids.new_full((count, longest + 1), -1)
    padded[:, 0] = bag.lengths
    filled = torch.arange(longest) < bag.lengths.unsqueeze(1)
    padded[:, 1:].masked_scatter_(filled, bag.ids)
    distinct, inverse = torch.unique(padded, dim=0, return_inverse=True)
    lengths = distinct[:, 0].contiguous()
    filled = torch.arange(longest) < lengths.unsqueeze(1)
    return _Bag(distinct[:, 1:][filled], lengths, bag.one_hot), inverse


def _on_host(ids: Tensor) -> Tensor:
    """int64; ids of a device are copied here all at once."""
    ids = ids.to(torch.int64)
    return ids if ids.device.type == "cpu" else to_host(ids)


def _on_device(assembly: _Assembly, device: torch.device) -> _Assembly:
    positions = assembly.positions
    if isinstance(positions, Tensor):
        moved: Tensor | list[Tensor | None] = to_device(positions, device)
    else:
        moved = [None if part is None else to_device(part, device) for part in positions]
    pooled = {
        t: (to_device(where, device), to_device(lengths, device))
        for t, (where, lengths) in assembly.pooled.items()
    }
    return _Assembly(assembly.samples, moved, pooled)
