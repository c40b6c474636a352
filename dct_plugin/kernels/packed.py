"""Error-bounded codes in a fixed number of bits per segment, written and read on the tensors' device.

Codes and step widths are those of :mod:`.embedding`; there is no entropy stage. A payload (little endian) has
a byte per segment, the bits of its codes; half of each segment's step width in bf16; bit planes
(:mod:`dct_plugin.codecs.planes`) of the codes, which are signed, and whose segments are filled with zeros to
whole groups of 8; a checksum. 0 bits are zeros. 32 bits are those of fp32 entries: of a segment that would
have too many codes, or has an entry that is not finite.

The checksum is the sum of the bytes before it, each times ``2 * place + 1``, modulo 2**32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..codecs.planes import GROUP
from .backend import Backend
from .embedding import Encoded, IntArray, Outgoing

_RAW, _MOST_BITS, _CHECK_NBYTES = 32, 16, 4
#: Codes are below this, so that code times step width (8 significant bits) is exact in fp32.
_MAX_CODE = 1 << 15


def encode(kernels: Backend, parts: Sequence[Outgoing], relative: float | None = None) -> list[Encoded]:
    """Do what :func:`.embedding.encode` does, with one look at the device.

    Args:
        kernels: For the device of ``parts``.
        relative: Bounds relative to the root mean square of each segment, in place of those of ``parts``.
    """
    segments = _Segments([part.lengths for part in parts], parts[0].x.device)
    x = segments.grouped(torch.cat([part.x for part in parts]))
    largest = segments.reduce(x.abs().amax(dim=1).nan_to_num(torch.inf, torch.inf), "max")
    if relative is None:
        bounds = to_device(torch.from_numpy(np.concatenate([part.bounds for part in parts])), x.device)
    else:
        bounds = relative * (segments.reduce(x.square().sum(dim=1), "sum") / segments.lengths).sqrt()
    target = (bounds * (1.0 - 2.0**-12)).to(torch.float32).view(torch.int32)
    half = (target & -(1 << 16)).view(torch.float32).to(torch.float64)  # a bf16 number safely below the bound
    half = torch.where(largest == 0, 1.0, torch.where((half >= 2.0**-100) & (half < 2.0**100), half, 0.0))
    raw = ~(largest < half * (2.0 * (_MAX_CODE - 1)))
    step = torch.where(raw, 1.0, 2.0 * half)
    most = (largest / step).round()
    widths = torch.where(raw, _RAW, torch.frexp(most)[1] + (most > 0)).to(torch.uint8)
    as_bits, step = (segments.per_group(each).unsqueeze(1) for each in (raw, step))
    codes = (x / step).round()  # in fp64
    rounded = segments.flat(torch.where(as_bits, x, (codes * step).to(torch.float32)))
    numbers = torch.where(as_bits, x.view(torch.int32), codes.to(torch.int32))
    sends = np.repeat([part.send for part in parts], [len(part.lengths) for part in parts])
    sent = np.where(sends, to_host(widths).numpy().astype(np.int64), 0)
    sizes = [int(each.sum()) for each in segments.split(sent * segments.host_groups)]
    sent_bits = to_device(torch.from_numpy(sent), x.device)
    planes = kernels.planes.pack(numbers, sent_bits, segments.groups, sum(sizes))
    halves = torch.where(raw, 0.0, half).to(torch.bfloat16).view(torch.uint8).view(-1, 2)
    described = zip(segments.split(widths), segments.split(halves), planes.split(sizes), strict=True)
    decoded = rounded.split([part.x.numel() for part in parts])
    results = []
    for part, (bits, steps, codes), values in zip(parts, described, decoded, strict=True):
        body = torch.cat([bits, steps.reshape(-1), codes])
        message = torch.cat([body, _checksum(body), torch.full_like(body[:1], part.kind)])
        results.append(Encoded(message if part.send else None, values))
    return results


def decode(
    kernels: Backend, payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
) -> list[str | None]:
    """Do what :func:`.embedding.decode` does, with one look at the device; a fault leaves ``outs`` alone."""
    short = [
        len(payload) < 3 * len(each) + _CHECK_NBYTES for payload, each in zip(payloads, lengths, strict=True)
    ]
    if any(short):
        return [_fault("is truncated") if each else None for each in short]
    segments = _Segments(lengths, payloads[0].device)
    counts, count = [len(each) for each in lengths], len(segments.host_groups)
    damaged = [p[-_CHECK_NBYTES:].ne(_checksum(p[:-_CHECK_NBYTES])).any().view(1) for p in payloads]
    widths = torch.cat([payload[:n] for payload, n in zip(payloads, counts, strict=True)])
    halves = torch.cat([payload[n : 3 * n] for payload, n in zip(payloads, counts, strict=True)])
    read = to_host(torch.cat([widths, halves, *damaged])).numpy()
    bits = read[:count].astype(np.int64)
    valid = ((bits <= _MOST_BITS) | (bits == _RAW)) & (read[count : 3 * count].view("<u2") < 0x7F00)
    planes_of = [
        int(each.sum()) for each in segments.split(np.where(valid, bits * segments.host_groups, -(2**40)))
    ]
    faults: list[str | None] = [
        _fault("has a wrong checksum: corrupted in transit or in memory")
        if wrong
        else _fault("is not of these segments")
        if len(payload) != 3 * n + size + _CHECK_NBYTES
        else None
        for payload, n, size, wrong in zip(payloads, counts, planes_of, read[3 * count :], strict=True)
    ]
    if any(faults):
        return faults
    planes = [payload[3 * n : -_CHECK_NBYTES] for payload, n in zip(payloads, counts, strict=True)]
    sent_bits = widths.to(torch.int64)
    numbers = kernels.planes.unpack(torch.cat(planes), sent_bits, segments.groups, segments.count)
    steps = segments.per_group(2.0 * halves.view(torch.bfloat16).to(torch.float32)).unsqueeze(1)
    is_raw = segments.per_group(widths == _RAW).unsqueeze(1)
    values = segments.flat(torch.where(is_raw, numbers.view(torch.float32), numbers * steps))
    for out, each in zip(outs, values.split([len(out) for out in outs]), strict=True):
        out.copy_(each)
    return faults


class _Segments:
    """The entries of all segments, filled with zeros to whole groups of 8.

    Attributes:
        lengths, groups: int64 [segments], on the device.
        host_groups: The groups of each segment.
        count: The sum of ``groups``.
    """

    def __init__(self, lengths: Sequence[IntArray], device: torch.device) -> None:
        joined = np.concatenate(lengths)
        self.host_groups, numel = -(-joined // GROUP), int(joined.sum())
        self.count, self._counts = int(self.host_groups.sum()), [len(each) for each in lengths]
        self.lengths, self.groups = to_device(torch.from_numpy(np.stack([joined, self.host_groups])), device)
        zeros = GROUP * self.groups - self.lengths
        before = (zeros.cumsum(0) - zeros).repeat_interleave(self.lengths, output_size=numel)
        self._at = torch.arange(numel, device=device) + before

    def grouped(self, x: Tensor) -> Tensor:
        """Return ``x``, [entries], as [count, 8]."""
        return x.new_zeros(self.count * GROUP).index_copy_(0, self._at, x).view(-1, GROUP)

    def flat(self, grouped: Tensor) -> Tensor:
        """Do the inverse of :meth:`grouped`."""
        return grouped.reshape(-1)[self._at]

    def per_group(self, each: Tensor) -> Tensor:
        """Repeat ``each``, [segments], for the groups: [count]."""
        return each.repeat_interleave(self.groups, output_size=self.count)

    def reduce(self, of_groups: Tensor, how: str) -> Tensor:
        """Return the sum or the maximum of each segment, float64 [segments], from fp32 [count]."""
        found = torch.segment_reduce(of_groups, how, lengths=self.groups, initial=0.0, unsafe=True)
        return found.to(torch.float64)

    def split(self, each: Any) -> Sequence[Any]:
        """Split ``each``, [segments, ...], an array or a tensor, by payloads."""
        ends = np.cumsum(self._counts)
        return [each[end - n : end] for end, n in zip(ends.tolist(), self._counts, strict=True)]


def _checksum(data: Tensor) -> Tensor:
    """Return the four bytes of a checksum."""
    odd = torch.arange(1, 2 * len(data), 2, device=data.device)
    return (data * odd).sum(dim=0, keepdim=True).view(torch.uint8)[:_CHECK_NBYTES]


def _fault(what: str) -> str:
    return f"error-bounded payload {what}"
