"""Which rows a rank's ids name, found where the ids are: at most one wait, and no copy of the ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..kernels.embedding_format import IntArray, OutOfRange

__all__ = ["DistinctRows", "Found"]


class Found(NamedTuple):
    """What :meth:`DistinctRows.find` leaves on the device.

    Attributes:
        rows: int64 [ids], of which the first are the distinct rows, table by table and ascending.
        counts: int64 [tables], how many of each table.
        outside: int64 [2]: the first id that is outside its table, counted through the tables, and what it
            is; as many as there are ids: none is.
        positions: int64 [samples, tables], which of the rows every sample has.
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

    def __call__(self, ids: Tensor) -> tuple[Tensor, IntArray, Tensor]:
        """The distinct rows of ``ids``, int64 [samples, tables] with at least one entry.

        Returns:
            Rows at their owners, table by table and ascending, int64 on the host; how many of each table,
            int64 [tables]; and on the device, which of them every sample has, int64 [samples, tables].

        Raises:
            OutOfRange: A table has no such row.
        """
        found = self.find(ids)
        told = to_host(torch.cat([found.rows, found.counts, found.outside]))
        self.check(ids, told[-2:].tolist())
        each = told[ids.numel() : -2]
        return told[: int(each.sum())].clone(), each.numpy().copy(), found.positions

    def check(self, ids: Tensor, outside: Sequence[int]) -> None:
        """Raise :class:`OutOfRange` if an id was found outside its table."""
        at, value = outside
        if at < ids.numel():
            raise OutOfRange(int(self._order[at // len(ids)]), value)

    def find(self, ids: Tensor) -> Found:
        """The same, without a look at it."""
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
        return Found(rows, counts, torch.cat([wrong.view(1), found]), positions)
