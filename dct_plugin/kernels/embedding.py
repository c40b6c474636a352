"""The hot loops of the embedding exchange on the host, and the format of error-bounded payloads.

A payload of error-bounded codes (format 2, little endian) is a header of 20 bytes (magic 0xDC7B, version,
flags, entries, segments, 2 zero bytes, body bytes, CRC-32); per segment one byte of method; per segment half
of the step width in bf16; the entries of segments that are sent raw, fp32; then the bits of the others, one
after the other, from the least significant one up. The segments' lengths are not in it: both sides know which
rows were asked for.

Codes are numbered 0, 1, -1, 2, ... -> 0, 1, 2, 3, ... (*z*). Methods:

====== ======== ===========================================================================================
0..12  rice     quotient ``z >> k`` in zeros, a one, then the ``k`` low bits; 24 zeros: z follows in 16 bits
13     sparse   how many codes are not 0, in as many bits as the entries' number has, two parameters in 4 bits
                each; then per such code the gap to the one before it (rice, 32 bits after 24 zeros) and
                z - 1 (rice)
14     raw      fp32 entries, before the bits; half step width 0
15     zero     all codes are 0
17..32 packed   ``method - 16`` bits for each
====== ======== ===========================================================================================

Sources: quantising by a bound, Feng et al., SC 2024, arXiv:2407.04272; Rice codes, Rice and Plaunt, IEEE
Trans. Communications 19 (1971).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from .library import Library, check, fields, passed

#: Picoseconds of writing and reading a Rice code beyond those of a packed one: what a bit less is weighed
#: against. Measured on one core by benchmarks/embedding_codecs.py.
RICE_COST = 2000

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_FAULTS = {
    1: "is truncated: {found} of 20 header bytes",
    2: "is none: magic is 0x{found:04X}, expected 0xDC7B",
    3: "has format version {found}, expected 2",
    4: "has unknown flags (0x{found:02X}) or reserved bytes",
    5: "is of {found} entries or segments, expected {numel} entries in {segments} segments",
    6: "announces another body than the {found} bytes that are there",
    7: "has a wrong checksum: corrupted in transit or in memory",
    8: "has the unknown method {found}",
    9: "has a step width that is not one",
    10: "is truncated: its streams are longer than it",
    11: "holds a code out of range",
    12: "holds a value that is not finite",
    13: "has trailing bits or bytes",
}


class Outgoing(NamedTuple):
    """Vectors or gradients for one rank.

    Attributes:
        x: fp32 [numel], contiguous, here on the host: segments one after the other.
        lengths: int64 [segments], entries of each.
        bounds: Absolute error bounds, float64 [segments], >= 0.
        send: Whether a message is wanted; what stays here is only rounded.
        kind: The byte that is put behind the payload.
    """

    x: Tensor
    lengths: IntArray
    bounds: FloatArray
    send: bool = True
    kind: int = 0


@dataclass
class Encoded:
    """The result of encoding an :class:`Outgoing`.

    Attributes:
        message: uint8, payload and kind; None: not wanted.
        decoded: fp32 [numel], what a receiver gets; None: not wanted, or an entry is not finite, or of a
            magnitude of 2**126 or more. Such a message decodes to NaN in every entry.
    """

    message: Tensor | None
    decoded: Tensor | None


class OutOfRange(IndexError):
    """An id outside of its column's range."""

    def __init__(self, column: int, found: int) -> None:
        super().__init__(f"id {found} in column {column}")
        self.column = column
        self.found = found


class _Outgoing(ctypes.Structure):
    _fields_ = [
        *fields("P", "x decoded out"),
        *fields("Q", "numel first segments nbytes"),
        *fields("i", "kind status"),
    ]


class _Incoming(ctypes.Structure):
    _fields_ = [
        *fields("P", "data out"),
        *fields("Q", "nbytes numel first segments"),
        *fields("q", "found"),
        *fields("i", "status reserved"),
    ]


