"""What a request for rows is on the wire.

A header with a checksum; per table a byte that says whether rows or bags are asked for; the distinct rows as
one index section, numbered through the owner's tables; then the bags' ids and lengths.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.index import IndexEncoding
from ..errors import PayloadError
from ..kernels import Backend

__all__ = ["Answer", "Bag", "Bags", "read_request", "write_request"]

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


@dataclass(frozen=True)
class Bag:
    """:class:`Bags` of one table; ``one_hot``: every sample has one row."""

    ids: Tensor
    lengths: Tensor
    one_hot: bool


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


def write_request(
    samples: int,
    as_rows: Sequence[bool],
    distinct: Sequence[Tensor],
    bags: Sequence[Bag],
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


def read_request(message: Tensor, first_rows: Sequence[int], kernels: Backend) -> Answer:
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
