"""Messages on a device: opening them, and adding their payloads to tensors (device code:
:mod:`.message_kernels`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...codecs.payload import Payload
from ..backend import scales_first
from ..job import OUT_CODES, Spans
from . import message_kernels as device
from .batch import BLOCK, CHUNK, Batch, _programs, counts_and_sums, launched_on, table_of, upload
from .launch import launch

_ROW, _FOUND, _WANTED, _WRONG = (
    each.value for each in (device.ROW, device.FOUND, device.WANTED, device.WRONG)
)
_RANGE = device.RANGE.value


class UnopenedMessages(NamedTuple):
    """Messages with payloads for tensors, as far as the host knows them."""

    buffer: Tensor
    """uint8, with the messages."""
    bounds: Sequence[tuple[int, int]]
    """First byte of each, and the one behind it."""
    spans: Spans
    """The parts that their payloads are for: one row counts for all messages, or each has one."""
    targets: np.ndarray
    """See :func:`_targets`."""
    slots: bool = False
    """The messages are in slots (:mod:`dct_plugin.codecs.slots`)."""
    spare: bool = False
    """Tensors stay as they are where a message is missing; else they become NaN."""
    bits: int = 1
    """See :meth:`.backend.Backend.prepare_sum`."""

    def table(self) -> np.ndarray:
        """Return what :meth:`open` needs on the device, int64."""
        targets = self.targets.ravel()
        table = np.empty(len(targets) + 3 * len(self.bounds), dtype=np.int64)
        messages, table[: len(targets)] = table[len(targets) :].reshape(-1, 3), targets
        messages[:, :2], messages[:, 2] = table_of(self.bounds, 2), _layout(self.spans).payloads
        return table

    def open(self, table: Tensor) -> OpenedMessages:
        """Check the messages, and find their positions; ``table`` is :meth:`table` on the current device."""
        buffer, bounds, spans, targets, slots, spare, bits = self
        where, count, several, layout = buffer.device, targets.shape[1], len(bounds), _layout(spans)
        longest = max([end - begin for begin, end in bounds])
        # An entry has a value, and a bit or more of position.
        room = min(8 * longest // (bits + 1), layout.entries)
        stride = targets[0].size if len(targets) > 1 else 0
        rows = torch.empty(several, count + 1, _ROW, dtype=torch.int64, device=where)
        heads = torch.empty(several, device.WORDS.value, dtype=torch.int64, device=where)
        absent = device.ADDED if spare else device.POISONED
        arguments = buffer, table, rows, heads, targets.size, count, stride, room
        constants = {"SLOTS": slots, "ABSENT": absent.value}
        launch(device.open_messages, several, *arguments, **constants, num_warps=1)  # a walk without barriers
        units = max(layout.blocks, 1)
        counts = torch.zeros(several, counts_and_sums(units, count), dtype=torch.int64, device=where)
        positions = torch.empty(several, room, dtype=torch.int32, device=where)
        sizes, checks = (count, stride, units, counts.shape[-1]), -(-longest // (4 * CHUNK)) + count
        launch(device.scan, (checks + units, several), buffer, rows, table, counts, *sizes, checks)
        launch(device.place, (units, several), buffer, rows, table, counts, positions, *sizes, room)
        return OpenedMessages(buffer, rows, positions, heads, layout.programs, table, stride)


class OpenedMessages(NamedTuple):
    """Messages whose payloads are found and checked; see :mod:`.message_kernels`."""

    buffer: Tensor
    rows: Tensor
    """int64 [messages, payloads + 1, ROW]."""
    positions: Tensor
    heads: Tensor
    """int64 [messages, WORDS]: the first words of slots (zeros without); the last one is 0."""
    sums: int
    """Programs that add one of the messages up."""
    targets: Tensor
    """See :func:`_targets`."""
    stride: int
    """Numbers from the targets of a message to those of the next; 0 if all have the same ones."""

    @classmethod
    def of(cls, payload: Payload, out: Tensor | None = None) -> OpenedMessages:
        """Open a single payload, whose header the host has."""
        spans, bounds = Spans.whole((payload.numel,)), [(0, payload.header.nbytes)]
        targets = _targets(spans, [payload.data if out is None else out], [-1])
        messages = UnopenedMessages(payload.data, bounds, spans, targets)
        return messages.open(upload(messages.table(), payload.data.device))

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """Return the positions of a single payload, int64 [nnz], and what is wrong with it, int64 [1].

        If something is, positions are any in the tensor.
        """
        row = self.rows[0, 0]
        damaged = (((row[_FOUND : _FOUND + 2] ^ row[_WANTED : _WANTED + 2]) & 0xFFFFFFFF) != 0).any()
        wrong = torch.where(damaged & (row[_WRONG] == 0), device.BAD_CHECKSUM.value, row[_WRONG])
        if payload.nnz == payload.numel:
            positions = torch.arange(payload.nnz, device=self.buffer.device)
        else:
            positions = self.positions[0, : payload.nnz].to(torch.int64) & 0xFFFFFFFF
        return positions.clamp_(max=max(payload.numel - 1, 0)), wrong.view(1)

    def add(self, scale: float, together: int = 1, apart: int = 0, wrong: Tensor | None = None) -> Tensor:
        """Add messages to their tensors, so many ``together`` to the same ones. Return :attr:`heads`, with
        what is wrong with each message as its last word.

        Args:
            apart: Entries whose sums are made in other memory, in fp32.
            wrong: int64 [1], takes the error of a single message in place of :attr:`heads`.
        """
        several, room = self.positions.shape
        grid = self.sums, several // together
        beside = torch.zeros(apart, dtype=torch.float32, device=self.buffer.device)
        read = self.buffer, self.rows, self.targets, self.positions, beside
        places = (self.heads, device.WORDS.value - 1, device.WORDS.value) if wrong is None else (wrong, 0, 0)
        numbers = float(scale), together, self.rows.shape[1] - 1, self.stride, room
        early = scales_first(together, scale)
        scaled = {"SCALED": scale != 1.0 and early, "SCALED_SUM": scale != 1.0 and not early}
        launch(device.add, grid, *read, *places, *numbers, **scaled)
        return self.heads


def prepared_sum(
    batch: Batch,
    buffer: Tensor,
    bounds: Sequence[tuple[int, int]],
    outs: Sequence[Tensor],
    scale: float,
    spans: Spans | None = None,
    **options: Any,
) -> Callable[[], Tensor]:
    """Do what :meth:`.backend.Backend.prepare_sum` does, with what a batch uploads; ``options``: see
    :class:`UnopenedMessages`.
    """
    count = len(bounds)
    once = count == 1 or spans is not None  # one message to each tensor; its sum is rounded there
    sizes = [0 if once or out.dtype in (torch.float32, torch.int16) else out.numel() for out in outs]
    *begins, apart = itertools.accumulate(sizes, initial=0)
    places = [begin if size else -1 for begin, size in zip(begins, sizes, strict=True)]
    spans = spans or Spans.whole(tuple([out.numel() for out in outs]))
    messages = UnopenedMessages(buffer, bounds, spans, _targets(spans, outs, places), **options)
    table = list[Tensor]()
    batch.then(messages.table, table.append)

    def add_up() -> Tensor:
        batch.launch()  # unless that is done
        with launched_on(buffer.device):
            return messages.open(*table).add(scale, 1 if once else count, apart)

    return add_up


def _targets(spans: Spans, outs: Sequence[Tensor], apart: Sequence[int]) -> np.ndarray:
    """Return where payloads are added, int64 [1 or messages, payloads, META]; ``apart``: the place of each
    sum that is made in other memory, or -1.
    """
    pairs = zip(outs, apart, strict=True)
    each = [(out.data_ptr(), OUT_CODES.get(out.dtype, 0), at, out.itemsize) for out, at in pairs]
    return _placed(spans, tuple(each))


@functools.lru_cache(maxsize=4096)
def _placed(spans: Spans, outs: tuple[tuple[int, int, int, int], ...]) -> np.ndarray:
    """Return targets for tensors of these addresses, types, places, and bytes of an entry."""
    layout = _layout(spans)
    found, targets = np.array(outs)[layout.which], layout.targets.copy()
    targets[:, :, 1] = found[:, :, 0] + layout.start * found[:, :, 3]
    targets[:, :, 2::2] = found[:, :, 1:3]
    return targets


class _Layout(NamedTuple):
    """The numbers in tables of messages that are the same in every step."""

    which: np.ndarray
    """int64 [1 or messages, payloads]: the number of each payload's tensor; -1 where there are fewer."""
    start: np.ndarray
    """The entries before it."""
    targets: np.ndarray
    """:func:`_targets` without addresses, types and places."""
    payloads: np.ndarray
    """Payloads of each message."""
    entries: int
    """Most entries of the tensors of one message."""
    blocks: int
    """Most blocks of their positions."""
    programs: int
    """Most programs that add a message up."""


@functools.lru_cache(maxsize=4096)
def _layout(spans: Spans) -> _Layout:
    which, start, stop = np.moveaxis(spans.numbers, -1, 0)
    numel = stop - start
    blocks, programs = -(-numel // BLOCK), _programs(numel, _RANGE)
    targets = np.zeros((*numel.shape, device.META.value), dtype=np.int64)
    targets[:, :, 0], targets[:, :, 3] = numel, programs.cumsum(axis=1) - programs
    most = [int(each.sum(axis=1).max()) for each in (numel, blocks, programs)]
    return _Layout(which, start, targets, (which >= 0).sum(axis=1), *most)
