"""What a request for rows is on the wire.

A header with a checksum; per table a byte that says whether rows or bags are asked for; the distinct rows as
one index section, numbered through the owner's tables; then the bags' ids and lengths.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.index import IndexEncoding
from ..errors import PayloadError
from ..kernels import Backend

__all__ = ["Answer", "Bags", "Wanted", "answer_to", "read_request", "write_request"]

_REQUEST = struct.Struct("<HBBIIIIIII")
_MAGIC = 0xDC7D
_VERSION = 1
_ONE_HOT = 2
#: What a request can be: 2**28 ids of a batch. How many samples another rank has is not known beforehand.
MOST_BYTES = 2**30
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Bags(NamedTuple):
    """Rows of one table for a batch, any number per sample.

    Attributes:
        ids: int [total].
        lengths: int [B], rows of each sample; their sum is total.
    """

    ids: Tensor
    lengths: Tensor


class Answer(NamedTuple):
    """What a request of another rank asks for.

    Attributes:
        samples: Of that rank.
        segments: (own table, vectors) in the order of the answer.
        rows: int64, rows of the shard's matrix; on the host, or on its device.
        bags: Bags of rows of the shard's matrix on the host; they follow ``rows``.
    """

    samples: int
    segments: list[tuple[int, int]]
    rows: Tensor
    bags: Bags


class Wanted(NamedTuple):
    """What a rank wants of one owner, on the host.

    Attributes:
        as_rows: Per table of the owner: whether rows or bags are asked for.
        rows: int64, distinct rows of the tables that rows are asked of, ascending, numbered through the
            owner's tables.
        counts: Vectors of each segment of the answer: tables with rows, then tables with bags.
        ids: int64, of the bags.
        lengths: int64, ids of each bag; None: one each.
    """

    as_rows: list[bool]
    rows: Tensor
    counts: list[int]
    ids: Tensor
    lengths: Tensor | None

    def segments(self) -> list[tuple[int, int]]:
        """(own table, vectors) in the order of the answer."""
        tables = [t for t, rows in enumerate(self.as_rows) if rows]
        tables += [t for t, rows in enumerate(self.as_rows) if not rows]
        return list(zip(tables, self.counts, strict=True))


def answer_to(wanted: Wanted, samples: int, first_rows: Sequence[int]) -> Answer:
    """What an owner makes of a request whose ids are in range.

    Args:
        first_rows: Of the owner's tables in its shard, and behind the last one.
    """
    segments = wanted.segments()
    ids, lengths = wanted.ids, wanted.lengths
    if lengths is None:
        lengths = torch.ones(len(ids), dtype=torch.int64)
    bags = segments[sum(wanted.as_rows) :]
    first = _per_id([first_rows[t] for t, _ in bags], [n for _, n in bags], lengths)
    return Answer(samples, segments, wanted.rows, Bags(ids + first, lengths))


def write_request(samples: int, wanted: Wanted, limit: int, kernels: Backend) -> Tensor:
    """uint8 request to one owner of ``limit`` rows: distinct rows as positions, bags as they are.

    Args:
        kernels: For tensors on the host.
    """
    encoding, param, index = kernels.encode_indices(wanted.rows, limit)
    bag_counts = wanted.counts[sum(wanted.as_rows) :]
    parts = [
        bytes(wanted.as_rows) + bytes([encoding, param]),
        index.numpy().tobytes(),
        wanted.ids.numpy().astype("<i4").tobytes(),
        np.array(bag_counts, dtype="<i4").tobytes(),
    ]
    if wanted.lengths is not None:
        parts.append(wanted.lengths.numpy().astype("<i4").tobytes())
    body = b"".join(parts)
    fields = (
        _MAGIC,
        _VERSION,
        _ONE_HOT if wanted.lengths is None else 0,
        samples,
        len(wanted.as_rows),
        len(wanted.rows),
        index.numel(),
        len(wanted.ids),
        len(body),
    )
    check = zlib.crc32(body, zlib.crc32(_REQUEST.pack(*fields, 0)))
    return torch.frombuffer(bytearray(_REQUEST.pack(*fields, check) + body), dtype=torch.uint8)


def read_request(message: Tensor, first_rows: Sequence[int], kernels: Backend) -> Answer:
    """What a rank asks of this one, on the host. Raises :class:`PayloadError`."""
    message = message.cpu()
    data = message.numpy().tobytes()
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
    index = (
        torch.frombuffer(bytearray(reader.take(index_size)), dtype=torch.uint8) if index_size else _NOTHING
    )
    rows = kernels.decode_indices(encoding, param, index, nnz, first_rows[-1])
    ids = reader.integers(id_count)
    bag_tables = [t for t in range(tables) if not as_rows[t]]
    bag_counts = reader.integers(len(bag_tables)).tolist()
    if min(bag_counts, default=0) < 0:
        raise PayloadError("a number of bags is negative")
    lengths = None if flags & _ONE_HOT else reader.integers(sum(bag_counts))
    reader.end()
    bags = sum(bag_counts) if lengths is None else int(lengths.sum())
    if bags != len(ids) or (lengths is not None and len(lengths) and int(lengths.min()) < 0):
        raise PayloadError(f"{len(ids)} ids do not fit the lengths of their bags")
    edges = np.searchsorted(rows.numpy(), np.asarray(first_rows, dtype=np.int64)).tolist()
    counts = [edges[t + 1] - edges[t] for t in range(tables) if as_rows[t]]
    if sum(counts) != nnz:
        raise PayloadError("it names rows of a table that it asks for as bags")
    if len(ids):
        limits = [first_rows[t + 1] - first_rows[t] for t in bag_tables]
        every = torch.ones(len(ids), dtype=torch.int64) if lengths is None else lengths
        outside = (ids < 0) | (ids >= _per_id(limits, bag_counts, every))
        if bool(outside.any()):
            table = int(_per_id(bag_tables, bag_counts, every)[outside][0])
            limit = first_rows[table + 1] - first_rows[table]
            raise PayloadError(f"an id is outside own table {table} of {limit} rows")
    return answer_to(Wanted(as_rows, rows, counts + bag_counts, ids, lengths), samples, first_rows)


def _per_id(values: Sequence[int], counts: Sequence[int], lengths: Tensor) -> Tensor:
    """``values[t]`` for every id of ``counts[t]`` bags of ``lengths`` ids, int64."""
    per_bag = np.repeat(np.asarray(values, dtype=np.int64), np.asarray(counts, dtype=np.int64))
    return torch.from_numpy(per_bag).repeat_interleave(lengths)


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
