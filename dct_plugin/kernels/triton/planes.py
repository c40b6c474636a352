"""Bit planes (:mod:`dct_plugin.codecs.planes`), with one launch in each direction."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batch import launched_on, programs
from .launch import launch

#: Groups of 8 numbers that a program writes or reads.
GROUPS = tl.constexpr(64)


@triton.jit
def _group(places, count):
    """Return the group's number, bits, first byte, and the bytes from one plane to the next."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    width = tl.load(places + group, mask=inside, other=0).to(tl.int32)
    at = tl.load(places + count + group, mask=inside, other=0)
    stride = tl.load(places + 2 * count + group, mask=inside, other=0)
    return group, inside, width, at, stride


@triton.jit(do_not_specialize=["count"])
def write_planes(numbers, places, planes, count):
    """Write the planes of ``numbers``, int32 [count, 8]; ``places`` is int64 [3, count], see above."""
    group, inside, width, at, stride = _group(places, count)
    lane = tl.arange(0, 8)[None, :]
    number = tl.load(numbers + group[:, None] * 8 + lane, mask=inside[:, None], other=0)
    most = tl.max(width, 0)
    plane = most * 0
    while plane < most:
        byte = tl.sum(((number >> plane) & 1) << lane, axis=1)
        tl.store(planes + at + plane * stride, byte.to(tl.uint8), mask=plane < width)
        plane += 1


@triton.jit(do_not_specialize=["count"])
def read_planes(numbers, places, planes, count):
    """Do the inverse of :func:`write_planes`."""
    group, inside, width, at, stride = _group(places, count)
    lane = tl.arange(0, 8)[None, :]
    number = tl.zeros((GROUPS, 8), tl.int32)
    most = tl.max(width, 0)
    plane = most * 0
    while plane < most:
        byte = tl.load(planes + at + plane * stride, mask=plane < width, other=0).to(tl.int32)
        number = number | (((byte[:, None] >> lane) & 1) << plane)
        plane += 1
    unused = tl.minimum(32 - width, 31)[:, None]
    tl.store(numbers + group[:, None] * 8 + lane, (number << unused) >> unused, mask=inside[:, None])


def pack(numbers: Tensor, widths: Tensor, groups: Tensor, nbytes: int) -> Tensor:
    """See :func:`dct_plugin.codecs.planes.pack`."""
    planes = torch.empty(nbytes, dtype=torch.uint8, device=numbers.device)
    _run(write_planes, numbers.contiguous(), widths, groups, planes)
    return planes


def unpack(planes: Tensor, widths: Tensor, groups: Tensor, count: int) -> Tensor:
    """See :func:`dct_plugin.codecs.planes.unpack`."""
    numbers = torch.empty(count, 8, dtype=torch.int32, device=planes.device)
    _run(read_planes, numbers, widths, groups, planes)
    return numbers


def _run(kernel: object, numbers: Tensor, widths: Tensor, groups: Tensor, planes: Tensor) -> None:
    """Launch one of the kernels."""
    count, where = len(numbers), planes.device
    segment = torch.arange(len(widths), device=where).repeat_interleave(groups, output_size=count)
    sizes = widths * groups
    first = sizes.cumsum(0) - sizes - groups.cumsum(0) + groups
    at = first[segment] + torch.arange(count, device=where)
    if count:
        with launched_on(where):
            places = torch.stack([widths[segment], at, groups[segment]])
            launch(kernel, programs(count, GROUPS.value), numbers, places, planes, count)