_SIGNATURES = {
    "dct_mean_squares": "PPiP",
    "dct_embedding_encode": "PPPQQii",
    "dct_embedding_decode": "PPii",
    "dct_distinct_rows": "PQQPPPPPPP",
    "dct_add_rows": "PPPQQ",
}
_OUT_OF_RANGE = -5


# -- error-bounded codes ---


@functools.cache
def _library() -> Library | OSError:
    """Return the compiled kernels, or why they can be neither loaded nor built."""
    try:
        return Library(_SIGNATURES)
    except OSError as error:
        return error


def _codes() -> Library:
    """Return the compiled kernels, without which there are no error-bounded codes.

    Raises:
        OSError: They can be neither loaded nor built.
    """
    library = _library()
    if isinstance(library, OSError):
        raise OSError(f"error-bounded codes need the compiled kernels: {library}") from library
    return library


def mean_squares(parts: Sequence[Outgoing]) -> list[FloatArray]:
    """Return the mean of the squares of every segment, float64 [segments] of each part, summed in fp32
    from first to last.
    """
    lengths = np.concatenate([part.lengths for part in parts])
    out = np.empty(len(lengths))
    _codes().call("dct_mean_squares", _messages(parts), lengths, len(parts), out)
    return np.split(out, np.cumsum([len(part.lengths) for part in parts])[:-1])


def encode(parts: Sequence[Outgoing], bit_cost: int, *, decoded: bool = False) -> list[Encoded]:
    """Quantise, choose a method for every segment, and write the messages.

    Args:
        parts: The parts for all ranks.
        bit_cost: Picoseconds that a bit takes on the wire, against :data:`RICE_COST`. At 0 codes are packed.
        decoded: Return ``decoded`` of parts that are sent, too.

    Raises:
        OSError: There are no compiled kernels.
    """
    library, messages = _codes(), _messages(parts)
    bound = library.functions.dct_embedding_bound
    bound.argtypes, bound.restype = [ctypes.c_uint64] * 2, ctypes.c_int64
    results = []
    for part, message in zip(parts, messages, strict=True):
        result = Encoded(None, None)
        if decoded or not part.send:
            result.decoded = torch.empty(part.x.numel(), dtype=torch.float32, device="cpu")
            message.decoded = passed(result.decoded)
        if part.send:
            result.message = torch.empty(
                bound(part.x.numel(), len(part.lengths)), dtype=torch.uint8, device="cpu"
            )
            message.out = passed(result.message)
        results.append(result)
    lengths = np.concatenate([part.lengths for part in parts])
    bounds = np.concatenate([part.bounds for part in parts])
    numbers = bit_cost, RICE_COST, len(parts), _threads(len(parts))
    library.call("dct_embedding_encode", messages, lengths, bounds, *numbers)
    for message, result in zip(messages, results, strict=True):
        if result.message is not None:
            result.message = result.message[: message.nbytes]
        if message.status:
            result.decoded = None
    return results


def decode(
    payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
) -> list[str | None]:
    """Do the inverse of :func:`encode`; return what is wrong with each payload, None for nothing.

    Args:
        payloads: uint8, without the kind; nothing in them is believed unchecked.
        lengths: The lengths of the segments of each.
        outs: fp32 [numel], contiguous, filled. Where there is a fault, anything may be in it.

    Raises:
        OSError: There are no compiled kernels.
    """
    if not payloads:
        return []
    count, firsts = len(payloads), itertools.accumulate(map(len, lengths), initial=0)
    rows = [
        _Incoming(passed(payload), passed(out), payload.numel(), out.numel(), first, len(sizes))
        for payload, out, sizes, first in zip(payloads, outs, lengths, firsts, strict=False)
    ]
    messages = (_Incoming * count)(*rows)
    _codes().call("dct_embedding_decode", messages, np.concatenate(lengths), count, _threads(count))
    return [
        f"error-bounded payload {_FAULTS[m.status].format(found=m.found, numel=m.numel, segments=m.segments)}"
        if m.status in _FAULTS
        else None
        for m in messages
    ]


