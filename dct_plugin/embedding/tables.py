"""Embedding tables sharded over ranks, and the all-to-all that brings their vectors to the samples.

Every rank holds whole tables (*table-wise* sharding) and its own part of the batch. Forward: each rank asks
the owners for the rows its samples need, the owners look them up and send them through the
:class:`~dct_plugin.embedding.channel.EmbeddingChannel`; backward, the gradients go the same way back
and stay with the owner.

With de-duplication a request names each distinct row of a table once, in ascending order, which is also the
order in which the rows come back: forward and backward messages need no index. Pooled (multi-hot) vectors are
taken apart into their rows when that is less and nothing lossy applies; otherwise each distinct bag crosses
once. Gradients of equal rows are summed on the samples' rank, by autograd.
"""

from __future__ import annotations

import heapq
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ..codecs.index import IndexEncoding
from ..collectives.exchange import Exchange
from ..config import EmbeddingChannelConfig
from ..errors import PayloadError
from ..kernels import get_backend
from ..metrics import Metrics, Record
from .channel import EmbeddingChannel, Route

__all__ = ["Bags", "ShardedTables", "Table", "TableShard", "load_tables", "place_tables"]

Pooling = Literal["sum", "mean"]

_REQUEST = struct.Struct("<HBBIIIIIII")
_MAGIC = 0xDC7D
_VERSION = 1
_DISTINCT = 1
_ONE_HOT = 2


@dataclass(frozen=True)
class Table:
    """What placement has to know of a table: rows, width, and average rows per sample (pooling)."""

    rows: int
    width: int
    pooling: float = 1.0
    name: str = ""

    @property
    def cost(self) -> float:
        """Rows x width x pooling."""
        return self.rows * self.width * self.pooling


class Bags(NamedTuple):
    """Rows of one table for a batch, any number per sample.

    Attributes:
        ids: int [total].
        lengths: int [B], rows of each sample; their sum is total.
    """

    ids: Tensor
    lengths: Tensor


