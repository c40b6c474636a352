"""Launches of step-ahead's kernels (:mod:`.step_ahead_kernels`): three or four for any number of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from ..displacement import TINY, Displacement, Squares
from ..job import GRAD_CODES
from . import step_ahead_kernels as device
from .batch import CHUNK, ROW, _float_bits, grouped, launched_on, programs, readable, table_of, upload
from .launch import launch

_ROWS_EACH, _COLUMNS_EACH, _SUMS = device.ROWS_EACH.value, device.COLUMNS_EACH.value, device.SUMS.value


def add_squares(jobs: Iterable[Squares]) -> None:
    """See :meth:`.backend.Backend.add_squares`."""
    filled = [job for job in jobs if job.gradient.numel()]
    for dtype, group in grouped(filled, lambda job: job.gradient.dtype).items():
        where, rows = group[0].gradient.device, []
        tiles = sums = room = 0
        for job in group:
            numel, is_vector = job.gradient.numel(), job.columns.numel() == 1
            width = _COLUMNS_EACH if is_vector else job.columns.numel()
            first_row = before = 0
            if job.entries is not None and not is_vector:
                # It is read from the start of its first row on, with zeros before the part.
                first_row, before = divmod(job.first, width)
            end = before + numel
            height = programs(end, width)
            if job.entries is None:
                of = numel if is_vector else height
            else:
                of = job.entries if is_vector else job.rows.numel()
            across, down = programs(width, _COLUMNS_EACH), programs(height, _ROWS_EACH)
            columns_at = 0 if is_vector else job.columns.data_ptr()
            entries_at = readable(job.gradient).data_ptr() - before * job.gradient.itemsize
            addresses = entries_at, job.rows.data_ptr() + 4 * first_row, columns_at
            rows.append([*addresses, height, width, end, across, down, tiles, sums, room, before, of])
            tiles += across * down
            sums += 1 if is_vector else programs(width, _SUMS) + programs(height, _SUMS)
            room += down * width + (0 if is_vector else across * height)
        rows.append([*[0] * device.TILES.value, tiles, sums, room])
        table = upload(table_of([row + [0] * (ROW - len(row)) for row in rows], ROW), where)
        partial = torch.empty(room, dtype=torch.float32, device=where)
        with launched_on(where):
            code = GRAD_CODES[dtype]
            launch(device.partial_sums, tiles, table, partial, len(group), GRAD=code)
            launch(device.add_partial_sums, sums, table, partial, len(group))


def takes(job: Displacement) -> bool:
    """Return whether the kernels can displace a weight."""
    complete = job.residual is not None and job.moment is not None and job.pending is None
    return complete and job.weight.dtype in GRAD_CODES


def displace(jobs: Iterable[Displacement]) -> None:
    """See :meth:`.backend.Backend.displace`."""
    filled = [job for job in jobs if job.weight.numel()]
    for dtype, group in grouped(filled, lambda job: job.weight.dtype).items():
        where = group[0].weight.device
        firsts = itertools.accumulate((programs(job.weight.numel(), CHUNK) for job in group), initial=0)
        *begins, chunks = firsts
        rows = [_row(job, first) for job, first in zip(group, begins, strict=True)]
        last = [0] * ROW
        last[device.CHUNKS.value] = chunks
        table = upload(table_of([*rows, last], ROW), where)
        means = torch.empty(len(group), dtype=torch.float32, device=where)
        with launched_on(where):
            launch(device.mean_rows, len(group), table, means)
            launch(device.displace, chunks, table, means, len(group), WEIGHT=GRAD_CODES[dtype])


def _row(job: Displacement, first_chunk: int) -> list[int]:
    assert job.residual is not None
    assert job.moment is not None
    rows, columns, observed, first, ratio, eps = job.moment
    columns_at = 0 if columns.numel() == 1 else columns.data_ptr()
    addresses = readable(job.weight).data_ptr(), rows.data_ptr(), columns_at
    sizes = rows.numel(), columns.numel(), job.weight.numel(), first_chunk, first
    numbers = map(_float_bits, (observed, ratio, max(eps, TINY), job.limit, job.scale))
    return [*addresses, *sizes, *numbers, job.residual.data_ptr(), readable(job.out).data_ptr(), 0]