def _messages(parts: Sequence[Outgoing]) -> ctypes.Array[_Outgoing]:
    """Return the messages of all parts, to be written."""
    firsts = itertools.accumulate((len(part.lengths) for part in parts), initial=0)
    rows = [
        _Outgoing(passed(x), None, None, x.numel(), first, len(lengths), 0, kind)
        for (x, lengths, _, _, kind), first in zip(parts, firsts, strict=False)
    ]
    return (_Outgoing * len(parts))(*rows)


def _threads(messages: int) -> int:
    """Return the number of threads: as many as torch uses, at most one per message."""
    return min(torch.get_num_threads(), messages)


# -- ids and rows: in plain torch, too, on devices and where nothing is compiled ---


def distinct_rows(
    ids: Tensor, order: IntArray, limits: IntArray, base: IntArray
) -> tuple[Tensor, IntArray, Tensor]:
    """Return the distinct ids of every column, ascending, and which one each sample has.

    Args:
        ids: int64 [samples, columns], contiguous.
        order: int64 [columns], the order in which columns are numbered through.
        limits: int64 [columns], ids are below; at most 2**31.
        base: int64 [columns], added to a column's rows.

    Returns:
        rows int64 [total] in that order, how many of each column int64 [columns] in that order, both on the
        host; and for every id the position of its row, int64 [samples, columns], on the device of ``ids``.

    Raises:
        OutOfRange: An id is negative or not below its limit.
    """
    library, (samples, columns) = _library(), ids.shape
    if isinstance(library, OSError) or ids.device.type != "cpu":
        return distinct_rows_in_torch(ids, order, limits, base)
    rows, positions = torch.empty(samples * columns, dtype=torch.int64, device="cpu"), torch.empty_like(ids)
    counts, fault = np.empty(columns, dtype=np.int64), np.zeros(2, dtype=np.int64)
    results = rows, counts, positions, fault
    status = library.status("dct_distinct_rows", ids, samples, columns, order, limits, base, *results)
    if status == _OUT_OF_RANGE:
        raise OutOfRange(*fault.tolist())
    check(status)
    return rows[: int(counts.sum())], counts, positions


def distinct_rows_in_torch(
    ids: Tensor, order: IntArray, limits: IntArray, base: IntArray
) -> tuple[Tensor, IntArray, Tensor]:
    """Do what :func:`distinct_rows` does, on the device of ``ids``, of which the distinct rows are read."""
    starts = np.cumsum(limits[order]) - limits[order]
    described = torch.from_numpy(np.stack([order, limits[order], starts, base[order] - starts]))
    columns, limit, start, shift = to_device(described, ids.device)
    ids = ids[:, columns]
    wrong = (ids < 0) | (ids >= limit)
    distinct, inverse = torch.unique(torch.where(wrong, 0, ids) + start, return_inverse=True)
    column = torch.searchsorted(start, distinct, right=True) - 1
    first = column.new_zeros(3)
    if wrong.numel():
        at = wrong.t().reshape(-1).to(torch.uint8).argmax(dim=0, keepdim=True)
        first = torch.cat([at, ids.t().reshape(-1).index_select(0, at), wrong.any().view(1)])
    read = to_host(torch.cat([first, torch.searchsorted(distinct, start), distinct + shift[column]]))
    (at, found, is_wrong), edges, rows = read.split([3, len(order), len(distinct)])
    if is_wrong:
        raise OutOfRange(int(order[int(at) // len(ids)]), int(found))
    positions = torch.empty_like(inverse)
    positions[:, columns] = inverse
    return rows, np.diff(edges.numpy(), append=len(rows)), positions


def add_rows(out: Tensor, rows: Tensor, x: Tensor) -> None:
    """Set ``out[rows[i]] += x[i]`` for ascending i.

    Args:
        out, rows, x: fp32 [any, dim], int64 [n], fp32 [n, dim], contiguous.
    """
    library = _library()
    if isinstance(library, OSError):
        np.add.at(out.numpy(), rows.numpy(), x.numpy())
    else:
        library.call("dct_add_rows", out, rows, x, len(x), x.shape[1])
