"""Messages on a device: opening them, and adding their payloads to tensors (device code:
:mod:`.message_kernels`).
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...codecs.index import IndexEncoding, decode_indices
from ...codecs.payload import HEADER_NBYTES, Header, Payload, check_numel
from ...errors import PayloadError
from ..checks import naming_message, scales_first
from ..job import GRAD_CODES
from . import message_kernels as device
from .batch import BLOCK, CHUNK, launched_on, upload
from .launch import launch

#: Why plain torch does what the kernels do not.
RICE_ON_HOST = "Rice code is not written or read by the Triton kernels: plain torch does it, with copies"

logger = logging.getLogger("dct_plugin.kernels")
_ROW, _BODY = device.ROW.value, device.BODY.value


@functools.cache
def say_once(text: str) -> None:
    """Log once in a process what kernels of a device leave to plain torch."""
    logger.warning(text)


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
        numels: Sequence[int],
        *,
        slots: bool = False,
        single: bool = False,
        spare: bool = False,
    ) -> OpenedMessages:
        """Check messages of one payload per tensor, and find their positions.

        Args:
            buffer: uint8, with the messages.
            bounds: First byte of each, and the one behind it.
            numels: Entries of the tensors.
            slots: The messages are in slots (:mod:`dct_plugin.codecs.slots`).
            single: The message is one payload, whose header the host has checked.
            spare: Tensors stay as they are where a message is missing; else they become NaN.
        """
        where, count, several = buffer.device, len(numels), len(bounds)
        longest, entries = max(end - begin for begin, end in bounds), sum(numels)
        at_most = min(4 * longest, entries)  # values have 2 bits at least, which a dense payload has alone
        room = min(3 * longest, entries)  # with a bit or more for the position
        meta = upload([[numel, 0, 0] for numel in numels], where)
        rows = torch.empty(several, count + 1, _ROW, dtype=torch.int64, device=where)
        missing = torch.zeros(several, dtype=torch.int64, device=where)
        sums = -(-at_most // CHUNK) + count
        units = sum(-(-numel // BLOCK) for numel in numels) + longest // CHUNK + count
        with launched_on(where):
            launch(
                device.open_messages,
                several,
                *(buffer, buffer.view(torch.int64) if slots else None),
                *(upload(bounds, where), meta, rows, missing, count),
                SLOTS=slots,
                SINGLE=single,
                ABSENT=device.ADDED.value if spare else device.POISONED.value,
            )
            programs = -(-max(longest // 4, at_most) // CHUNK) + count
            launch(device.check, (programs, several), buffer, rows, count)
            counts = torch.empty(several, 2, units, dtype=torch.int64, device=where)
            positions = torch.empty(several, room, dtype=torch.int32, device=where)
            launch(device.scan, (units, several), buffer, rows, meta, counts, count, units)
            launch(device.place, (units, several), buffer, rows, meta, counts, positions, count, units, room)
        return cls(buffer, rows, positions, missing, sums)

    def sum_into(self, outs: Sequence[Tensor], scale: float) -> Tensor:
        """Do what :meth:`.backend.Backend.sum_messages` does. Return int32 [messages]: what is wrong with
        each.
        """
        where, count = self.buffer.device, len(self.rows)
        wrong = torch.zeros(count, dtype=torch.int32, device=where)
        once = count == 1  # and rounded there
        apart = [out.numel() for out in outs if not once and out.dtype != torch.float32]
        beside = iter(torch.zeros(sum(apart), dtype=torch.float32, device=where).split(apart))
        totals = [out if once or out.dtype == torch.float32 else next(beside) for out in outs]
        early = scales_first(count, scale)
        meta = _targets(totals)
        for message in range(count):
            self._add(self, meta, wrong, message, scale if early else 1.0)
        if not early:
            torch._foreach_mul_(totals, scale)
        if apart:
            pairs = [pair for pair in zip(outs, totals, strict=True) if pair[0] is not pair[1]]
            torch._foreach_copy_([out for out, _ in pairs], [total for _, total in pairs])
        return wrong

    def add_to(self, out: Tensor, mask: OpenedMessages, error: Tensor) -> None:
        """Add a single payload to ``out`` at the positions of ``mask``; ``error``, int32 [1], becomes what is
        wrong with them.
        """
        self._add(mask, _targets([out]), error, 0, 1.0)

    def _add(self, mask: OpenedMessages, meta: Tensor, wrong: Tensor, message: int, scale: float) -> None:
        with launched_on(meta.device):
            launch(
                device.add,
                self.sums,
                *(self.buffer, self.rows, mask.rows, meta, mask.positions),
                *(wrong, scale, message, len(meta), mask.positions.shape[-1]),
                SCALED=scale != 1.0,
            )


def open_payload_on_device(payload: Payload) -> OpenedMessages:
    """Open a single payload, whose header the host has."""
    nbytes = payload.header.nbytes
    opened = OpenedMessages.open(payload.data, [(0, nbytes)], [payload.numel], single=True)
    if payload.header.encoding is IndexEncoding.RICE and not payload.nonfinite:
        say_once(RICE_ON_HOST)
        header, index = payload.header, payload.data[HEADER_NBYTES:]
        found = decode_indices(
            header.encoding, header.param, index[: header.index_nbytes], header.nnz, header.numel
        )
        return opened._replace(positions=found.to(torch.int32))
    return opened


def open_all(messages: Sequence[Tensor], outs: Sequence[Tensor]) -> OpenedMessages:
    """Open messages of one payload for each of ``outs``."""
    ends = list(itertools.accumulate((message.numel() for message in messages), initial=0))
    bounds = list(itertools.pairwise(ends))
    return OpenedMessages.open(torch.cat([*messages]), bounds, [out.numel() for out in outs])


def split_messages(
    messages: Sequence[Tensor], opened: OpenedMessages, outs: Sequence[Tensor]
) -> list[list[Payload]]:
    """Return the payloads of opened messages, with one read of all their headers.

    Raises:
        PayloadError: A message does not hold one payload for each of ``outs``.
    """
    begins = opened.rows[:, :-1, _BODY, None] - HEADER_NBYTES
    at = begins + torch.arange(HEADER_NBYTES, device=begins.device)
    tables = opened.buffer[at.clamp(max=max(opened.buffer.numel() - 1, 0))].cpu().numpy()
    split = []
    for which, (message, table) in enumerate(zip(messages, tables, strict=True)):
        start, payloads = 0, []
        with naming_message(which):
            for row, out in zip(table, outs, strict=True):
                header = Header.parse(row.tobytes()[: message.numel() - start], message.numel() - start)
                check_numel(header, out.numel())
                payloads.append(Payload(message[start : start + header.nbytes], header))
                start += header.nbytes
            if start != message.numel():
                raise PayloadError(f"the message goes on behind its {len(outs)} payloads")
        split.append(payloads)
    return split


def _targets(outs: Sequence[Tensor]) -> Tensor:
    """Return where payloads are added, int64 [outs, META]."""
    rows = [[out.numel(), out.data_ptr(), GRAD_CODES[out.dtype]] for out in outs]
    return upload(rows, outs[0].device)
