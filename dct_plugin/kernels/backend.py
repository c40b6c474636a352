"""The interface of every kernel backend.

The host never has to wait for a kernel between two tensors. Thresholds may stay on the device, from
:meth:`Selection.sample_threshold` into :meth:`Selection.compress`. So may the
:class:`~dct_plugin.codecs.stats.Stats` that come back: :func:`~dct_plugin.codecs.stats.read_stats` or
:meth:`.MessageWriter.read` read those of all tensors of a collective at once. The size of the memory for a
payload follows from ``numel`` and ``capacity`` alone (:func:`~dct_plugin.codecs.payload.payload_bound`).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..codecs import planes
from ..codecs.changes import BANDS, distances
from ..codecs.index import decode_indices, encode_indices
from ..codecs.message import ONE, Key, MessageWriter
from ..codecs.payload import HEADER_NBYTES, Payload, open_payload
from ..codecs.stats import Stats
from ..codecs.values import ValueDtype
from . import displacement
from .displacement import Displacement, Scratch, Squares
from .job import SMALLEST_TAU, Job, PartedJob, Parts, Spans, Tau

#: Entries of a residual in int8 that share an exponent, see :meth:`Residuals.pack`.
PACK_BLOCK = 64
#: The smallest and the largest of these exponents.
PACK_EXPONENTS = (-112, 121)


class Selection(ABC):
    """Kernels that choose the entries of a tensor that cross, and write them.

    Attributes:
        value_dtypes: The types of values that they write.
    """

    name: str
    value_dtypes: ClassVar[Collection[ValueDtype]] = tuple(ValueDtype)

    @staticmethod
    def most_kept(wanted: int, *, of_part: bool) -> int:
        """Return the most entries of a payload, of which so many are ``wanted``. What overflows stays in the
        residual.

        Args:
            wanted: Entries at the wanted density.
            of_part: The payload is of a part of a tensor; the threshold is that of the whole tensor.
        """
        return 2 * wanted + 64

    @abstractmethod
    def compress(self, job: Job) -> Stats:
        """Do error feedback, selection and encoding in one pass (DCT, Gupta et al., KDD 2021, section 3).

        ``acc = float32(grad) + residual``; entries with ``|acc| >= tau`` are kept, at most ``capacity`` of
        them, taken in positional order beginning at ``start`` and wrapping around. The payload goes to
        ``out[:nbytes]``; ``residual_out`` becomes ``acc - decoded value`` where kept and ``acc`` elsewhere.

        If ``grad`` holds a non-finite entry or one of magnitude >= 2**126, ``residual_out`` gets the old
        residual bitwise and the payload is flagged: it decodes to NaN in every entry.
        """

    def compress_parts(self, job: PartedJob, writer: MessageWriter, receivers: Key) -> list[Stats]:
        """Do what :meth:`compress` does for each part of a tensor, into the message of its receiver; return
        the statistics of the parts, or one for all.
        """
        found = []
        for which, (receiver, nbytes) in enumerate(zip(receivers, job.parts.nbytes, strict=True)):
            found.append(self.compress(job.part(which, writer.reserve(nbytes, receiver))))
            writer.advance(found[-1], receiver)
        return found

    def positions(self, payload: Payload | Tensor, numel: int) -> Tensor:
        """Return the positions of the entries that a payload keeps, ascending, int64 [nnz].

        Raises:
            PayloadError: The payload is not valid, or not of ``numel`` entries.
        """
        opened = open_payload(payload, numel)
        header, body = opened.header, opened.data[HEADER_NBYTES:]
        section = body[: header.index_nbytes]
        if header.nonfinite:
            return torch.empty(0, dtype=torch.int64, device=body.device)
        return self.decode_indices(section, header.nnz, numel)

    @abstractmethod
    def sample_threshold(
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> Tau:
        """Return the threshold that keeps about ``keep_fraction`` of ``|grad + residual|``, from
        ``num_samples`` random positions.

        It is exact over all entries when ``num_samples >= numel``. Non-finite entries are ignored; the result
        is never below the smallest positive normal fp32 number.
        """

    @abstractmethod
    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> Tau:
        """Return the ``k``-th largest ``|grad + residual|``; non-finite and tiny entries as in
        :meth:`sample_threshold`.
        """

    def encode_indices(self, idx: Tensor, numel: int) -> Tensor:
        """See :func:`dct_plugin.codecs.index.encode_indices`."""
        return encode_indices(idx, numel)

    def decode_indices(self, data: Tensor, nnz: int, numel: int) -> Tensor:
        """See :func:`dct_plugin.codecs.index.decode_indices`."""
        return decode_indices(data, nnz, numel)

    def encode_changes(self, wanted: Tensor, held: Tensor, writer: MessageWriter) -> list[Stats]:
        """Append the payloads of a part of changed weights to a message (:mod:`dct_plugin.codecs.changes`).

        Args:
            wanted, held: bf16 or fp16 [numel], of one type.
            writer: That of one message.

        Returns:
            Their figures. If more entries passed the threshold than were sent, changes are lacking.
        """
        numel, found = wanted.numel(), []
        for band, values in zip(BANDS, distances(wanted, held), strict=True):
            parts = Parts.whole(numel, band.capacity(numel), band.value_dtype)
            found += self.compress_parts(PartedJob(values, None, SMALLEST_TAU, None, parts), writer, ONE)
        return found

    def write_slots(
        self,
        writer: MessageWriter,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        fingerprint: int,
        nothing: Tensor | None = None,
    ) -> None:
        """Put messages, whose figures are all on the device, into slots, as far as they fit; within
        ``batched`` behind the payloads of the block.

        Args:
            writer: That of the messages.
            buffer: uint8, with the slots.
            bounds: First byte of each slot (a multiple of 8), and the one behind it, by receiver.
            fingerprint: The fingerprint of the operation.
            nothing: int64 []. If it is 1, the slots say that their messages have nothing to add.
        """
        raise NotImplementedError(f"{self.name} kernels write no slots")


class Sums(ABC):
    """Kernels that read what crossed, and add it."""

    name: str

    @abstractmethod
    def decode_add(self, payload: Payload | Tensor, out: Tensor) -> int:
        """Add the values of a payload: ``out[index] += value``; ``out`` is fp32 [numel]. Return nnz.

        Raises:
            PayloadError: The payload is not valid, or not of ``out.numel()`` entries; ``out`` is untouched
                then.
        """

    @abstractmethod
    def sum_messages(self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float = 1.0) -> None:
        """Set ``outs[i] = scale * sum of the messages' i-th payloads``, in fp32, in the messages' order.

        A flagged payload makes all of its ``outs[i]`` NaN. ``scale`` may be multiplied in before the sum
        where that changes no bit of a normal number (powers of 2). The time depends on the number of entries
        in the payloads, not on the size of ``outs``.

        Args:
            messages: uint8; ``len(outs)`` payloads each, one behind the other.
            outs: fp32, bf16 or fp16 [numel], zeros on entry (:meth:`compress` leaves them); each is rounded
                once. Or int16 [numel]: 16-bit floats by their bits, with anything on entry. They are moved in
                the order of the floats by the values of one message, unscaled, which are rounded to whole
                numbers; several payloads may be for one of them.

        Raises:
            PayloadError: A payload is not valid, or not of ``outs[i].numel()`` entries; ``message`` tells
                which. Some of ``outs`` may have been written.
        """

    def prepare_sum(
        self,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        outs: Sequence[Tensor],
        scale: float,
        spans: Spans | None = None,
        *,
        spare: bool = False,
        bits: int = 1,
    ) -> Callable[[], Tensor]:
        """Return a function that does what :meth:`sum_messages` does, for messages that arrive in slots.

        What the host knows of the sum goes to the device now, or with the block's payloads (``batched``).
        The function is called on the same stream, or on one that waits for it. Until then ``outs`` stay where
        they are.

        Args:
            buffer: uint8, with the slots.
            bounds: First byte of each (a multiple of 8), and the one behind it.
            outs: See :meth:`sum_messages`. With one slot, or with ``spans``, they may hold anything, which is
                added to.
            scale: See :meth:`sum_messages`.
            spans: The parts of ``outs`` that each slot is for, no two for one part. None: each is for all of
                ``outs``.
            spare: A slot that does not hold its message leaves ``outs`` alone; else it makes them NaN.
            bits: The fewest bits of a value that has a position.

        Returns:
            The function, which returns int64 [slots, WORDS]: the first words of each slot, with what is wrong
            with its message in place of the last one (:data:`~dct_plugin.codecs.stats.KERNEL_ERRORS`; 0:
            nothing). A message with an error is not added.
        """
        raise NotImplementedError(f"{self.name} kernels read no slots")


class Residuals(ABC):
    """Kernels for what stays on a rank: residuals in few bits, and weights that they displace."""

    @abstractmethod
    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        """Round a residual stochastically to a smaller type; the expected value does not change.

        bf16: to one of the two numbers beside the entry. int8: to a multiple of ``2**exponent``, the smallest
        power of two of which 127 reach the largest of the :data:`PACK_BLOCK` entries that share it;
        for the expectation, entries count as multiples of ``2**(exponent - 15)``. What :meth:`unpack` gives
        is packed to the same values again, whatever the seed.

        Args:
            values: fp32 [numel], no NaN; beyond ``127 * 2**121`` they are cut.
            out: bf16 or int8 [numel].
            exponents: int8 [ceil(numel / PACK_BLOCK)], in [-112, 121]; None for bf16.
            seed: Seed of the random numbers, which depend on it and on the position alone.
        """

    @abstractmethod
    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        """Set ``out`` (fp32) to the values that :meth:`pack` wrote, exactly."""

    def difference(self, wanted: Tensor, held: Tensor, out: Tensor) -> None:
        """Set ``out = wanted - held``, fp32; ``wanted`` is rounded to the type of ``held`` before.

        Args:
            wanted, held: Any floating-point types, [numel].
            out: fp32 [numel], apart from both.
        """
        out.copy_(wanted.to(held.dtype)).sub_(held)

    def add_squares(self, jobs: Sequence[Squares], scratch: Scratch = displacement.fresh) -> None:
        """Add the row and column means of squared gradients to those of a step so far.

        Backends sum in an order of their own, which is the same every time.
        """
        for job in jobs:
            displacement.add_squares(job, scratch)

    def displace(self, jobs: Sequence[Displacement], scratch: Scratch = displacement.fresh) -> None:
        """Set ``out = weight + scale * clamp(residual / denominator, -limit, limit) + factor * pending``.

        The sum is in fp32 (fp64 for such weights) and rounded once. The denominator of an entry in row r and
        column c is ``ratio * sqrt(rows[r] * columns[c] / mean(rows) / observed) + eps``; if there is one
        column, the root is that of ``rows[0] / observed``.
        """
        for job in jobs:
            displacement.displace(job, scratch)


class Backend(Selection, Sums, Residuals):
    """All kernels. Tensors are 1-D, contiguous and on one device; the residual is fp32.

    Every backend writes the same bytes, residuals and decoded values, bit for bit. A payload is given as a
    uint8 tensor, or as a :class:`~dct_plugin.codecs.payload.Payload`, whose header the host knows already.

    Attributes:
        name: The name that :func:`~dct_plugin.kernels.register_backend` knows it by.
        batches: Whether kernels may run later than they are called, see ``batched``.
        lengths_on_host: Whether the host knows the length of a payload when it is written. If not, messages
            travel in slots: :meth:`write_slots` and :meth:`prepare_sum`.
        message_entries: Entries sent that are worth a message of their own. While it travels, the next one is
            made.
        codes_entropy: Whether error-bounded codes have an entropy stage (:mod:`.embedding`), on the host.
        planes: The functions ``pack`` and ``unpack`` of :mod:`dct_plugin.codecs.planes`.
        batched: Returns a context in which a backend that ``batches`` may write the payloads of many tensors
            with a fixed number of launches. The work of this thread in the block is complete when the block
            ends, when a statistic is read, or when another kernel is called that may need it. Until then
            neither tensors nor payloads may be read or written.
    """

    batches: ClassVar[bool] = False
    lengths_on_host: ClassVar[bool] = True
    message_entries: ClassVar[float] = 50_000
    codes_entropy: ClassVar[bool] = False
    planes: Any = planes
    batched: Callable[[], AbstractContextManager[None]] = nullcontext

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of a module make their backend anew."""
        return type(self), ()


def mask_of(kernels: Selection, payload: Payload | Tensor, numel: int) -> Tensor:
    """Return bool [numel]: which entries a payload keeps; see :meth:`Selection.positions`."""
    at = kernels.positions(payload, numel)
    return torch.zeros(numel, dtype=torch.bool, device=at.device).index_fill_(0, at, True)


@functools.lru_cache(maxsize=64)  # asked for every bucket
def scales_first(messages: int, scale: float) -> bool:
    """Return whether :meth:`Sums.sum_messages` may multiply before it adds: no bit of a normal
    number changes then.
    """
    return messages == 1 or math.frexp(scale)[0] == 0.5