def place_tables(tables: Sequence[Table], world_size: int) -> list[list[int]]:
    """Balance tables over ranks by rows x width x pooling; ranks may stay without.

    Longest processing time first (Graham, SIAM J. Applied Mathematics 17, 1969): the greatest cost goes to
    the rank that has least, which is at most a third above the optimum. Ties are broken by table and rank, so
    that every rank finds the same answer.

    Returns:
        the tables of each rank, ascending.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    loads = [(0.0, 0, rank) for rank in range(world_size)]
    placed: list[list[int]] = [[] for _ in range(world_size)]
    for number in sorted(range(len(tables)), key=lambda t: (-tables[t].cost, t)):
        load, count, rank = heapq.heappop(loads)
        placed[rank].append(number)
        heapq.heappush(loads, (load + tables[number].cost, count + 1, rank))
    return [sorted(numbers) for numbers in placed]


class TableShard(nn.Module):
    """The tables of one rank, below each other in one matrix, with the channel's state beside them.

    A rank without tables holds one row that nothing uses: frameworks that flatten parameters want one.
    """

    def __init__(self, rows: Sequence[int], dim: int, channel: EmbeddingChannel) -> None:
        super().__init__()
        self.rows = list(rows)
        self.weight = nn.Parameter(torch.zeros(max(sum(rows), 1), dim))
        self.channel = channel

    def tables(self) -> list[Tensor]:
        """Views of the tables, [rows, dim] each."""
        return list(self.weight.detach()[: sum(self.rows)].split(self.rows)) if self.rows else []


class ShardedTables(nn.Module):
    """Embedding tables of equal width, each on one rank of a group.

    Every rank constructs it alike and calls it at the same time (forward and backward are collectives), each
    with samples of its own; their number may differ.

    Args:
        cardinalities: Rows of each table.
        dim: Width.
        group: Process group, None for the default one; it has to exist already.
        config: ``dct.embedding``; defaults to a channel that de-duplicates rows and is exact.
        pooling: How the rows of a sample are combined, ``sum`` or ``mean``.
        rows_per_sample: Average rows per sample of each table, for the placement.
        placement: Tables of each rank; balanced by :func:`place_tables` by default.
        sparse: Sparse gradients, for optimizers that take them.
        average_gradients: Divide gradients by the number of ranks, so that they are those of the mean over
            the global batch, as data-parallel gradients are. False where the host framework does that.
        name: Name in errors and metrics.
        metrics: Records what crosses; see the channel. Requests are ``embedding_ids``.

    Initial rows are uniform in ``+-1/sqrt(rows)``, drawn from the global generator table by table: every rank
    draws all tables and keeps its own, so the model does not depend on the number of ranks.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        dim: int,
        *,
        group: dist.ProcessGroup | None = None,
        config: EmbeddingChannelConfig | None = None,
        pooling: Pooling = "sum",
        rows_per_sample: Sequence[float] | None = None,
        placement: Sequence[Sequence[int]] | None = None,
        sparse: bool = False,
        average_gradients: bool = True,
        name: str = "tables",
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__()
        if pooling not in ("sum", "mean"):
            raise ValueError(f"pooling is {pooling!r}; allowed: 'sum', 'mean'")
        self.cardinalities = [int(rows) for rows in cardinalities]
        if max(self.cardinalities, default=0) >= 2**31:
            raise ValueError(f"a table has {max(self.cardinalities)} rows; at most 2**31 - 1 are supported")
        self.dim = dim
        self.pooling = pooling
        self.sparse = sparse
        self.name = name
        self.metrics = metrics
        self.config = config if config is not None else EmbeddingChannelConfig()
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        hot = rows_per_sample if rows_per_sample is not None else [1.0] * len(self.cardinalities)
        described = [Table(rows, dim, p) for rows, p in zip(self.cardinalities, hot, strict=True)]
        self.placement = [list(t) for t in placement or place_tables(described, self.world_size)]
        if sorted(t for tables in self.placement for t in tables) != list(range(len(self.cardinalities))) or (
            len(self.placement) != self.world_size
        ):
            raise ValueError(
                f"placement {self.placement} does not put each of {len(self.cardinalities)} tables on one of "
                f"{self.world_size} ranks"
            )
        own = self.placement[self.rank]
        channel = EmbeddingChannel(
            self.config,
            tables=len(own),
            dim=dim,
            name=name,
            metrics=metrics,
            gradient_scale=1.0 / self.world_size if average_gradients else 1.0,
        )
        self._hold(TableShard([self.cardinalities[t] for t in own], dim, channel))
        self._exchange: Exchange | None = None
        self._fingerprint = zlib.crc32(f"{name}/ids".encode())
        # Rows of every rank are numbered through its tables.
        self._first_rows = [_starts([self.cardinalities[t] for t in tables]) for tables in self.placement]
        self._initialise()

    # The shard hangs where the host framework's checkpoints look for it.
    def _hold(self, shard: TableShard) -> None:
        self.shard = shard

    @property
    def channel(self) -> EmbeddingChannel:
        """The channel with its thresholds and counters."""
        return self.shard.channel

    def _initialise(self) -> None:
        own = dict(zip(self.placement[self.rank], self.shard.tables(), strict=True))
        for number, rows in enumerate(self.cardinalities):
            limit = 1.0 / math.sqrt(rows)
            drawn = torch.empty(rows, self.dim).uniform_(-limit, limit)
            if number in own:
                own[number].copy_(drawn)

    # -- forward ---

    def forward(self, categorical: Tensor | Sequence[Bags]) -> Tensor:
        """Look up this rank's samples.

        Args:
            categorical: int [B, F]; or int [B, F, L], L rows per sample, pooled; or one :class:`Bags` per
                table.

        Returns:
            [B, F, dim] in the tables' dtype.

        Raises:
            IndexError: an id outside its table; named with table and rank.
        """
        weight = self.shard.weight
        request = self._request(categorical)
        answered = self._answer_plan(request)
        blocks = self._look_up(answered)
        route = Route(
            sent_tables=[[t for t, _ in plan.segments] for plan in answered],
            sent_rows=[[n for _, n in plan.segments] for plan in answered],
            received_rows=request.rows,
            samples=[plan.samples for plan in answered],
            own_tables=[len(tables) for tables in self.placement],
        )
        received = self.channel(blocks, route, self.group)
        return self._assemble(received, request).to(weight.dtype)

    def _request(self, categorical: Tensor | Sequence[Bags]) -> _Request:
        """What this rank wants from every owner, and how its samples are put together from the answers."""
        bags = _as_bags(categorical, len(self.cardinalities), self.shard.weight.device)
        samples = len(bags[0].lengths) if bags else 0
        device = self.shard.weight.device
        messages, rows = [], []
        positions: list[Tensor | None] = [None] * len(bags)
        pooled: dict[int, tuple[Tensor, Tensor]] = {}
        base = 0
        for owner, tables in enumerate(self.placement):
            distinct: list[Tensor] = []
            kept_bags: list[_Bag] = []
            as_rows = [self._takes_rows(bags[t]) for t in tables]
            counts: list[int] = []
            for at, table in enumerate(tables):
                if not as_rows[at]:
                    continue
                ids, inverse = torch.unique(bags[table].ids, return_inverse=True)
                self._check_ids(ids, table)
                where = inverse + (base + sum(counts))
                if bags[table].one_hot:
                    positions[table] = where
                else:
                    pooled[table] = (where, bags[table].lengths)
                distinct.append(ids + self._first_rows[owner][at])
                counts.append(len(ids))
            for at, table in enumerate(tables):
                if as_rows[at]:
                    continue
                self._check_ids(bags[table].ids, table)
                bag, inverse = bags[table], None
                if self.config.enabled and self.config.deduplicate:
                    bag, inverse = _distinct_bags(bag)
                start = base + sum(counts)
                count = len(bag.lengths)
                positions[table] = (
                    torch.arange(start, start + count, device=device) if inverse is None else inverse + start
                )
                kept_bags.append(bag)
                counts.append(count)
            base += sum(counts)
            rows.append(counts)
            messages.append(_write_request(samples, as_rows, distinct, kept_bags, self._first_rows[owner]))
        return _Request(samples, messages, rows, positions, pooled)

    def _takes_rows(self, bag: _Bag) -> bool:
        """Whether a table's rows cross one by one (de-duplicated), rather than pooled."""
        if not (self.config.enabled and self.config.deduplicate):
            return False
        if bag.one_hot:
            return True
        # A bound on rows is none on their sum, and a threshold is meant for what the model sees.
        if self.config.sparsity > 0 or self.config.error_bound is not None:
            return False
        return len(torch.unique(bag.ids)) <= len(bag.lengths)

    def _check_ids(self, ids: Tensor, table: int) -> None:
        if ids.numel():
            low, high = (int(v) for v in torch.aminmax(ids))
            if low < 0 or high >= self.cardinalities[table]:
                # Peers learn of it in the exchange they are waiting in.
                self._ids_exchange().abort()
                raise IndexError(
                    f"{self.name}: rank {self.rank}: id {low if low < 0 else high} is outside table {table}, "
                    f"which has {self.cardinalities[table]} rows"
                )

    def _ids_exchange(self) -> Exchange:
        device = self.shard.weight.device
        if (
            self._exchange is None
            or self._exchange.group is not self.group
            or self._exchange.device != device
        ):
            self._exchange = Exchange(self.group, device)
        return self._exchange

    def _answer_plan(self, request: _Request) -> list[_Answer]:
        exchange = self._ids_exchange()
        device = self.shard.weight.device
        before = exchange.sent_bytes
        received = exchange.all_to_all([m.to(device) for m in request.messages], self._fingerprint)
        if self.metrics is not None and self.world_size > 1:
            ids = request.ids_to_peers(self.rank, self.placement)
            self.metrics.record(
                Record(
                    "embedding_ids",
                    dense_bytes=4 * ids,
                    sent_bytes=exchange.sent_bytes - before,
                    numel=ids,
                    nnz=ids,
                    target_density=1.0,
                    tau=0.0,
                )
            )
        first_rows = self._first_rows[self.rank]
        plans = []
        for source, message in enumerate(received):
            try:
                plans.append(_read_request(message, first_rows))
            except PayloadError as error:
                raise PayloadError(
                    f"{self.name}: rank {self.rank}: request from rank {source} of the group: {error}"
                ) from error
        return plans

    def _look_up(self, plans: Sequence[_Answer]) -> list[Tensor]:
        """The vectors for every rank, [rows, dim] each; one gather for all of them."""
        weight = self.shard.weight
        device = weight.device
        rows = torch.cat([plan.rows for plan in plans]).to(device)
        singles = functional.embedding(rows, weight, sparse=self.sparse)
        single_counts = [len(plan.rows) for plan in plans]
        bag_counts = [len(plan.bags.lengths) for plan in plans]
        if not sum(bag_counts):
            return list(singles.split(single_counts))
        ids = torch.cat([plan.bags.ids for plan in plans]).to(device)
        lengths = torch.cat([plan.bags.lengths for plan in plans]).to(device)
        if bool((lengths == 1).all()):
            bags = functional.embedding(ids, weight, sparse=self.sparse)
        else:
            bags = _pool(ids, lengths, weight, self.pooling, sparse=self.sparse)
        if not sum(single_counts):
            return list(bags.split(bag_counts))
        return [
            torch.cat(pair) for pair in zip(singles.split(single_counts), bags.split(bag_counts), strict=True)
        ]

    def _assemble(self, received: Tensor, request: _Request) -> Tensor:
        """[B, F, dim] from the rows that arrived."""
        if not request.pooled:
            positions = [p for p in request.positions if p is not None]
            if not positions:
                return received.new_zeros(request.samples, 0, self.dim)
            return functional.embedding(torch.stack(positions, dim=1), received)
        vectors = []
        for table, where in enumerate(request.positions):
            if where is not None:
                vectors.append(functional.embedding(where, received))
            else:
                ids, lengths = request.pooled[table]
                vectors.append(_pool(ids, lengths, received, self.pooling))
        return torch.stack(vectors, dim=1)

    # -- state of the whole ---

    def gather_tables(self) -> dict[str, Any] | None:
        """All tables on rank 0 (None elsewhere), for export and for another number of ranks. A collective.

        Returns:
            ``tables``: fp [rows, dim] per table; ``tau`` and ``bound_class`` per table where they exist;
            ``steps``.
        """
        channel = self.channel
        own = {
            "tables": [t.cpu().clone() for t in self.shard.tables()],
            "tau": channel.tau.cpu().clone(),
            "bound_class": channel.bound_class.cpu().clone(),
            "steps": int(channel.steps),
        }
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, own, group=self.group)
        if self.rank:
            return None
        whole: dict[str, Any] = {"steps": own["steps"], "tables": [None] * len(self.cardinalities)}
        per_table = self.config.granularity == "table"
        whole["bound_class"] = torch.ones(len(self.cardinalities), dtype=torch.int64)
        whole["tau"] = torch.zeros(len(self.cardinalities))
        for tables, part in zip(self.placement, everyones, strict=True):
            for at, table in enumerate(tables):
                whole["tables"][table] = part["tables"][at]
                whole["bound_class"][table] = part["bound_class"][at]
                if per_table:
                    whole["tau"][table] = part["tau"][at]
                elif part["tau"].numel():
                    whole["tau"][table] = part["tau"][0]
        return whole


