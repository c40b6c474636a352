"""The wire format of a request for rows.

A header with a checksum; per table a byte that says whether rows or bags are asked for; the distinct rows as
one index section, numbered through the owner's tables; then the bags' ids and lengths.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.index import index_form
from ..errors import PayloadError
from ..kernels import Selection

_HEADER = struct.Struct("<HBBIIIIII")
_MAGIC = 0xDC7D
_VERSION = 2
_ONE_HOT = 2
#: The largest request: 2**28 ids of a batch. The number of another rank's samples is not known beforehand.
MOST_BYTES = 2**30
NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class Bags(NamedTuple):
    """Rows of one table for a batch, any number per sample.

    Attributes:
        ids: int [total].
        lengths: int [B], rows of each sample; their sum is total.
    """

    ids: Tensor
    lengths: Tensor

    @property
    def one_hot(self) -> bool:
        """True if every sample has one row."""
        return bool((self.lengths == 1).all())


NO_BAGS = Bags(NO_IDS, NO_IDS)


class RowRequest(NamedTuple):
    """The request of one rank to one owner of tables.

    Attributes:
        samples: Number of samples of the rank that asks.
        as_rows: Per table of the owner: True if distinct rows are asked for, False for bags.
        counts: Vectors of each segment of the answer: first the tables with rows, then those with bags.
        rows: int64, distinct rows, ascending, as row numbers of the owner's shard; on the host or on the
            shard's device.
        bags: Bags of all tables that are not in ``rows``, int64 row numbers of the owner's shard, on the
            host.
    """

    samples: int
    as_rows: list[bool]
    counts: list[int]
    rows: Tensor = NO_IDS
    bags: Bags = NO_BAGS

    @property
    def segments(self) -> list[tuple[int, int]]:
        """``(own table, vectors)`` in the order of the answer."""
        return list(zip(answer_order(self.as_rows), self.counts, strict=True))

    def per_id(self, values: Sequence[int]) -> Tensor:
        """Repeat ``values`` (one per table of the owner) for every id of the bags of that table, int64."""
        bags = self.segments[sum(self.as_rows) :]
        per_bag = np.repeat(
            np.array([values[table] for table, _ in bags], dtype=np.int64),
            np.array([count for _, count in bags], dtype=np.int64),
        )
        return torch.from_numpy(per_bag).repeat_interleave(self.bags.lengths)

    def with_ids(self, ids: Tensor, first_rows: Sequence[int]) -> RowRequest:
        """Replace the ids of the bags by ``ids``, which count from the first row of their table."""
        return self._replace(bags=self.bags._replace(ids=ids + self.per_id(first_rows)))


def answer_order(as_rows: Sequence[bool]) -> list[int]:
    """Return the owner's tables (local numbers) in the order of the answer's segments."""
    return sorted(range(len(as_rows)), key=lambda table: not as_rows[table])


def write_request(request: RowRequest, first_rows: Sequence[int], kernels: Selection) -> Tensor:
    """Write a request, uint8 on the host: distinct rows as positions, bags as they are.

    Args:
        first_rows: First row of each of the owner's tables in its shard, and the number of rows.
        kernels: For tensors on the host.
    """
    index = kernels.encode_indices(request.rows, first_rows[-1])
    one_hot = request.bags.one_hot
    bag_counts = request.counts[sum(request.as_rows) :]
    ids = (request.bags.ids - request.per_id(first_rows)).numpy()
    integers = [ids, np.array(bag_counts), *([] if one_hot else [request.bags.lengths.numpy()])]
    body = (
        bytes(request.as_rows)
        + index.numpy().tobytes()
        + b"".join(each.astype("<i4").tobytes() for each in integers)
    )
    counts = len(request.as_rows), len(request.rows), len(request.bags.ids), len(body)
    fields = _MAGIC, _VERSION, _ONE_HOT if one_hot else 0, request.samples, *counts
    check = zlib.crc32(body, zlib.crc32(_HEADER.pack(*fields, 0)))
    return torch.frombuffer(bytearray(_HEADER.pack(*fields, check) + body), dtype=torch.uint8)


def read_request(message: Tensor, first_rows: Sequence[int], kernels: Selection) -> RowRequest:
    """Read a request to this rank; the inverse of :func:`write_request`.

    Raises:
        PayloadError: The message is damaged, or about other tables.
    """
    fields, body = _checked(message.cpu().numpy().tobytes())
    flags, samples, tables, nnz, id_count = fields
    if tables != len(first_rows) - 1:
        raise PayloadError(f"it is about {tables} tables, this rank has {len(first_rows) - 1}")
    reader = _Reader(body)
    as_rows = [bool(flag) for flag in reader.take(tables)]
    if nnz > first_rows[-1]:
        raise PayloadError(f"it names {nnz} rows, this rank has {first_rows[-1]}")
    index = bytearray(reader.take(index_form(nnz, first_rows[-1]).nbytes))
    positions = torch.frombuffer(index, dtype=torch.uint8) if index else NO_BYTES
    rows = kernels.decode_indices(positions, nnz, first_rows[-1])
    ids = reader.integers(id_count)
    bag_counts = reader.integers(tables - sum(as_rows)).tolist()
    if min(bag_counts, default=0) < 0:
        raise PayloadError("a number of bags is negative")
    one_hot = flags & _ONE_HOT and sum(bag_counts) == id_count
    lengths = (
        torch.ones(id_count, dtype=torch.int64, device="cpu") if one_hot else reader.integers(sum(bag_counts))
    )
    reader.end()
    if int(lengths.sum()) != len(ids) or (len(lengths) and int(lengths.min()) < 0):
        raise PayloadError(f"{len(ids)} ids do not fit the lengths of their bags")
    edges = np.searchsorted(rows.numpy(), np.asarray(first_rows, dtype=np.int64)).tolist()
    counts = [edges[t + 1] - edges[t] for t in range(tables) if as_rows[t]]
    if sum(counts) != nnz:
        raise PayloadError("it names rows of a table that it asks for as bags")
    request = RowRequest(samples, as_rows, counts + bag_counts, rows, Bags(ids, lengths))
    limits = [first_rows[t + 1] - first_rows[t] for t in range(tables)]
    outside = (ids < 0) | (ids >= request.per_id(limits))
    if bool(outside.any()):
        table = int(request.per_id(range(tables))[outside][0])
        raise PayloadError(f"an id is outside own table {table} of {limits[table]} rows")
    return request.with_ids(ids, first_rows)


def _checked(data: bytes) -> tuple[Sequence[int], bytes]:
    """Check header and checksum; returns flags, samples, tables, rows, ids; the body."""
    if len(data) < _HEADER.size:
        raise PayloadError(f"{len(data)} bytes, a request has at least {_HEADER.size}")
    *fields, check = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    magic, version, flags, *_, size = fields
    if magic != _MAGIC or version != _VERSION or flags & ~_ONE_HOT:
        raise PayloadError(f"magic 0x{magic:04X}, version {version}, flags {flags}: not a request known here")
    if len(body) != size or zlib.crc32(body, zlib.crc32(_HEADER.pack(*fields, 0))) != check:
        raise PayloadError("it is truncated or corrupted")
    return fields[2:-1], body


class _Reader(BytesIO):
    """Takes bytes from the front of a body that may be shorter than it says."""

    def take(self, count: int) -> bytes:
        part = self.read(count)
        if len(part) != count:
            raise PayloadError("it is shorter than it says")
        return part

    def integers(self, count: int) -> Tensor:
        """int64 [count], from 32-bit ones."""
        return torch.from_numpy(np.frombuffer(self.take(4 * count), dtype="<i4").astype(np.int64))

    def end(self) -> None:
        if self.read(1):
            raise PayloadError("it is longer than it says")
