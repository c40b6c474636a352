"""Requests for rows: which rows of every owner's tables the samples of this rank need, and their exchange.

With de-duplication a request names each distinct row of a table once, in ascending order. The rows come back
in the same order, so forward and backward messages need no index. Pooled (multi-hot) vectors are taken apart
into their rows if these are fewer and nothing lossy applies; otherwise each distinct bag crosses once.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..compression.stream import backend_beside
from ..config import EmbeddingChannelConfig, KernelConfig
from ..errors import blamed
from ..kernels.embedding import OutOfRange, distinct_rows
from ..metrics import Record
from ..transport.exchange import Exchange
from .request_message import (
    MOST_BYTES,
    NO_BAGS,
    NO_BYTES,
    NO_IDS,
    Bags,
    RowRequest,
    answer_order,
    read_request,
    write_request,
)

_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


class BatchLookup(NamedTuple):
    """The requests of a batch, and how its vectors are put together from the answers.

    Attributes:
        requests: One per owner, this rank included.
        positions: int64 [samples, tables], the row of every sample and table among those of the answers and,
            behind them, the vectors that are pooled here.
        pooled: Per table that is pooled here: rows of the answers, and how many for each sample.
    """

    requests: list[RowRequest]
    positions: Tensor
    pooled: dict[int, tuple[Tensor, Tensor]]

    def to(self, device: torch.device) -> BatchLookup:
        """Copy positions and pooled rows to ``device``."""
        pooled = {t: (to_device(a, device), to_device(b, device)) for t, (a, b) in self.pooled.items()}
        return BatchLookup(self.requests, to_device(self.positions, device), pooled)


class RequestExchange:
    """Builds the requests of one set of sharded tables for a batch, sends them, and receives those of all
    ranks. Distinct rows are found where the ids are; requests are written and read on the host.

    Args:
        cardinalities: Rows of each table.
        placement: Tables of each rank.
        rank: This rank.
        config: ``dct.embedding``.
        name: Name in errors, part of the fingerprint by which ranks out of step are found.
        kernels: ``dct.kernels``; the defaults when None.

    Attributes:
        first_rows: Per rank: the first row of each of its tables in its shard, then the number of rows.
        order: int64 [tables], the tables rank by rank.
        limits: int64 [tables], rows of each table.
        base: int64 [tables], first row of each table in its owner's shard.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        placement: Sequence[Sequence[int]],
        *,
        rank: int,
        config: EmbeddingChannelConfig,
        name: str,
        kernels: KernelConfig | None = None,
    ) -> None:
        self.placement = placement
        self.rank = rank
        self.name = name
        self._kernels = backend_beside(kernels, torch.device("cpu"))
        self.deduplicates = config.enabled and config.deduplicate
        # A bound on rows is none on their sum, and a threshold is meant for what the model sees.
        self._keeps_bags = config.sparsity > 0 or config.error_bound is not None
        self.first_rows = [
            list(itertools.accumulate((cardinalities[t] for t in tables), initial=0)) for tables in placement
        ]
        self.limits = np.array(cardinalities, dtype=np.int64)
        self.order = np.array([t for tables in placement for t in tables], dtype=np.int64)
        self.base = np.zeros(len(cardinalities), dtype=np.int64)
        for tables, first_rows in zip(placement, self.first_rows, strict=True):
            self.base[tables] = first_rows[:-1]

    def build(self, categorical: Tensor | Sequence[Bags]) -> BatchLookup:
        """Build the requests of this rank's samples.

        Args:
            categorical: int [B, F]; or int [B, F, L]; or one :class:`Bags` per table.

        Raises:
            IndexError: An id is outside its table.
            TypeError: The ids are no integers.
            ValueError: The ids have another shape.
        """
        given = [categorical] if isinstance(categorical, Tensor) else itertools.chain(*categorical)
        if wrong := {each.dtype for each in given} - _INTEGERS:
            raise TypeError(f"{self.name}: rank {self.rank}: ids are {wrong.pop()}; they must be integers")
        if self.deduplicates and isinstance(categorical, Tensor) and categorical.dim() == 2:
            if categorical.shape[1] != len(self.limits):
                raise ValueError(_shape_error(categorical, len(self.limits)))
            return self._distinct_rows(categorical.to(torch.int64).contiguous())
        return self._bags(_as_bags(categorical, len(self.limits)))

    def ids_to_peers(self, lookup: BatchLookup) -> int:
        """Count the ids that would cross if every sample asked for its own rows."""
        samples = lookup.requests[self.rank].samples
        tables = [t for owner, each in enumerate(self.placement) if owner != self.rank for t in each]
        return sum(lookup.pooled[t][0].numel() if t in lookup.pooled else samples for t in tables)

    def _out_of_range(self, table: int, found: int) -> IndexError:
        """Return the error for an id that its table does not have."""
        return IndexError(
            f"{self.name}: rank {self.rank}: id {found} is outside table {table}, "
            f"which has {self.limits[table]} rows"
        )

    # -- one row per sample ---

    def _distinct_rows(self, ids: Tensor) -> BatchLookup:
        """Ask for each distinct row of ``ids``, int64 [B, F], once."""
        try:
            rows, counts, positions = distinct_rows(ids, self.order, self.limits, self.base)
        except OutOfRange as error:
            raise self._out_of_range(error.column, error.found) from None
        requests = []
        of_tables = iter(counts.tolist())
        for tables in self.placement:
            each = list(itertools.islice(of_tables, len(tables)))
            requests.append(RowRequest(len(ids), [True] * len(tables), each, rows[: sum(each)]))
            rows = rows[sum(each) :]
        return BatchLookup(requests, positions, {})

    def _bags(self, bags: Sequence[Bags]) -> BatchLookup:
        """Ask for the rows, or for the distinct bags, of each table; ``bags`` are int64 on the host."""
        for table, bag in enumerate(bags):
            if bag.ids.numel():
                low, high = torch.stack(torch.aminmax(bag.ids)).tolist()
                if low < 0 or high >= self.limits[table]:
                    raise self._out_of_range(table, low if low < 0 else high)
        samples = len(bags[0].lengths) if bags else 0
        positions = torch.empty(samples, len(bags), dtype=torch.int64, device="cpu")
        pooled: dict[int, tuple[Tensor, Tensor]] = {}
        requests = []
        first = 0
        for tables, first_rows in zip(self.placement, self.first_rows, strict=True):
            as_rows = [self._takes_rows(bags[t]) for t in tables]
            rows, kept = [NO_IDS], [NO_BAGS]
            counts: list[int] = []
            for at in answer_order(as_rows):
                table, takes_rows = tables[at], as_rows[at]
                bag = bags[table]
                if takes_rows:
                    ids, where = torch.unique(bag.ids, return_inverse=True)
                    rows.append(ids + int(self.base[table]))
                    counts.append(len(ids))
                else:
                    where = torch.arange(len(bag.lengths), device="cpu")
                    if self.deduplicates:
                        bag, where = _distinct_bags(bag)
                    kept.append(bag)
                    counts.append(len(bag.lengths))
                where = where + (first + sum(counts[:-1]))
                if takes_rows and not bag.one_hot:
                    pooled[table] = where, bag.lengths
                else:
                    positions[:, table] = where
            first += sum(counts)
            ids, lengths = (torch.cat(each) for each in zip(*kept, strict=True))
            request = RowRequest(samples, as_rows, counts, torch.cat(rows), Bags(ids, lengths))
            requests.append(request.with_ids(ids, first_rows))
        for number, table in enumerate(pooled):
            positions[:, table] = torch.arange(samples, device="cpu") + (first + number * samples)
        return BatchLookup(requests, positions, pooled)

    def _takes_rows(self, bag: Bags) -> bool:
        """Return True if a table's rows cross one by one (de-duplicated), rather than pooled."""
        if not self.deduplicates or bag.one_hot:
            return self.deduplicates
        return not self._keeps_bags and len(torch.unique(bag.ids)) <= len(bag.lengths)

    def exchange(
        self, categorical: Tensor | Sequence[Bags], transport: Exchange, record: Record
    ) -> tuple[BatchLookup, list[RowRequest]]:
        """Send the requests for ``categorical``; return them, and the requests of every rank to this one.

        Args:
            categorical: See :meth:`.tables.ShardedTables.forward`.
            record: Gets bytes and times of four phases: distinct rows found, requests written, sent, read.

        Raises:
            IndexError: An id is outside its table. The other ranks are told.
            TypeError: The ids are no integers.
            ValueError: The ids have another shape.
            PayloadError: A request is damaged, or about other tables.
            DesyncError: A rank failed, or is at another exchange.
        """
        device = transport.device
        with transport.preparing():  # peers learn of an error in the exchange they are waiting in
            with record.timed("select"):
                lookup = self.build(categorical)
            with record.timed("encode"):
                by_owner = enumerate(zip(lookup.requests, self.first_rows, strict=True))
                messages = [
                    NO_BYTES if owner == self.rank else write_request(*each, self._kernels)
                    for owner, each in by_owner
                ]
                lookup = lookup.to(device)
        # A rank that evaluates alone must not be answered by a training step.
        operation = f"{self.name}/ids/{torch.is_grad_enabled()}"
        fingerprint, bounds = zlib.crc32(operation.encode()), [MOST_BYTES] * transport.world_size
        with record.timed("exchange"), transport.recorded(record):
            on_device = [to_device(message, device) for message in messages]
            received = transport.all_to_all(on_device, fingerprint, bounds=bounds)
        with record.timed("decode"):
            requests = [
                lookup.requests[source] if source == self.rank else self.read(message, source)
                for source, message in enumerate(received)
            ]
        return lookup, requests

    def read(self, message: Tensor, source: int) -> RowRequest:
        """Read what rank ``source`` of the group asks of this one.

        Raises:
            PayloadError: The request is damaged, or about other tables; names the ranks.
        """
        with blamed(f"{self.name}: rank {self.rank}: request from rank {source} of the group"):
            return read_request(message, self.first_rows[self.rank], self._kernels)