def load_tables(module: ShardedTables, whole: Mapping[str, Any]) -> None:
    """Take this rank's part of :meth:`ShardedTables.gather_tables`, whatever the number of ranks was.

    Raises:
        ValueError: another number of tables, or a table of another shape.
    """
    tables = whole["tables"]
    shapes = [tuple(t.shape) for t in tables]
    expected = [(rows, module.dim) for rows in module.cardinalities]
    if shapes != expected:
        raise ValueError(f"{module.name}: the saved tables have shapes {shapes}, expected {expected}")
    own = module.placement[module.rank]
    channel = module.channel
    with torch.no_grad():
        for view, table in zip(module.shard.tables(), own, strict=True):
            view.copy_(tables[table])
        channel.steps.fill_(whole["steps"])
        if own:
            channel.bound_class.copy_(whole["bound_class"][own])
            tau = whole["tau"][own]
            if channel.tau.numel():
                channel.tau.copy_(tau if channel.tau.numel() == len(own) else tau[:1])


# -- requests ---


@dataclass(frozen=True)
class _Bag:
    ids: Tensor
    lengths: Tensor
    one_hot: bool


class _Request(NamedTuple):
    samples: int
    messages: list[Tensor]
    rows: list[list[int]]  # per owner: rows of each segment of its answer
    positions: list[Tensor | None]  # per table: row of the answer for each sample
    pooled: dict[int, tuple[Tensor, Tensor]]  # per table: rows of the answer, and how many for each sample

    def ids_to_peers(self, rank: int, placement: Sequence[Sequence[int]]) -> int:
        """Ids that would be asked for one by one."""
        total = 0
        for owner, tables in enumerate(placement):
            if owner != rank:
                total += sum(self.pooled[t][0].numel() if t in self.pooled else self.samples for t in tables)
        return total


