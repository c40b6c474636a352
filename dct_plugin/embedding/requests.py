"""Requests for rows: which rows of a rank's tables the samples of another rank need.

With de-duplication a request names each distinct row of a table once, in ascending order, which is also the
order in which the rows come back: forward and backward messages need no index. Pooled (multi-hot) vectors are
taken apart into their rows when that is less and nothing lossy applies; otherwise each distinct bag crosses
once.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.index import IndexEncoding
from ..config import EmbeddingChannelConfig
from ..errors import PayloadError
from ..kernels import Backend

__all__ = ["Answer", "Bags", "Request", "Requests"]

_REQUEST = struct.Struct("<HBBIIIIIII")
_MAGIC = 0xDC7D
_VERSION = 1
_ONE_HOT = 2


class Bags(NamedTuple):
    """Rows of one table for a batch, any number per sample.

    Attributes:
        ids: int [total].
        lengths: int [B], rows of each sample; their sum is total.
    """

    ids: Tensor
    lengths: Tensor


class Request(NamedTuple):
    """What a rank wants from every owner, and how its samples are put together from the answers.

    Attributes:
        samples: Of this rank.
        messages: Per owner, uint8.
        rows: Per owner: rows of each segment of its answer.
        positions: Per table: row of the answers for each sample; None where rows are pooled here.
        pooled: Per table that is pooled here: rows of the answers, and how many for each sample.
    """

    samples: int
    messages: list[Tensor]
    rows: list[list[int]]
    positions: list[Tensor | None]
    pooled: dict[int, tuple[Tensor, Tensor]]


class Answer(NamedTuple):
    """What a request of another rank asks for.

    Attributes:
        samples: Of that rank.
        segments: (own table, vectors) in the order of the answer.
        rows: int64, rows of the shard's matrix.
        bags: Bags of rows of the shard's matrix; they follow ``rows``.
    """

    samples: int
    segments: list[tuple[int, int]]
    rows: Tensor
    bags: Bags


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
        self._first_rows = [
            list(itertools.accumulate((cardinalities[t] for t in tables), initial=0)) for tables in placement
        ]

    def write(self, categorical: Tensor | Sequence[Bags], device: torch.device, kernels: Backend) -> Request:
        """The request of this rank's samples.

        Args:
            categorical: int [B, F]; or int [B, F, L]; or one :class:`Bags` per table.
            device: Of the tables; positions and messages will be there.
            kernels: For tensors on ``device``.

        Raises:
            IndexError: an id is outside its table.
            ValueError: ids of another shape.
        """
        bags = _as_bags(categorical, len(self.cardinalities), device)
        request = Request(len(bags[0].lengths) if bags else 0, [], [], [None] * len(bags), {})
        first = 0
        for tables, first_rows in zip(self.placement, self._first_rows, strict=True):
            as_rows = [self._takes_rows(bags[t]) for t in tables]
            distinct: list[Tensor] = []
            kept: list[_Bag] = []
            counts: list[int] = []
            for at, table in enumerate(tables):
                if not as_rows[at]:
                    continue
                ids, inverse = torch.unique(bags[table].ids, return_inverse=True)
                self._check_ids(ids, table)
                where = inverse + (first + sum(counts))
                if bags[table].one_hot:
                    request.positions[table] = where
                else:
                    request.pooled[table] = (where, bags[table].lengths)
                distinct.append(ids + first_rows[at])
                counts.append(len(ids))
            for at, table in enumerate(tables):
                if as_rows[at]:
                    continue
                self._check_ids(bags[table].ids, table)
                bag = bags[table]
                if self._deduplicates:
                    bag, where = _distinct_bags(bag)
                else:
                    where = torch.arange(len(bag.lengths), device=device)
                request.positions[table] = where + (first + sum(counts))
                kept.append(bag)
                counts.append(len(bag.lengths))
            first += sum(counts)
            request.rows.append(counts)
            request.messages.append(
                _write_request(request.samples, as_rows, distinct, kept, first_rows[-1], device, kernels)
            )
        return request

    def read(self, message: Tensor, source: int, kernels: Backend) -> Answer:
        """What rank ``source`` of the group asks of this one; its rows are on the message's device.

        Raises:
            PayloadError: the request is damaged, or about other tables.
        """
        try:
            return _read_request(message, self._first_rows[self.rank], kernels)
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

    def _takes_rows(self, bag: _Bag) -> bool:
        """Whether a table's rows cross one by one (de-duplicated), rather than pooled."""
        if not self._deduplicates or bag.one_hot:
            return self._deduplicates
        return not self._keeps_bags and len(torch.unique(bag.ids)) <= len(bag.lengths)

    def _check_ids(self, ids: Tensor, table: int) -> None:
        if ids.numel():
            low, high = torch.stack(torch.aminmax(ids)).tolist()
            if low < 0 or high >= self.cardinalities[table]:
                raise IndexError(
                    f"{self.name}: rank {self.rank}: id {low if low < 0 else high} is outside table {table}, "
                    f"which has {self.cardinalities[table]} rows"
                )