def _shape_error(ids: Tensor, tables: int) -> str:
    return f"expected ids [B, {tables}] or [B, {tables}, L], got shape {tuple(ids.shape)}"


def _as_bags(categorical: Tensor | Sequence[Bags], tables: int) -> list[Bags]:
    """Return one :class:`Bags` of int64 per table, on the host."""
    if isinstance(categorical, Tensor):
        if categorical.dim() == 2:
            categorical = categorical.unsqueeze(2)
        if categorical.dim() != 3 or categorical.shape[1] != tables:
            raise ValueError(_shape_error(categorical, tables))
        samples, _, length = categorical.shape
        lengths = torch.full((samples,), length, dtype=torch.int64, device="cpu")
        columns = to_host(categorical.to(torch.int64)).transpose(0, 1).reshape(tables, -1)
        return [Bags(column, lengths) for column in columns]
    if len(categorical) != tables:
        raise ValueError(f"expected bags for {tables} tables, got {len(categorical)}")
    flat = [part.reshape(-1) for bag in categorical for part in bag]
    if {part.device.type for part in flat} <= {"cpu"}:
        parts = [part.to(torch.int64) for part in flat]
    else:  # one copy for all tables
        device = next(part.device for part in flat if part.device.type != "cpu")
        joined = torch.cat([part.to(device, torch.int64) for part in flat])
        parts = list(to_host(joined).split([len(part) for part in flat]))
    bags = [Bags(ids, lengths) for ids, lengths in zip(parts[::2], parts[1::2], strict=True)]
    for table, (ids, lengths) in enumerate(bags):
        if int(lengths.sum()) != len(ids) or len(lengths) != len(bags[0].lengths):
            raise ValueError(f"table {table}: {len(ids)} ids do not fit the lengths of its bags")
    return bags


def _distinct_bags(bag: Bags) -> tuple[Bags, Tensor]:
    """Return each distinct sequence of ids once, and for every sample which one it has, int64 [B]."""
    count = len(bag.lengths)
    longest = int(bag.lengths.max()) if count else 0
    padded = bag.ids.new_full((count, longest + 1), -1)
    padded[:, 0] = bag.lengths
    filled = torch.arange(longest, device="cpu") < bag.lengths.unsqueeze(1)
    padded[:, 1:].masked_scatter_(filled, bag.ids)
    distinct, inverse = torch.unique(padded, dim=0, return_inverse=True)
    lengths = distinct[:, 0].contiguous()
    filled = torch.arange(longest, device="cpu") < lengths.unsqueeze(1)
    return Bags(distinct[:, 1:][filled], lengths), inverse