class _Answer(NamedTuple):
    samples: int
    segments: list[tuple[int, int]]  # own table, vectors
    rows: Tensor  # int64, rows of the shard's matrix
    bags: Bags  # rows of the shard's matrix


def _starts(sizes: Sequence[int]) -> list[int]:
    """First positions of consecutive parts, and the end."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


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


def _pool(ids: Tensor, lengths: Tensor, weight: Tensor, pooling: Pooling, *, sparse: bool = False) -> Tensor:
    offsets = torch.cumsum(lengths, 0) - lengths
    return functional.embedding_bag(ids, weight, offsets, mode=pooling, sparse=sparse)


def _write_request(
    samples: int,
    as_rows: Sequence[bool],
    distinct: Sequence[Tensor],
    bags: Sequence[_Bag],
    first: Sequence[int],
) -> Tensor:
    """uint8 request to one owner, on the CPU: distinct rows as positions, bags as they are."""
    kernels = get_backend("cpu")
    positions = torch.cat(list(distinct)).cpu() if distinct else torch.empty(0, dtype=torch.int64)
    encoding, param, index = kernels.encode_indices(positions, first[-1])
    one_hot = all(bag.one_hot for bag in bags)
    ids = (
        torch.cat([bag.ids for bag in bags]).to("cpu", torch.int32)
        if bags
        else torch.empty(0, dtype=torch.int32)
    )
    parts = [bytes(as_rows), bytes([encoding, param]), index.numpy().tobytes(), ids.numpy().tobytes()]
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
    return torch.frombuffer(bytearray(_REQUEST.pack(*fields, check) + body), dtype=torch.uint8)


def _read_request(message: Tensor, first_rows: Sequence[int]) -> _Answer:
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
    rows = get_backend("cpu").decode_indices(
        encoding, param, _bytes_tensor(reader.take(index_size)), nnz, first_rows[-1]
    )
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
    edges = torch.searchsorted(rows, torch.tensor(first_rows)).tolist()
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
    return _Answer(samples, segments, rows, Bags(ids, lengths))


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


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
