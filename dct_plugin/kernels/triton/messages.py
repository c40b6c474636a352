"""Messages on a device: opening them, and adding their payloads to tensors (device code:
:mod:`.message_kernels`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...codecs.index import IndexEncoding
from ...codecs.payload import Payload
from ..checks import scales_first
from ..job import GRAD_CODES
from . import message_kernels as device
from .batch import BLOCK, CHUNK, launched_on, upload
from .launch import launch

_ROW, _FOUND, _WANTED, _WRONG = (
    each.value for each in (device.ROW, device.FOUND, device.WANTED, device.WRONG)
)


class OpenedMessages(NamedTuple):
    """Messages whose payloads are found and checked; see :mod:`.message_kernels`."""

    buffer: Tensor
    rows: Tensor
    """int64 [messages, payloads + 1, ROW]."""
    positions: Tensor
    missing: Tensor
    """int64 [messages]. 1 where a slot does not hold its message."""
    sums: int
    """Programs that add one of the messages up."""

    @classmethod
    def open(
        cls,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        numels: Sequence[Sequence[int]],
        *,
        slots: bool = False,
        spare: bool = False,
        bits: int = 2,
    ) -> OpenedMessages:
        """Check messages of one payload per tensor, and find their positions.

        Args:
            buffer: uint8, with the messages.
            bounds: First byte of each, and the one behind it.
            numels: Entries of the tensors of each message; one list if all are for the same tensors.
            slots: The messages are in slots (:mod:`dct_plugin.codecs.slots`).
            spare: Tensors stay as they are where a message is missing; else they become NaN.
            bits: See :meth:`.backend.Backend.sum_slots`.
        """
        where, count, several = buffer.device, max(map(len, numels)), len(bounds)
        longest, entries = max(end - begin for begin, end in bounds), max(map(sum, numels))
        at_most = min(4 * longest, entries)  # values have 2 bits at least, which a dense payload has alone
        room = min(8 * longest // (bits + 1), entries)  # with a bit or more for the position
        meta, stride = _padded([[[numel, 0, 0] for numel in each] for each in numels], where)
        places = upload([[*b, len(numels[i % len(numels)])] for i, b in enumerate(bounds)], where)
        rows = torch.empty(several, count + 1, _ROW, dtype=torch.int64, device=where)
        missing = torch.zeros(several, dtype=torch.int64, device=where)
        sums = -(-at_most // CHUNK) + count
        units = max(sum(-(-n // BLOCK) for n in each) for each in numels) + longest // CHUNK + count
        with launched_on(where):
            launch(
                device.open_messages,
                several,
                *(buffer, buffer.view(torch.int64) if slots else None),
                *(places, meta, rows, missing, count, stride, room),
                SLOTS=slots,
                ABSENT=device.ADDED.value if spare else device.POISONED.value,
            )
            programs = -(-longest // (4 * CHUNK)) + count
            launch(device.check, (programs, several), buffer, rows, count)
            counts = torch.empty(several, 2, units, dtype=torch.int64, device=where)
            positions = torch.empty(several, room, dtype=torch.int32, device=where)
            sizes = (count, stride, units)
            launch(device.scan, (units, several), buffer, rows, meta, counts, *sizes)
            launch(device.place, (units, several), buffer, rows, meta, counts, positions, *sizes, room)
        return cls(buffer, rows, positions, missing, sums)

    @classmethod
    def of(cls, payload: Payload) -> OpenedMessages:
        """Open a single payload, whose header the host has."""
        bounds = [(0, payload.header.nbytes)]
        return cls.open(payload.data, bounds, [[payload.numel]])

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """Return the positions of a single payload, int64 [nnz], and what is wrong with it, int32 [1].

        If something is, positions are any in the tensor.
        """
        row = self.rows[0, 0]
        damaged = (((row[_FOUND : _FOUND + 2] ^ row[_WANTED : _WANTED + 2]) & 0xFFFFFFFF) != 0).any()
        wrong = torch.where(damaged & (row[_WRONG] == 0), device.BAD_CHECKSUM.value, row[_WRONG])
        if payload.header.encoding is IndexEncoding.DENSE:
            positions = torch.arange(payload.nnz, device=self.buffer.device)
        else:
            positions = self.positions[0, : payload.nnz].to(torch.int64) & 0xFFFFFFFF
        return positions.clamp_(max=max(payload.numel - 1, 0)), wrong.to(torch.int32).view(1)

    def sum_into(self, outs: Sequence[Sequence[Tensor]], scale: float) -> Tensor:
        """Do what :meth:`.backend.Backend.sum_slots` does; return int32 [messages]: what is wrong."""
        where, count = self.buffer.device, len(self.rows)
        wrong = torch.zeros(count, dtype=torch.int32, device=where)
        once = count == 1 or len(outs) > 1  # messages to each tensor; its sum is rounded there
        flat = [out for each in outs for out in each]
        apart = [out.numel() for out in flat if not once and out.dtype != torch.float32]
        beside = iter(torch.zeros(sum(apart), dtype=torch.float32, device=where).split(apart))
        totals = [out if once or out.dtype == torch.float32 else next(beside) for out in flat]
        early = scales_first(1 if once else count, scale)
        meta = _padded([_targets(each) for each in outs] if once else [_targets(totals)], where)
        launches = [range(count)] if once else [range(message, message + 1) for message in range(count)]
        for messages in launches:
            self._add(meta, wrong, scale if early else 1.0, messages)
        if not early:
            torch._foreach_mul_(totals, scale)
        if apart:
            pairs = [pair for pair in zip(flat, totals, strict=True) if pair[0] is not pair[1]]
            torch._foreach_copy_([out for out, _ in pairs], [total for _, total in pairs])
        return wrong

    def add_to(self, out: Tensor, error: Tensor) -> None:
        """Add a single payload to ``out``; ``error``, int32 [1], becomes what is wrong with it."""
        self._add(_padded([_targets([out])], out.device), error, 1.0, range(1))

    def _add(self, meta: tuple[Tensor, int], wrong: Tensor, scale: float, messages: range) -> None:
        targets, stride = meta
        with launched_on(targets.device):
            launch(
                device.add,
                (self.sums, len(messages)),
                *(self.buffer, self.rows, targets, self.positions, wrong, scale, messages.start),
                *(self.rows.shape[1] - 1, stride, self.positions.shape[-1]),
                SCALED=scale != 1.0,
            )


def open_all(messages: Sequence[Tensor], outs: Sequence[Tensor]) -> OpenedMessages:
    """Open messages of one payload for each of ``outs``."""
    ends = list(itertools.accumulate((message.numel() for message in messages), initial=0))
    bounds = list(itertools.pairwise(ends))
    return OpenedMessages.open(torch.cat([*messages]), bounds, [[out.numel() for out in outs]])


def _targets(outs: Sequence[Tensor]) -> list[list[int]]:
    """Return where payloads are added, [outs, META]."""
    return [[out.numel(), out.data_ptr(), GRAD_CODES[out.dtype]] for out in outs]


def _padded(rows: Sequence[list[list[int]]], where: torch.device) -> tuple[Tensor, int]:
    """Upload rows of META numbers of each message, or of all; return them, and the numbers from one message
    to the next.
    """
    most = max(map(len, rows))
    table = [row for each in rows for row in (*each, *[[0, 0, 0]] * (most - len(each)))]
    return upload(table, where), most * device.META.value if len(rows) > 1 else 0