@dataclass(frozen=True)
class _Bag:
    ids: Tensor
    lengths: Tensor
    one_hot: bool


def _as_bags(categorical: Tensor | Sequence[Bags], tables: int, device: torch.device) -> list[_Bag]:
    """Ids on the tables' device, where the answers will be."""
    if isinstance(categorical, Tensor):
        categorical = categorical.to(device)
        if categorical.dim() not in (2, 3) or categorical.shape[1] != tables:
            raise ValueError(
                f"expected ids [B, {tables}] or [B, {tables}, L], got shape {tuple(categorical.shape)}"
            )
        if categorical.dim() == 2:
            ones = torch.ones(len(categorical), dtype=torch.int64, device=categorical.device)
            return [_Bag(column, ones, True) for column in categorical.to(torch.int64).t().contiguous()]
        length = categorical.shape[2]
        lengths = torch.full((len(categorical),), length, dtype=torch.int64, device=categorical.device)
        columns = categorical.to(torch.int64).transpose(0, 1).reshape(tables, -1)
        return [_Bag(column, lengths, length == 1) for column in columns]
    if len(categorical) != tables:
        raise ValueError(f"expected bags for {tables} tables, got {len(categorical)}")
    bags = []
    for number, (ids, lengths) in enumerate(categorical):
        ids, lengths = ids.to(device), lengths.to(device, torch.int64)
        if int(lengths.sum()) != len(ids) or len(lengths) != len(categorical[0].lengths):
            raise ValueError(f"table {number}: {len(ids)} ids do not fit the lengths of its bags")
        bags.append(_Bag(ids.to(torch.int64), lengths, bool((lengths == 1).all())))
    return bags


def _distinct_bags(bag: _Bag) -> tuple[_Bag, Tensor]:
    """Each distinct sequence of ids once, and which one each sample has."""
    count = len(bag.lengths)
    longest = int(bag.lengths.max()) if count else 0
    padded = bag.ids.new_full((count, longest + 1), -1)
    padded[:, 0] = bag.lengths
    filled = torch.arange(longest, device=bag.ids.device) < bag.lengths.unsqueeze(1)
    padded[:, 1:].masked_scatter_(filled, bag.ids)
    distinct, inverse = torch.unique(padded, dim=0, return_inverse=True)
    lengths = distinct[:, 0].contiguous()
    filled = torch.arange(longest, device=bag.ids.device) < lengths.unsqueeze(1)
    return _Bag(distinct[:, 1:][filled], lengths, bag.one_hot), inverse


def _write_request(
    samples: int,
    as_rows: Sequence[bool],
    distinct: Sequence[Tensor],
    bags: Sequence[_Bag],
    limit: int,
    device: torch.device,
    kernels: Backend,
) -> Tensor:
    """uint8 request to one owner of ``limit`` rows: distinct rows as positions, bags as they are."""
    positions = torch.cat(list(distinct)) if distinct else torch.empty(0, dtype=torch.int64, device=device)
    encoding, param, index = kernels.encode_indices(positions, limit)
    one_hot = all(bag.one_hot for bag in bags)
    ids = (
        torch.cat([bag.ids for bag in bags]).to("cpu", torch.int32)
        if bags
        else torch.empty(0, dtype=torch.int32)
    )
    parts = [bytes(as_rows), bytes([encoding, param]), index.cpu().numpy().tobytes(), ids.numpy().tobytes()]
    parts += [torch.tensor([len(bag.lengths) for bag in bags], dtype=torch.int32).numpy().tobytes()]
    if not one_hot:
        parts += [bag.lengths.to("cpu", torch.int32).numpy().tobytes() for bag in bags]
    body = b"".join(parts)
    flags = _ONE_HOT if one_hot else 0
    fields = (
        _MAGIC,
        _VERSION,
        flags,
        samples,
        len(as_rows),
        len(positions),
        index.numel(),
        len(ids),
        len(body),
    )
    check = zlib.crc32(body, zlib.crc32(_REQUEST.pack(*fields, 0)))
    return torch.frombuffer(bytearray(_REQUEST.pack(*fields, check) + body), dtype=torch.uint8).to(device)


