"""The interface of the embedding exchange's kernels, and the format of their payloads.

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

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

MAGIC = 0xDC7B
FORMAT_VERSION = 2
HEADER = struct.Struct("<HBBIHHII")
HEADER_SIZE = 20
NONFINITE = 1  # a flag
MAX_RICE, SPARSE, RAW, ZERO, PACKED = 12, 13, 14, 15, 16
ESCAPE = 24
#: Codes are below this, so that code times step width (8 significant bits) is exact in fp32.
MAX_CODE = 1 << 15
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


def fault_text(status: int, found: int, numel: int, segments: int) -> str:
    """Return what is wrong with a payload."""
    return f"error-bounded payload {_FAULTS[status].format(found=found, numel=numel, segments=segments)}"


def payload_bytes(flags: int, numel: int, segments: int, body: bytes) -> bytes:
    """Return a payload with its header."""
    fields = (MAGIC, FORMAT_VERSION, flags, numel, segments, 0, len(body))
    check = zlib.crc32(body, zlib.crc32(HEADER.pack(*fields, 0)[:16]))
    return HEADER.pack(*fields, check) + body


class Outgoing(NamedTuple):
    """Vectors or gradients for one rank.

    Attributes:
        x: fp32 [numel] on the host, contiguous: segments one after the other.
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
        decoded: fp32 [numel], what a receiver gets; None: not wanted, or not ``finite``.
        finite: Whether the kernels take all entries for finite (magnitudes below 2**126). A message of others
            decodes to NaN in every entry.
    """

    message: Tensor | None
    decoded: Tensor | None
    finite: bool


class EmbeddingKernels(ABC):
    """The hot loops of the embedding exchange: error-bounded codes, ids and rows, all on the host.

    Every implementation gives the same bytes and values.
    """

    name: str

    @abstractmethod
    def mean_squares(self, parts: Sequence[Outgoing]) -> list[FloatArray]:
        """Return the mean of the squares of every segment, float64 [segments] of each part, summed in fp32
        from first to last.
        """

    @abstractmethod
    def encode(self, parts: Sequence[Outgoing], bit_cost: int, *, decoded: bool = False) -> list[Encoded]:
        """Quantise, choose a method for every segment, and write the messages.

        Args:
            parts: The parts for all ranks.
            bit_cost: Picoseconds that a bit takes on the wire, against :data:`RICE_COST`. At 0 codes are
                packed.
            decoded: Return ``decoded`` of parts that are sent, too.
        """

    @abstractmethod
    def decode(
        self, payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
    ) -> list[str | None]:
        """Do the inverse of :meth:`encode`; return what is wrong with each payload, None for nothing.

        Args:
            payloads: uint8, without the kind; nothing in them is believed unchecked.
            lengths: The lengths of the segments of each.
            outs: fp32 [numel], contiguous, filled. Where there is a fault, anything may be in it.
        """

    @abstractmethod
    def distinct_rows(
        self, ids: Tensor, order: IntArray, limits: IntArray, base: IntArray
    ) -> tuple[Tensor, IntArray, Tensor]:
        """Return the distinct ids of every column, ascending, and which one each sample has.

        Args:
            ids: int64 [samples, columns], contiguous.
            order: int64 [columns], the order in which columns are numbered through.
            limits: int64 [columns], ids are below; at most 2**31.
            base: int64 [columns], added to a column's rows.

        Returns:
            rows int64 [total] in that order, how many of each column int64 [columns] in that order, and for
            every id the position of its row, int64 [samples, columns].

        Raises:
            OutOfRange: An id is negative or not below its limit.
        """

    @abstractmethod
    def add_rows(self, out: Tensor, rows: Tensor, x: Tensor) -> None:
        """Set ``out[rows[i]] += x[i]`` for ascending i.

        Args:
            out, rows, x: fp32 [any, dim], int64 [n], fp32 [n, dim], contiguous.
        """


class OutOfRange(IndexError):
    """An id outside of its column's range."""

    def __init__(self, column: int, found: int) -> None:
        super().__init__(f"id {found} in column {column}")
        self.column = column
        self.found = found
