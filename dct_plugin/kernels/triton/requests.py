"""Requests for embedding rows on CUDA (device code: :mod:`.request_kernels`).

The bytes are those that the host writes with the index encodings that kernels write.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...codecs.index import IndexEncoding, index_bound
from ..embedding_format import OpenedRequests, RequestKernels, WrittenRequests

try:
    from . import message_kernels as reading
    from . import request_kernels as device
    from . import selection_kernels as payloads
    from .batch import BLOCK, CHUNK, STATE, launched_on, programs, upload
    from .embedding import advances, check
except ImportError as error:  # no such package, or not for this platform
    raise OSError(f"triton cannot be imported: {error}") from error

_ROW = payloads.ROW.value
_HEADER, _CHECK = device.HEADER.value, device.CHECK.value
#: Header and positions' encoding; what begins a payload, which ``_write_index`` counts from.
_FIXED, _PAYLOAD = _HEADER + 2, payloads.HEADER.value
#: Where not all rows are named; for these nothing is written.
_WRITTEN = (IndexEncoding.BITMAP, IndexEncoding.GAPS8, IndexEncoding.BLOCK16)
#: Places in a job's row where its units of work begin.
_UNITS = device.BLOCKS.value, device.CHUNKS.value, device.ENTRY_CHUNKS.value
#: A bitmap is the smallest only where more than an eighth of the rows are named, less a byte in 255.
_NAMED_FOR_BITMAP = 9


class TritonRequestKernels(RequestKernels):
    """Requests on CUDA; see :class:`~dct_plugin.kernels.embedding_format.RequestKernels`.

    Args:
        tables: Number of tables of each rank.
        limits: Rows of each rank's tables.
        rank: This rank, of which nothing is asked.
        where: The device.
    """

    def __init__(self, tables: Sequence[int], limits: Sequence[int], rank: int, where: torch.device) -> None:
        self._limits = [0 if owner == rank else limit for owner, limit in enumerate(limits)]
        self._counts = list(tables)
        self._tables = upload(self._counts, where)
        self._where = where

    def write(self, rows: Tensor, starts: Tensor, samples: int) -> WrittenRequests:
        where, owners = self._where, len(self._limits)
        table, begins, bits = self._laid_out(samples)
        blocks, chunks, entries = (table[-1][place] for place in _UNITS)
        buffer = torch.zeros(begins[-1], dtype=torch.uint8, device=where)
        for row in table[:-1]:
            row[device.OUT_AT.value] += buffer.data_ptr()
        known = upload(table, where)
        known[:-1, device.ROOM.value] = starts[:-1]
        parts = upload([[0, 0, 0, begin, 0] for begin in begins[:-1]], where)
        asked = upload([int(limit > 0) for limit in self._limits], where)
        state = torch.zeros(owners, STATE, dtype=torch.int64, device=where)
        state[:, device.NNZ.value] = (starts[1:] - starts[:-1]) * asked
        words = torch.zeros(max(bits, 1), dtype=torch.int32, device=where)
        kept_counts = torch.zeros(blocks, dtype=torch.int32, device=where)
        positions = torch.empty(max(len(rows), 1), dtype=torch.int32, device=where)
        sums = torch.empty(entries, dtype=torch.int64, device=where)
        sizes = torch.zeros(owners, 4, dtype=torch.int64, device=where)
        checks = torch.zeros(owners, dtype=torch.int32, device=where)
        with launched_on(where):
            device.mark_rows[(programs(len(rows), CHUNK),)](
                rows, starts, known, words, positions, kept_counts, owners
            )
            payloads.skips[(entries,)](known, positions, state, sums, owners)
            payloads.plan[(owners,)](known, state, sums, FORCED=-1, SKIPS=True)
            device.write_rows[(chunks,)](known, words, positions, kept_counts, state, sums, owners)
            device.head_request[(owners,)](parts, self._tables, state, sizes, buffer, samples)
            longest = max(end - begin for begin, end in itertools.pairwise(begins))
            self._check(buffer, parts, sizes, checks, longest)
            _, powers = advances(where)
            device.seal_request[(owners,)](parts, sizes, checks, powers, buffer.view(torch.int32))
        return WrittenRequests(buffer, begins, sizes[:, 0])

    def _laid_out(self, samples: int) -> tuple[list[list[int]], list[int], int]:
        """Return the table of jobs, one for each owner, and the totals; the first bytes of the requests; the
        words of all bitmaps.
        """
        table, begins, bits, units = [], [0], 0, [0, 0, 0]
        for limit, several in zip(self._limits, self._counts, strict=True):
            most = min(samples * several, limit)
            marked = -(-limit // 32) if 0 < limit <= _NAMED_FOR_BITMAP * most else 0
            row = [0] * _ROW
            row[device.NUMEL.value], row[device.WORDS_AT.value] = limit, bits if marked else -1
            row[device.OUT_AT.value] = begins[-1] + _FIXED + several - _PAYLOAD
            for place, first in zip(_UNITS, units, strict=True):
                row[place] = first
            table.append(row)
            blocks = programs(limit, BLOCK)
            each = blocks, programs(max(most, blocks, marked), CHUNK), programs(most, CHUNK)
            units = [first + more for first, more in zip(units, each, strict=True)]
            bits += marked
            room = _FIXED + several + min(index_bound(limit, most, encoding) for encoding in _WRITTEN)
            begins.append(begins[-1] + room // 8 * 8 + 16)
        last = [0] * _ROW
        for place, total in zip(_UNITS, units, strict=True):
            last[place] = total
        return [*table, last], begins, bits

    def open(
        self, buffer: Tensor, starts: Sequence[int], nbytes: Tensor, most: int, first_rows: Sequence[int]
    ) -> OpenedRequests:
        where, several, limit = self._where, len(starts), first_rows[-1]
        room = max(min(8 * most, limit), 1)  # a bitmap has a bit for each
        parts = upload([[0, 0, 0, start, 0] for start in starts], where)
        sizes = torch.zeros(several, 4, dtype=torch.int64, device=where)
        sizes[:, 0] = nbytes
        checks = torch.zeros(several, dtype=torch.int32, device=where)
        rows = torch.zeros(several, 2, _ROW, dtype=torch.int64, device=where)
        meta = upload([[limit, 0, 0]], where)
        units = programs(limit, BLOCK) + programs(most, CHUNK)
        counts = torch.zeros(several, 2, units, dtype=torch.int64, device=where)
        positions = torch.empty(several, room, dtype=torch.int32, device=where)
        with launched_on(where):
            self._check(buffer, parts, sizes, checks, most)
            _, powers = advances(where)
            device.open_requests[(several,)](
                *(parts, sizes, checks, powers, buffer, buffer.view(torch.int32), rows),
                *(len(first_rows) - 1, limit, room),
            )
            reading.scan[(units, several)](buffer, rows, meta, counts, 1, units)
            reading.place[(units, several)](buffer, rows, meta, counts, positions, 1, units, room)
        here = rows[:, 0]
        lanes = torch.arange(room, device=where)
        dense = here[:, reading.KIND.value : reading.KIND.value + 1] == int(IndexEncoding.DENSE)
        named = torch.where(dense, lanes, positions.to(torch.int64) & 0xFFFFFFFF)
        named = torch.where(lanes < sizes[:, device.ROWS.value :], named, limit)
        edges = upload([list(first_rows)], where).expand(several, -1).contiguous()
        each = torch.searchsorted(named, edges).diff(dim=1)
        wrong = (here[:, reading.WRONG.value] != 0) | (sizes[:, device.STATUS.value] != 0)
        columns = sizes[:, device.SAMPLES.value], wrong.to(torch.int64), sizes[:, device.ROWS.value]
        return OpenedRequests(named, torch.cat([torch.stack(columns, dim=1), each], dim=1))

    def _check(self, buffer: Tensor, parts: Tensor, sizes: Tensor, checks: Tensor, most: int) -> None:
        chunks = programs(most, 4 * CHUNK) + 1
        check(buffer.view(torch.int32), parts, sizes, checks, chunks, at=_CHECK, counted=True)