def _read_request(message: Tensor, first_rows: Sequence[int], kernels: Backend) -> Answer:
    """What a rank asks of this one. Raises :class:`PayloadError`."""
    data = message.cpu().numpy().tobytes()
    if len(data) < _REQUEST.size:
        raise PayloadError(f"{len(data)} bytes, a request has at least {_REQUEST.size}")
    *fields, check = _REQUEST.unpack_from(data)
    magic, version, flags, samples, tables, nnz, index_size, id_count, size = fields
    body = data[_REQUEST.size :]
    if magic != _MAGIC or version != _VERSION or flags & ~_ONE_HOT:
        raise PayloadError(f"magic 0x{magic:04X}, version {version}, flags {flags}: not a request known here")
    if len(body) != size or zlib.crc32(body, zlib.crc32(_REQUEST.pack(*fields, 0))) != check:
        raise PayloadError("it is truncated or corrupted")
    if tables != len(first_rows) - 1:
        raise PayloadError(f"it is about {tables} tables, this rank has {len(first_rows) - 1}")
    reader = _Reader(body)
    as_rows = [bool(flag) for flag in reader.take(tables)]
    encoding, param = reader.take(2)
    if encoding >= IndexEncoding.SHARED_MASK:
        raise PayloadError(f"index encoding {encoding} is unknown")
    at = _REQUEST.size + tables + 2
    reader.take(index_size)
    rows = kernels.decode_indices(encoding, param, message[at : at + index_size].clone(), nnz, first_rows[-1])
    ids = reader.integers(id_count)
    bag_tables = [t for t in range(tables) if not as_rows[t]]
    counts = reader.integers(len(bag_tables)).tolist()
    if min(counts, default=0) < 0:
        raise PayloadError("a number of bags is negative")
    if flags & _ONE_HOT:
        lengths = torch.ones(sum(counts), dtype=torch.int64)
    else:
        lengths = reader.integers(sum(counts))
    reader.end()
    if int(lengths.sum()) != len(ids) or (len(lengths) and int(lengths.min()) < 0):
        raise PayloadError(f"{len(ids)} ids do not fit the lengths of their bags")
    row_tables = [t for t in range(tables) if as_rows[t]]
    edges = torch.searchsorted(rows, torch.tensor(first_rows, device=rows.device)).tolist()
    segments = [(t, edges[t + 1] - edges[t]) for t in row_tables]
    if sum(count for _, count in segments) != nnz:
        raise PayloadError("it names rows of a table that it asks for as bags")
    segments += list(zip(bag_tables, counts, strict=True))
    offset = 0
    ends = torch.cumsum(lengths, 0)
    first = 0
    for table, count in zip(bag_tables, counts, strict=True):
        last = int(ends[first + count - 1]) if first + count else 0
        part = ids[offset:last]
        limit = first_rows[table + 1] - first_rows[table]
        if len(part) and (int(part.min()) < 0 or int(part.max()) >= limit):
            raise PayloadError(f"an id is outside own table {table} of {limit} rows")
        part += first_rows[table]
        offset, first = last, first + count
    return Answer(samples, segments, rows, Bags(ids, lengths))


class _Reader:
    """Takes bytes from the front of a body that may be shorter than it says."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, count: int) -> bytes:
        part = self._body[self._at : self._at + count]
        if len(part) != count:
            raise PayloadError("it is shorter than it says")
        self._at += count
        return part

    def integers(self, count: int) -> Tensor:
        """int64 [count], from 32-bit ones."""
        data = self.take(4 * count)
        if not data:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(bytearray(data), dtype=torch.int32).to(torch.int64)

    def end(self) -> None:
        if self._at != len(self._body):
            raise PayloadError("it is longer than it says")
