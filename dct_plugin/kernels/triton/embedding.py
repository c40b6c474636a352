"""Error-bounded codes on CUDA (device code: :mod:`.embedding_kernels`).

The bytes are those that the host's kernels write at a bit cost of 0: packed codes. The host waits once for
the messages of all ranks, to learn their sizes, and once for what is wrong with those that arrive.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...codecs.stats import read_figures
from ..embedding_format import (
    HEADER_SIZE,
    STATUS,
    CodedMessages,
    Decoding,
    DeviceCodeKernels,
    Encoded,
    FloatArray,
    IntArray,
    Outgoing,
    fault_text,
)
from ..embedding_reference import SLACK, SMALLEST_STEP

try:
    from . import embedding_kernels as device
    from .batch import launched_on, upload
except ImportError as error:  # no such package, or not for this platform
    raise OSError(f"triton cannot be imported: {error}") from error

_CHUNK = 1024
_POLYNOMIAL = device.POLYNOMIAL.value


class TritonCodeKernels(DeviceCodeKernels):
    """Error-bounded codes on CUDA; see :class:`~dct_plugin.kernels.embedding_format.DeviceCodeKernels`.

    Codes are packed, whatever a bit costs. A payload with other codes is left to the host.
    """

    name = "triton"

    def mean_squares(self, parts: Sequence[Outgoing]) -> list[Tensor]:
        found = []
        for part in parts:
            sizes = upload(part.lengths, part.x.device)
            mean = torch.segment_reduce(part.x.square(), "mean", lengths=sizes, initial=0.0, unsafe=True)
            found.append(mean.to(torch.float64).nan_to_num(0.0))
        return found

    def encode(
        self, parts: Sequence[Outgoing], bit_cost: int, *, decoded: bool = False, codes: bool = False
    ) -> list[Encoded]:
        if not parts:
            return []
        coded = self.write(parts, decoded=decoded)
        (figures,) = read_figures((), (coded.sizes,))
        results = []
        for at, (part, start) in enumerate(zip(parts, coded.starts, strict=False)):
            nbytes, finite = figures[4 * at], figures[4 * at + STATUS] == 0
            message = coded.buffer[start : start + nbytes + 1] if part.send else None
            wanted = finite and (decoded or not part.send)
            value = coded.values[at] if wanted and coded.values is not None else None
            results.append(Encoded(message, value, None, finite))
        return results

    def write(self, parts: Sequence[Outgoing], *, decoded: bool = False) -> CodedMessages:
        where = parts[0].x.device
        x = torch.cat([part.x for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        # Codes have at most 16 bits, raw entries 32; a word to spare, for bits that go on there.
        room = [(HEADER_SIZE + 3 * len(p.lengths) + 4 * p.x.numel() + 8) // 4 * 4 + 4 for p in parts]
        starts = list(itertools.accumulate(room, initial=0))
        segments, units = _segments([p.lengths for p in parts], where)
        firsts = itertools.accumulate((len(p.lengths) for p in parts), initial=0)
        table = upload(
            [
                [first, len(p.lengths), p.x.numel(), start, p.kind]
                for p, first, start in zip(parts, firsts, starts, strict=False)
            ],
            where,
        )
        halves = torch.cat([_halves(part.bounds, where) for part in parts])
        count = len(lengths)
        buffer = torch.zeros(starts[-1], dtype=torch.uint8, device=where)
        words = buffer.view(torch.int32)
        largest = torch.zeros(count, 2, dtype=torch.int32, device=where)
        plans = torch.empty(count, 4, dtype=torch.int64, device=where)
        sizes = torch.zeros(len(parts), 4, dtype=torch.int64, device=where)
        checks = torch.zeros(len(parts), dtype=torch.int32, device=where)
        values = torch.empty_like(x) if decoded or not all(part.send for part in parts) else None
        _, powers = advances(where)
        with launched_on(where):
            if units:
                device.extremes[(units,)](x, segments, largest, sizes, count)
            device.plan_codes[(len(parts),)](segments, table, largest, halves, plans, sizes, buffer, words)
            if units:
                device.write_codes[(units,)](
                    *(x, segments, table, plans, sizes, words, values, count), DECODED=values is not None
                )
            chunks = -(-max(room) // (4 * _CHUNK)) + 1
            check(words, table, sizes, checks, chunks)
            device.seal_codes[(len(parts),)](table, sizes, checks, powers, buffer, words)
        numels = [part.x.numel() for part in parts]
        return CodedMessages(buffer, starts, sizes, None if values is None else list(values.split(numels)))

    def decode(
        self, payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
    ) -> list[Decoding | None]:
        if not payloads:
            return []
        room = [-(-payload.numel() // 4) * 4 + 8 for payload in payloads]
        starts = list(itertools.accumulate(room, initial=0))
        buffer = torch.zeros(starts[-1], dtype=torch.uint8, device=outs[0].device)
        for payload, start in zip(payloads, starts, strict=False):
            buffer[start : start + payload.numel()] = payload
        nbytes = upload([payload.numel() for payload in payloads], buffer.device)
        sizes = self.open(buffer, starts[:-1], nbytes, max(room), lengths, outs)
        return self.opened(read_figures((), (sizes,))[0], lengths, outs)

    def open(
        self,
        buffer: Tensor,
        starts: Sequence[int],
        nbytes: Tensor,
        most: int,
        lengths: Sequence[IntArray],
        outs: Sequence[Tensor],
    ) -> Tensor:
        where, words = buffer.device, buffer.view(torch.int32)
        segments, units = _segments(lengths, where)
        count = sum(map(len, lengths))
        numels = [out.numel() for out in outs]
        befores = itertools.accumulate(numels, initial=0)
        firsts = itertools.accumulate(map(len, lengths), initial=0)
        columns = zip(firsts, lengths, numels, starts, strict=False)
        known = upload([[first, len(sizes), numel, start] for first, sizes, numel, start in columns], where)
        table = torch.cat([known, nbytes.unsqueeze(1)], dim=1)
        base = next((out for out in outs if out.numel()), outs[0])
        # Segments count their entries from those of the first message on.
        begins = [
            (out.data_ptr() - base.data_ptr()) // 4 - before if out.numel() else 0
            for out, before in zip(outs, befores, strict=False)
        ]
        plans = torch.empty(count, 4, dtype=torch.int64, device=where)
        sizes = torch.zeros(len(outs), 4, dtype=torch.int64, device=where)
        checks = torch.zeros(len(outs), dtype=torch.int32, device=where)
        _, powers = advances(where)
        with launched_on(where):
            device.open_codes[(len(outs),)](segments, table, plans, sizes, buffer, words)
            chunks = -(-most // (4 * _CHUNK)) + 1
            check(words, table, sizes, checks, chunks)
            device.judge[(len(outs),)](table, sizes, checks, powers, words)
            if units:
                places = upload(begins, where)
                device.read_codes[(units,)](segments, table, plans, sizes, words, base, places, count)
        return sizes

    @staticmethod
    def opened(
        figures: Sequence[int], lengths: Sequence[IntArray], outs: Sequence[Tensor]
    ) -> list[Decoding | None]:
        found = zip(figures[STATUS::4], figures[device.SHOWN.value :: 4], outs, lengths, strict=True)
        return [_decoding(status, shown, out.numel(), len(each)) for status, shown, out, each in found]


def _decoding(status: int, shown: int, numel: int, segments: int) -> Decoding | None:
    if status == device.FOR_THE_HOST.value:
        return None
    if status in (0, device.IS_NONFINITE.value):
        return Decoding()
    return Decoding(fault_text(status, shown, numel, segments))


def _segments(lengths: Sequence[IntArray], where: torch.device) -> tuple[Tensor, int]:
    """Return the kernels' table of segments, and their units of work."""
    flat = np.concatenate(lengths)
    units = np.concatenate([[0], np.cumsum(-(-flat // _CHUNK))])
    begins = np.concatenate([[0], np.cumsum(flat)])
    parts = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths])
    table = np.stack([begins, np.append(flat, 0), np.append(parts, 0), units], axis=1)
    return upload(table, where), int(units[-1])


def _halves(bounds: FloatArray | Tensor, where: torch.device) -> Tensor:
    """Return half step widths for bounds, the bits of bf16 in int32; see
    :func:`.embedding_reference.half_steps`.
    """
    if not isinstance(bounds, Tensor):
        bounds = upload(bounds, where, torch.float64)
    bits = (bounds * SLACK).to(torch.float32).view(torch.int32) & -65536
    return torch.where(bits.view(torch.float32) >= SMALLEST_STEP, bits >> 16, 0)


def check(
    words: Tensor,
    parts: Tensor,
    sizes: Tensor,
    checks: Tensor,
    chunks: int,
    *,
    at: int = 4,
    counted: bool = False,
) -> None:
    """Begin the CRC-32 of messages; see the kernel."""
    grid = (chunks, len(parts))
    device.checksum[grid](words, parts, sizes, *advances(words.device), checks, AT=at, COUNTED=counted)


@functools.cache
def advances(where: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors that move a CRC-32 on by 0, 4, 8, ... bytes, and by 1, 2, 4, ... bytes; int32."""

    def times(a: int, b: int) -> int:
        product = 0
        for i in range(32):
            if a & (1 << (31 - i)):
                product ^= b
            b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        return product

    powers = [1 << 23]  # x ** 8
    for _ in range(31):
        powers.append(times(powers[-1], powers[-1]))
    steps = [1 << 31]
    for _ in range(_CHUNK - 1):
        steps.append(times(steps[-1], powers[2]))
    made = (np.array(each, dtype=np.uint32).view(np.int32) for each in (steps, powers))
    first, second = (torch.from_numpy(each).to(where) for each in made)
    return first, second
