"""Requests for rows whose ids are on the tables' device: found, written and read there, with one wait.

The bytes are those that the host writes, so every rank may have its ids where it wants. A rank whose ids are
out of range says so in its messages, which leave before the host knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..codecs.slots import FAILED
from ..codecs.stats import read_figures
from ..kernels.embedding_format import IntArray, OutOfRange, RequestKernels
from ..transport.fixed_size import FixedSizeExchange, MessageSize
from .device_slots import arrived_messages, fill_slots
from .request_message import MOST_BYTES, RowRequest
from .requests import BatchLookup, RequestBuilder

#: The size of a request, as far as it is known beforehand.
REQUEST = MessageSize(1, 0, MOST_BYTES)


class DeviceRequests:
    """The exchange of requests from and to a device, between at least two ranks.

    Args:
        builder: That of the tables.
        kernels: Write and read requests on the device.
        device: Device of the tables and the ids.
    """

    def __init__(self, builder: RequestBuilder, kernels: RequestKernels, device: torch.device) -> None:
        self._builder, self._kernels = builder, kernels
        self._rank, self._placement = builder.rank, builder.placement
        self._peers = [r for r in range(len(builder.placement)) if r != builder.rank]
        ends = itertools.accumulate((len(tables) for tables in builder.placement), initial=0)
        self._bounds = list(ends)
        self._owners = to_device(torch.tensor(self._bounds), device)
        self._first_rows = builder.first_rows[self._rank]
        self._distinct = DistinctRows(builder.order, builder.limits, builder.base, device)

    def exchange(
        self,
        ids: Tensor,
        slots: FixedSizeExchange,
        read_on_host: Callable[[Tensor, int], RowRequest],
        lap: Callable[[], None],
    ) -> tuple[BatchLookup, list[RowRequest]]:
        """Send this rank's requests; return them, and the requests of every rank to this one.

        Args:
            ids: int [B, F] on the device, at least one.
            slots: The fixed-size exchange of requests; sizes of earlier ones are known.
            read_on_host: Reads a message of a rank that the device does not read; raises ``PayloadError``.
            lap: Called when distinct rows are found, when requests are written, sent, and read.

        Raises:
            IndexError: An id is outside its table. The other ranks are told.
            ValueError: The ids have another shape.
            PayloadError: A request is damaged, or about other tables.
            DesyncError: A rank failed, or is at another exchange.
        """
        sizes = [REQUEST] * len(self._placement)
        transfer = slots.slots(sizes, sizes, ids.device)
        with slots.telling(transfer):
            ids = self._builder.checked(ids).to(torch.int64).contiguous()
            found = self._distinct.find(ids)
            lap()
            before = torch.cat([found.counts.new_zeros(1), found.counts.cumsum(0)])
            written = self._kernels.write(found.rows, before.index_select(0, self._owners), len(ids))
            nbytes = torch.where(found.outside[0] < ids.numel(), FAILED, written.nbytes)
            fill_slots(transfer, slots.fingerprint, {r: r for r in self._peers}, written, nbytes)
        lap()
        slots.send(transfer)
        lap()
        arrived = arrived_messages(transfer, self._peers)
        opened = self._kernels.open(
            transfer.arriving, arrived.begins, arrived.nbytes, arrived.most, self._first_rows
        )
        also = arrived.words, written.nbytes, found.counts, found.outside, opened.figures
        words, sent, counts, outside, figures = read_figures((), [each.contiguous() for each in also])
        try:
            self._distinct.check(ids, outside)
        except OutOfRange as error:
            raise self._builder.out_of_range(error.column, error.found) from None
        messages = {r: written.head(r, sent[r]) for r in self._peers}
        late, received = slots.finish(transfer, messages, words, self._peers)
        requests, width = [], len(self._first_rows) + 2
        for at, source in enumerate(self._peers):
            samples, for_the_host, several, *each = figures[width * at : width * (at + 1)]
            if source in late or for_the_host:
                message = late[source] if source in late else transfer.message_from(source, received[source])
                requests.append(read_on_host(to_host(message), source))
            else:
                requests.append(RowRequest(samples, [True] * len(each), each, opened.rows[at, :several]))
        lookup = BatchLookup(self._own_requests(len(ids), counts, found.rows), found.positions, {})
        requests.insert(self._rank, lookup.requests[self._rank])
        lap()
        return lookup, requests

    def _own_requests(self, samples: int, counts: Sequence[int], rows: Tensor) -> list[RowRequest]:
        """Return the requests of this rank, per owner, from the distinct rows of each table."""
        requests = []
        for begin, end in itertools.pairwise(self._bounds):
            each = list(counts[begin:end])
            requests.append(RowRequest(samples, [True] * len(each), each, rows[: sum(each)]))
            rows = rows[sum(each) :]
        return requests


class DistinctIds(NamedTuple):
    """The distinct rows of a batch of ids, on the device.

    Attributes:
        rows: int64 [ids]. The first of them are the distinct rows, table by table and ascending.
        counts: int64 [tables], distinct rows of each table.
        outside: int64 [2]: the first id that is outside its table, counted through the tables, and its value;
            the number of ids if there is none.
        positions: int64 [samples, tables], index of each sample's row in ``rows``.
    """

    rows: Tensor
    counts: Tensor
    outside: Tensor
    positions: Tensor


class DistinctRows:
    """:meth:`~dct_plugin.kernels.embedding_format.EmbeddingKernels.distinct_rows` for ids on a device.

    Args:
        order: Tables in the order in which their rows are named.
        limits: Rows of each table.
        base: Number of each table's first row at its owner.
        device: Of the ids.
    """

    def __init__(self, order: IntArray, limits: IntArray, base: IntArray, device: torch.device) -> None:
        self._order = order
        # Rows of all tables are numbered, one table behind the other.
        first = np.concatenate([[0], np.cumsum(limits[order])[:-1]])
        layout = torch.from_numpy(np.stack([order, limits[order], base[order], first]))
        self._columns, self._limits, self._base, self._first = to_device(layout, device)

    def check(self, ids: Tensor, outside: Sequence[int]) -> None:
        """Raise :class:`OutOfRange` if an id was found outside its table."""
        at, value = outside
        if at < ids.numel():
            raise OutOfRange(int(self._order[at // len(ids)]), value)

    def find(self, ids: Tensor) -> DistinctIds:
        """Find the distinct rows of ``ids``, int64 [samples, tables], without waiting for the device."""
        samples, tables = ids.shape
        columns = ids.t().index_select(0, self._columns)
        flat, limits = columns.reshape(-1), self._limits.unsqueeze(1)
        outside = ((columns < 0) | (columns >= limits)).view(-1)
        number = torch.arange(len(flat), device=ids.device)
        wrong = torch.where(outside, number, len(flat)).amin()
        # Every size is known beforehand: as many rows as ids, of which the first are the distinct ones.
        named, where = (columns + self._first.unsqueeze(1)).view(-1).sort()
        new = torch.ones_like(named)
        new[1:] = (named[1:] != named[:-1]).to(torch.int64)
        rank, table = new.cumsum(0) - 1, where // samples
        rows = torch.zeros_like(named).scatter_(0, rank, named + (self._base - self._first)[table])
        counts = torch.zeros_like(self._first).scatter_add_(0, table, new)
        of_columns = torch.empty_like(named).scatter_(0, where, rank).view(tables, samples)
        positions = torch.empty_like(of_columns).index_copy_(0, self._columns, of_columns).t().contiguous()
        found = flat.gather(0, wrong.clamp(max=len(flat) - 1).view(1))
        return DistinctIds(rows, counts, torch.cat([wrong.view(1), found]), positions)
