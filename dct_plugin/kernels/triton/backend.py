"""Triton kernels for CUDA tensors (device code: :mod:`dct_plugin.kernels.triton_kernels`).

Nothing here waits for the device. Thresholds and figures stay there; what is wrong with a payload that is
decoded is found there before anything is written, leaves the output alone, and raises
:class:`~dct_plugin.errors.PayloadError` where the figures of a later payload are read
(:func:`~dct_plugin.codecs.read_stats`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...codecs.frames import PREFIX
from ...codecs.index import IndexEncoding, decode_indices, encode_indices
from ...codecs.message import MessageWriter
from ...codecs.payload import HEADER_NBYTES, Header, Payload, check_numel
from ...codecs.stats import Stats
from ...codecs.values import ValueDtype
from ...errors import PayloadError
from ..backend import (
    GRAD_DTYPES,
    SMALLEST_TAU,
    Tau,
    check_accumulate,
    check_compress,
    check_difference,
    check_encode_shared,
    check_exact,
    check_pack,
    check_sample,
    check_shared,
    check_vector,
    naming_message,
    open_payload,
    open_positions,
    scales_first,
)
from ..reference import ReferenceBackend, sample_positions

try:
    import triton

    from . import message_kernels as reading
    from . import selection_kernels as device
    from .batch import (
        BLOCK,
        CHUNK,
        ROOM,
        STATE,
        Batch,
        Row,
        grad_code,
        launched_on,
        programs,
        readable,
        seal,
        tables,
        upload,
        write,
    )
except ImportError as error:  # no such package, or not for this platform
    raise OSError(f"triton cannot be imported: {error}") from error

logger = logging.getLogger("dct_plugin.kernels")

#: Index encodings that the kernels write; the smallest is taken. Rice code can only be read from its start.
WRITTEN = (IndexEncoding.DENSE, IndexEncoding.BITMAP, IndexEncoding.GAPS8, IndexEncoding.BLOCK16)

_ROW, _BODY, _COPIED = device.ROW.value, reading.BODY.value, reading.COPIED.value
_MOST_SAMPLES = 1 << 17  # that one program finds the threshold of


@functools.cache
def _say_once(what: str) -> None:
    logger.warning("%s is not written or read by the Triton kernels: plain torch does it, with copies", what)


class _Opened(NamedTuple):
    """Messages whose payloads are found and checked."""

    buffer: Tensor
    rows: Tensor
    """int64 [messages, payloads + 1, _ROW]; see :mod:`.message_kernels`."""
    positions: Tensor
    missing: Tensor
    """int64 [messages]: 1 for a frame that does not hold its message."""
    sums: int
    """Programs that add one of the messages up."""


class TritonBackend:
    """Kernels that never wait for the host; see :class:`~dct_plugin.kernels.backend.Backend`.

    CPU tensors are taken under Triton's interpreter alone (``TRITON_INTERPRET=1``: tests).

    Raises:
        OSError: triton cannot be imported (by the import of this module).
    """

    name = "triton"

    def __init__(self) -> None:
        self._errors: dict[torch.device, Tensor] = {}
        self._waiting = threading.local()
        self._reference = ReferenceBackend(WRITTEN)

    def __repr__(self) -> str:
        return f"TritonBackend(triton={triton.__version__!r})"

    # -- writing ---

    def compress(
        self,
        grad: Tensor,
        residual: Tensor | None,
        tau: Tau,
        out: Tensor,
        *,
        residual_out: Tensor | None = None,
        capacity: int | None = None,
        start: int = 0,
        value_dtype: int = ValueDtype.FP32,
        encoding: int | None = None,
        clear: bool = False,
    ) -> Stats:
        args = check_compress(grad, residual, tau, out, residual_out, capacity, start, value_dtype, encoding)
        if args.encoding is IndexEncoding.RICE:
            _say_once("Rice code")
            self._catch_up()
            return self._reference.compress(
                grad,
                residual,
                tau,
                out,
                residual_out=residual_out,
                capacity=capacity,
                start=start,
                value_dtype=value_dtype,
                encoding=encoding,
                clear=clear,
            )
        with self._batch(grad.device) as batch:
            return batch.compress(grad, residual, args, out, clear)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See :class:`.backend.Batching`."""
        self._waiting.batches = {}
        try:
            yield
        finally:
            try:  # after an exception, too: streams hold residuals that only the launch writes
                self._catch_up()
            finally:
                self._waiting.batches = None

    @contextlib.contextmanager
    def _batch(self, where: torch.device) -> Iterator[Batch]:
        """The open batch; or one that is launched at once."""
        batches: dict[torch.device, Batch] | None = getattr(self._waiting, "batches", None)
        if batches is None:
            batch = Batch(where, self._error(where), 1)
            yield batch
            batch.launch()
            return
        if where not in batches or batches[where].full:
            self._catch_up()
            batches[where] = Batch(where, self._error(where), ROOM)
        yield batches[where]

    def _catch_up(self) -> None:
        """Launch what waits: what follows may need it."""
        for batch in (getattr(self._waiting, "batches", None) or {}).values():
            batch.launch()

    def encode_shared(
        self, source: Tensor, index_payload: Payload | Tensor, value_dtype: int, out: Tensor
    ) -> Stats:
        mask, header = check_encode_shared(source, index_payload, value_dtype, out, verify=False)
        self._catch_up()
        where = source.device
        with launched_on(where):
            state = torch.zeros(STATE, dtype=torch.int64, device=where)
            counts = torch.empty(1, 4, dtype=torch.int64, device=where)
            nnz, code, value = mask.nnz, grad_code(source), int(header.value_dtype)
            grad = readable(source)
            row = Row.of(grad, None, None, out, count=nnz)
            table = tables.of([row, [0] * Row.WIDTH], where)
            if mask.nonfinite:
                state[device.FLAG.value].fill_(1)
            else:
                opened = self._open_one(mask)
                dense = mask.header.encoding is IndexEncoding.DENSE
                chunks = programs(nnz, CHUNK)
                reading.overflow_at[(chunks,)](
                    *(grad, opened.rows, opened.positions, state, self._error(where)), GRAD=code
                )
                write(
                    *(table, None, None if dense else opened.positions, None, state, None, 1),
                    grid=chunks,
                    ENTRIES=int(IndexEncoding.DENSE if dense else IndexEncoding.SHARED_MASK),
                    ACCUMULATED=False,
                    VALUE=value,
                    GRAD=code,
                    HAS_RESIDUAL=False,
                    HAS_LEFT=False,
                )
            seal(table, state, counts, self._error(where), 1, int(IndexEncoding.SHARED_MASK), value)
        return Stats.on_device(counts[0])

    # -- reading ---

    def decode_add(self, payload: Payload | Tensor, out: Tensor) -> int:
        check_vector("out", out, (torch.float32,))
        payload = open_positions(payload, out.numel(), verify=False)
        opened = self._open_one(payload)
        self._add_one(opened, opened, out)
        return payload.nnz

    def decode_shared_add(
        self, payload: Payload | Tensor, index_payload: Payload | Tensor, out: Tensor
    ) -> int:
        check_vector("out", out, (torch.float32,))
        payload = open_payload(payload, out.numel(), verify=False)
        opened = mask = self._open_one(payload)
        if not payload.nonfinite:
            positions = open_positions(index_payload, out.numel(), verify=False)
            check_shared(payload, positions)
            mask = self._open_one(positions)
        self._add_one(opened, mask, out)
        return payload.nnz

    def decode_mask(self, payload: Payload | Tensor, numel: int) -> Tensor:
        payload = open_positions(payload, numel, verify=False)
        opened, where = self._open_one(payload), payload.data.device
        with launched_on(where):
            mask = torch.zeros(numel, dtype=torch.uint8, device=where)
            chunks = programs(payload.nnz, CHUNK)
            reading.mark[(chunks,)](opened.rows, opened.positions, mask, self._error(where))
            return mask.view(torch.bool)

    def sum_messages(self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float = 1.0) -> None:
        for out in outs:
            check_vector("out", out, GRAD_DTYPES)
        for message in messages:
            check_vector("message", message, (torch.uint8,))
        if not messages or not outs:
            return
        ends = list(itertools.accumulate((message.numel() for message in messages), initial=0))
        opened = self._open(
            torch.cat([*messages]), list(itertools.pairwise(ends)), [out.numel() for out in outs]
        )
        payloads = self._split(messages, opened, outs)
        if any(p.header.encoding is IndexEncoding.RICE for split in payloads for p in split):
            self._reference.sum_messages(messages, outs, scale)
            return
        wrong = self._sum(opened, outs, scale)
        error = self._error(wrong.device)
        torch.maximum(error, wrong.amax(0, keepdim=True), out=error)

    def _split(
        self, messages: Sequence[Tensor], opened: _Opened, outs: Sequence[Tensor]
    ) -> list[list[Payload]]:
        """The payloads of messages, with one read of all their headers.

        Raises:
            PayloadError: a message does not hold one payload for each of ``outs``.
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

    def _sum(self, opened: _Opened, outs: Sequence[Tensor], scale: float) -> Tensor:
        """What :meth:`sum_messages` does; returns what is wrong with each message, int32."""
        where, count = opened.buffer.device, len(opened.rows)
        wrong = torch.zeros(count, dtype=torch.int32, device=where)
        once = count == 1  # and rounded there
        apart = [out.numel() for out in outs if not once and out.dtype != torch.float32]
        beside = iter(torch.zeros(sum(apart), dtype=torch.float32, device=where).split(apart))
        totals = [out if once or out.dtype == torch.float32 else next(beside) for out in outs]
        meta = _meta(totals)
        early = scales_first(count, scale)
        for message in range(count):
            self._add(opened, opened, meta, wrong, message, scale if early else 1.0)
        if not early:
            torch._foreach_mul_(totals, scale)
        if apart:
            pairs = [pair for pair in zip(outs, totals, strict=True) if pair[0] is not pair[1]]
            torch._foreach_copy_([out for out, _ in pairs], [total for _, total in pairs])
        return wrong

    def _open_one(self, payload: Payload) -> _Opened:
        """A single payload, whose header the host has."""
        nbytes = payload.header.nbytes
        opened = self._open(payload.data, [(0, nbytes)], [payload.numel], single=True)
        if payload.header.encoding is IndexEncoding.RICE and not payload.nonfinite:
            _say_once("Rice code")
            header, index = payload.header, payload.data[HEADER_NBYTES:]
            found = decode_indices(
                header.encoding, header.param, index[: header.index_nbytes], header.nnz, header.numel
            )
            return opened._replace(positions=found.to(torch.int32))
        return opened

    def _open(
        self,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        numels: Sequence[int],
        *,
        framed: bool = False,
        single: bool = False,
        spare: bool = False,
    ) -> _Opened:
        """Check the messages between the ``bounds`` of ``buffer``, and find their positions; ``spare`` the
        outputs of what is missing.
        """
        self._catch_up()
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
            reading.open_messages[(several,)](
                *(buffer, buffer.view(torch.int64) if framed else None),
                *(upload(bounds, where), meta, rows, missing, count),
                FRAMED=framed,
                SINGLE=single,
                ABSENT=reading.ADDED.value if spare else reading.POISONED.value,
            )
            programs = -(-max(longest // 4, at_most) // CHUNK) + count
            reading.check[(programs, several)](buffer, rows, count)
            counts = torch.empty(several, 2, units, dtype=torch.int64, device=where)
            positions = torch.empty(several, room, dtype=torch.int32, device=where)
            reading.scan[(units, several)](buffer, rows, meta, counts, count, units)
            reading.place[(units, several)](buffer, rows, meta, counts, positions, count, units, room)
        return _Opened(buffer, rows, positions, missing, sums)

    def _add_one(self, opened: _Opened, mask: _Opened, out: Tensor) -> None:
        self._add(opened, mask, _meta([out]), self._error(out.device), 0, 1.0)

    def _add(
        self,
        opened: _Opened,
        mask: _Opened,
        meta: Tensor,
        wrong: Tensor,
        message: int,
        scale: float,
    ) -> None:
        """Add a message's payloads to the outputs of ``meta``."""
        with launched_on(meta.device):
            reading.add[(opened.sums,)](
                *(opened.buffer, opened.rows, mask.rows, meta, mask.positions),
                *(wrong, scale, message, len(meta), mask.positions.shape[-1]),
                SCALED=scale != 1.0,
                enable_fp_fusion=False,
            )

    # -- frames ---

    def write_frame(
        self, writer: MessageWriter, out: Tensor, fingerprint: int, incomplete: Tensor | None = None
    ) -> None:
        """Put a message into a frame, without a look at its size; see :class:`.backend.Framing`."""
        parts = writer.parts
        *firsts, units = itertools.accumulate((-(-len(room) // _COPIED) for room, _ in parts), initial=0)
        columns = zip(parts, firsts, strict=True)
        rows = [[room.data_ptr(), first, stats.device_counts.data_ptr()] for (room, stats), first in columns]
        places = upload(rows, out.device)
        offsets = torch.empty(len(parts), dtype=torch.int64, device=out.device)
        with launched_on(out.device):
            reading.begin_frame[(1,)](
                *(places, offsets, incomplete, out.view(torch.int64), len(parts), fingerprint),
                ANSWERS=incomplete is not None,
            )
            if units:
                reading.fill_frame[(units,)](places, offsets, out, len(parts), out.numel() - PREFIX)

    def sum_frames(
        self, buffer: Tensor, bounds: Sequence[tuple[int, int]], outs: Sequence[Tensor], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Add up messages in frames, without a look at them; see :class:`.backend.Framing`."""
        if not outs:
            return _nothing(buffer, len(bounds))
        opened = self._open(buffer, bounds, [out.numel() for out in outs], framed=True)
        return self._sum(opened, outs, scale), opened.missing

    def add_frame(
        self, buffer: Tensor, bounds: tuple[int, int], outs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Add the message in a frame to what is there; see :class:`.backend.Framing`."""
        if not outs:
            return _nothing(buffer, 1)
        opened = self._open(buffer, [bounds], [out.numel() for out in outs], framed=True, spare=True)
        return self._sum(opened, outs, 1.0), opened.missing

    # -- thresholds ---

    def sample_threshold(
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> Tensor:
        check_sample(grad, residual, keep_fraction, num_samples)
        samples, everything = min(num_samples, grad.numel()), num_samples >= grad.numel()
        if samples > _MOST_SAMPLES:
            self._catch_up()
            if not everything:
                where = sample_positions(grad.numel(), samples, seed, grad.device)
                grad, residual = grad[where], None if residual is None else residual[where]
            return _kth_largest(grad, residual, share=keep_fraction)
        with self._batch(grad.device) as batch:
            return batch.threshold(
                grad, residual, samples, seed=seed, everything=everything, share=keep_fraction
            )

    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> Tensor:
        check_exact(grad, residual, k)
        numel = grad.numel()
        k = min(k, max(numel, 1))
        if numel > _MOST_SAMPLES:
            self._catch_up()
            return _kth_largest(grad, residual, rank=k)
        with self._batch(grad.device) as batch:
            return batch.threshold(grad, residual, numel, everything=True, rank=k)

    # -- residuals ---

    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        check_pack(values, out, exponents)
        with self._batch(values.device) as batch:
            batch.pack(values, out, exponents, seed)

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        check_pack(out, packed, exponents)
        with self._batch(out.device) as batch:
            batch.unpack(packed, exponents, out)

    def difference(self, wanted: Tensor, held: Tensor, out: Tensor) -> None:
        check_difference(wanted, held, out)
        if wanted.dtype != torch.float32 or held.dtype not in GRAD_DTYPES:
            self._catch_up()
            self._reference.difference(wanted, held, out)
            return
        with self._batch(held.device) as batch:
            batch.difference(wanted, held, out)

    def accumulate(
        self, grad: Tensor, velocity: Tensor, momentum: float, kept: Tensor, *, clear: bool = False
    ) -> Tensor:
        check_accumulate(grad, velocity, kept)
        out = torch.empty_like(velocity)
        with self._batch(grad.device) as batch:
            batch.accumulate(grad, velocity, momentum, out, kept, clear)
        return out

    # -- positions alone ---

    def encode_indices(
        self, idx: Tensor, numel: int, encoding: int | None = None
    ) -> tuple[IndexEncoding, int, Tensor]:
        return encode_indices(idx, numel, encoding, among=WRITTEN)

    def decode_indices(self, encoding: int, param: int, data: Tensor, nnz: int, numel: int) -> Tensor:
        return decode_indices(encoding, param, data, nnz, numel)

    # -- inside ---

    def _error(self, where: torch.device) -> Tensor:
        """What was wrong with a payload, until the next one that is written takes it to the host: int32."""
        error = self._errors.get(where)
        if error is None:
            error = self._errors[where] = torch.zeros(1, dtype=torch.int32, device=where)
        return error


def _nothing(buffer: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Nothing is wrong with frames that hold nothing, and nothing is missing."""
    nothing = torch.zeros(frames, dtype=torch.int64, device=buffer.device)
    return nothing, nothing


def _meta(outs: Sequence[Tensor]) -> Tensor:
    """Where payloads are added, int64 [outs, META]."""
    rows = [[out.numel(), out.data_ptr(), grad_code(out)] for out in outs]
    return upload(rows, outs[0].device)


def _kth_largest(
    grad: Tensor, residual: Tensor | None, *, share: float = 0.0, rank: int | None = None
) -> Tensor:
    """fp32 []: the ``rank``-th largest magnitude, or the one that keeps a ``share`` of what is finite; by
    torch, of more entries than a kernel looks through.
    """
    acc = grad.to(torch.float32) if residual is None else residual + grad
    bits = acc.view(torch.int32) & 0x7FFFFFFF
    ordered = torch.where(bits < 0x7F800000, bits, -1).sort(descending=True).values
    count = (ordered >= 0).sum()
    if rank is None:
        at = (count.to(torch.float64) * share + 0.5).to(torch.int64).clamp(min=1)
    else:
        at = torch.full_like(count, rank)
    found = ordered.gather(0, (torch.minimum(count, at) - 1).clamp(min=0).view(1)).clamp(min=0)
    return found.view(torch.float32).clamp(min=SMALLEST_TAU).view(())
