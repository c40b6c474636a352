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
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codecs.frames import PREFIX
from ..codecs.index import IndexEncoding, decode_indices, encode_indices
from ..codecs.message import MessageWriter
from ..codecs.payload import HEADER_NBYTES, Header, Payload, check_numel
from ..codecs.splitmix import signed
from ..codecs.stats import Stats
from ..codecs.values import ValueDtype
from ..errors import PayloadError
from .backend import (
    GRAD_DTYPES,
    SMALLEST_TAU,
    CompressArgs,
    Tau,
    check_compress,
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
from .reference import ReferenceBackend

try:
    import triton

    from . import triton_kernels as device
    from . import triton_messages as reading
except ImportError as error:  # no such package, or not for this platform
    raise OSError(f"triton cannot be imported: {error}") from error

logger = logging.getLogger("dct_plugin.kernels")

#: Index encodings that the kernels write; the smallest is taken. Rice code can only be read from its start.
WRITTEN = (IndexEncoding.DENSE, IndexEncoding.BITMAP, IndexEncoding.GAPS8, IndexEncoding.BLOCK16)

_SELECTED = -1  # which entries a kernel writes: those that were selected, with their positions
_BLOCK, _CHUNK, _STATE = device.BLOCK.value, device.CHUNK.value, device.STATE.value
_ROW, _BODY, _COPIED = reading.ROW.value, reading.BODY.value, reading.COPIED.value
_GRAD_CODE = {dtype: code for code, dtype in enumerate(GRAD_DTYPES)}
_MOST_SAMPLES = 1 << 16  # that one program finds the threshold of


def _programs(count: int, each: int) -> tuple[int]:
    return (max(1, -(-count // each)),)


def _readable(tensor: Tensor) -> Tensor:
    """What the kernels take for a gradient: bf16 as its bits."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@functools.cache
def _say_once(what: str) -> None:
    logger.warning("%s is not written or read by the Triton kernels: plain torch does it, with copies", what)


class _Opened(NamedTuple):
    """Messages whose payloads are found and checked."""

    buffer: Tensor
    rows: Tensor
    """int64 [messages, payloads + 1, _ROW]; see :mod:`.triton_messages`."""
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
        dense = args.dense and args.encoding in (None, IndexEncoding.DENSE)
        with launched_on(grad.device):
            stats = (self._compress_all if dense else self._compress_selected)(grad, residual, args, out)
        if clear:
            grad.zero_()
        return stats

    def _compress_selected(
        self, grad: Tensor, residual: Tensor | None, args: CompressArgs, out: Tensor
    ) -> Stats:
        numel, left, where = args.numel, args.residual_out, grad.device
        blocks = _programs(numel, _BLOCK)
        words = torch.empty(blocks[0] * (_BLOCK // 32), dtype=torch.int32, device=where)
        positions = torch.empty(args.capacity, dtype=torch.int32, device=where)
        kept_counts = torch.empty(blocks[0], dtype=torch.int32, device=where)
        sums = torch.empty(*_programs(args.capacity, _CHUNK), dtype=torch.int64, device=where)
        state = self._state(where, blocks[0])
        tau_on_device = isinstance(args.tau, Tensor)
        in_place = left is not None and residual is not None and left.data_ptr() == residual.data_ptr()
        kinds = {"GRAD": _GRAD_CODE[grad.dtype], "HAS_RESIDUAL": residual is not None}
        source, tiles = _readable(grad), _programs(numel, device.TILE.value)
        if in_place:
            device.overflow[tiles](source, numel, state, GRAD=kinds["GRAD"])
        device.select[tiles](
            *(source, residual, left, words, state),
            args.tau if tau_on_device else None,
            0.0 if tau_on_device else args.tau,
            *(numel, args.start),
            TAU_ON_DEVICE=tau_on_device,
            HAS_LEFT=left is not None,
            IN_PLACE=in_place,
            **kinds,
        )
        if left is not None and not in_place:
            device.put_back[tiles](residual, left, state, numel, HAS_RESIDUAL=residual is not None)
        capacity = args.capacity
        device.compact[blocks](words, state, positions, kept_counts, numel, blocks[0], capacity, args.start)
        forced = _SELECTED if args.encoding is None else int(args.encoding)
        skips = forced in (_SELECTED, IndexEncoding.GAPS8)
        if skips:
            device.skips[_programs(capacity, _CHUNK)](positions, state, sums)
        device.plan[(1,)](state, sums, numel, FORCED=forced, SKIPS=skips)
        accumulated = left is not None  # then one form of the kernel serves all types of gradients
        self._write(
            *(out, words, positions, kept_counts, state, sums),
            *(None if accumulated else source, None, left, numel, 0),
            grid=_programs(max(capacity, -(-numel // 32)), _CHUNK),
            ENTRIES=_SELECTED,
            ACCUMULATED=accumulated,
            VALUE=int(args.value_dtype),
            GRAD=0 if accumulated else kinds["GRAD"],
            HAS_RESIDUAL=False,
            HAS_LEFT=accumulated,
        )
        return self._seal(out, state, numel, 0, 0, _SELECTED, args.value_dtype, args.tau)

    def _compress_all(self, grad: Tensor, residual: Tensor | None, args: CompressArgs, out: Tensor) -> Stats:
        numel, left = args.numel, args.residual_out
        state, source, grad_code = self._state(grad.device), _readable(grad), _GRAD_CODE[grad.dtype]
        tiles = _programs(numel, device.TILE.value)
        device.overflow[tiles](source, numel, state, GRAD=grad_code)
        if left is not None and (residual is None or left.data_ptr() != residual.data_ptr()):
            device.put_back[tiles](residual, left, state, numel, HAS_RESIDUAL=residual is not None)
        self._write(
            *(out, None, None, None, state, None, source, residual, left, numel, numel),
            grid=_programs(numel, _CHUNK),
            ENTRIES=int(IndexEncoding.DENSE),
            ACCUMULATED=False,
            VALUE=int(args.value_dtype),
            GRAD=grad_code,
            HAS_RESIDUAL=residual is not None,
            HAS_LEFT=left is not None,
        )
        return self._seal(out, state, numel, numel, numel, IndexEncoding.DENSE, args.value_dtype, 0.0)

    def encode_shared(
        self, source: Tensor, index_payload: Payload | Tensor, value_dtype: int, out: Tensor
    ) -> Stats:
        mask, header = check_encode_shared(source, index_payload, value_dtype, out, verify=False)
        with launched_on(source.device):
            state = self._state(source.device)
            numel, nnz, grad_code = mask.numel, mask.nnz, _GRAD_CODE[source.dtype]
            if mask.nonfinite:
                state[device.FLAG.value].fill_(1)
            else:
                opened = self._open_one(mask)
                positions = None if mask.header.encoding is IndexEncoding.DENSE else opened.positions
                reading.overflow_at[_programs(nnz, _CHUNK)](
                    *(_readable(source), opened.rows, opened.positions, state, self._error(source.device)),
                    nnz,
                    GRAD=grad_code,
                )
                self._write(
                    *(out, None, positions, None, state, None, _readable(source), None, None, numel, nnz),
                    grid=_programs(nnz, _CHUNK),
                    ENTRIES=int(IndexEncoding.DENSE if positions is None else IndexEncoding.SHARED_MASK),
                    ACCUMULATED=False,
                    VALUE=int(header.value_dtype),
                    GRAD=grad_code,
                    HAS_RESIDUAL=False,
                    HAS_LEFT=False,
                )
            return self._seal(out, state, numel, nnz, nnz, IndexEncoding.SHARED_MASK, header.value_dtype, 0.0)

    def _write(self, *arguments: Any, grid: tuple[int], **constants: Any) -> None:
        # Multiplications and additions are rounded one by one, as everywhere else.
        device.write[grid](*arguments, **constants, enable_fp_fusion=False)

    def _seal(
        self,
        out: Tensor,
        state: Tensor,
        numel: int,
        nnz: int,
        above: int,
        entries: int,
        value_dtype: ValueDtype,
        tau: Tau,
    ) -> Stats:
        counts = torch.empty(4, dtype=torch.int64, device=out.device)
        errors = self._error(out.device)
        device.seal[(1,)](
            *(out, state, counts, errors, numel, nnz, above), ENTRIES=int(entries), VALUE=int(value_dtype)
        )
        return Stats.on_device(counts, tau=tau)

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
        opened = self._open_one(payload)
        with launched_on(payload.data.device):
            mask = torch.zeros(numel, dtype=torch.uint8, device=payload.data.device)
            reading.mark[_programs(payload.nnz, _CHUNK)](
                opened.rows, opened.positions, mask, self._error(mask.device), payload.nnz
            )
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
        apart = [out.numel() for out in outs if out.dtype != torch.float32]
        beside = iter(torch.zeros(sum(apart), dtype=torch.float32, device=where).split(apart))
        totals = [out if out.dtype == torch.float32 else next(beside) for out in outs]
        base = next((total for total in totals if total.numel()), totals[0])
        begins = [(t.data_ptr() - base.data_ptr()) // 4 if t.numel() else 0 for t in totals]
        meta = upload([[t.numel(), begin] for t, begin in zip(totals, begins, strict=True)], where)
        early = scales_first(count, scale)
        for message in range(count):
            self._add(opened, opened, meta, base, wrong, message, scale if early else 1.0)
        if not early:
            torch._foreach_mul_(totals, scale)
        for out, total in zip(outs, totals, strict=True):
            if total is not out:
                out.copy_(total)
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
    ) -> _Opened:
        """Check the messages between the ``bounds`` of ``buffer``, and find their positions."""
        where, count, several = buffer.device, len(numels), len(bounds)
        longest, entries = max(end - begin for begin, end in bounds), sum(numels)
        at_most = min(4 * longest, entries)  # values have 2 bits at least, which a dense payload has alone
        room = min(3 * longest, entries)  # with a bit or more for the position
        meta = upload([[numel, 0] for numel in numels], where)
        rows = torch.empty(several, count + 1, _ROW, dtype=torch.int64, device=where)
        missing = torch.zeros(several, dtype=torch.int64, device=where)
        sums = -(-at_most // _CHUNK) + count
        units = sum(-(-numel // _BLOCK) for numel in numels) + longest // _CHUNK + count
        with launched_on(where):
            reading.open_messages[(several,)](
                *(buffer, buffer.view(torch.int64) if framed else None, upload(bounds, where), meta),
                *(rows, missing, count),
                FRAMED=framed,
                SINGLE=single,
            )
            programs = -(-max(longest // 4, at_most) // _CHUNK) + count
            reading.check[(programs, several)](buffer, rows, count)
            counts = torch.empty(several, 2, units, dtype=torch.int64, device=where)
            positions = torch.empty(several, room, dtype=torch.int32, device=where)
            reading.scan[(units, several)](buffer, rows, meta, counts, count, units)
            reading.place[(units, several)](buffer, rows, meta, counts, positions, count, units, room)
        return _Opened(buffer, rows, positions, missing, sums)

    def _add_one(self, opened: _Opened, mask: _Opened, out: Tensor) -> None:
        meta = upload([[out.numel(), 0]], out.device)
        self._add(opened, mask, meta, out, self._error(out.device), 0, 1.0)

    def _add(
        self,
        opened: _Opened,
        mask: _Opened,
        meta: Tensor,
        base: Tensor,
        wrong: Tensor,
        message: int,
        scale: float,
    ) -> None:
        """Add a message's payloads to fp32 outputs; ``meta``: their entries, where they begin behind base."""
        with launched_on(base.device):
            reading.add[(opened.sums,)](
                *(opened.buffer, opened.rows, mask.rows, meta, mask.positions, base),
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
        empty = torch.empty(0, dtype=torch.int64, device=out.device)
        counts = torch.stack([stats.device_counts for _, _, stats in parts]) if parts else empty
        sizes = (-(-room // _COPIED) for _, room, _ in parts)
        *firsts, units = itertools.accumulate(sizes, initial=0)
        places = upload([[part[0], first] for part, first in zip(parts, firsts, strict=True)], out.device)
        offsets = torch.empty(len(parts), dtype=torch.int64, device=out.device)
        with launched_on(out.device):
            reading.begin_frame[(1,)](
                *(counts, offsets, incomplete, out.view(torch.int64), len(parts), fingerprint),
                ANSWERS=incomplete is not None,
            )
            if units:
                reading.fill_frame[(units,)](
                    *(writer.buffer, places, counts, offsets, out, len(parts), out.numel() - PREFIX)
                )

    def sum_frames(
        self, buffer: Tensor, bounds: Sequence[tuple[int, int]], outs: Sequence[Tensor], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Add up messages in frames, without a look at them; see :class:`.backend.Framing`."""
        if not outs:
            nothing = torch.zeros(len(bounds), dtype=torch.int64, device=buffer.device)
            return nothing, nothing
        opened = self._open(buffer, bounds, [out.numel() for out in outs], framed=True)
        return self._sum(opened, outs, scale), opened.missing

    # -- thresholds ---

    def sample_threshold(
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> Tensor:
        check_sample(grad, residual, keep_fraction, num_samples)
        numel = grad.numel()
        samples = min(num_samples, numel)
        magnitudes = self._magnitudes(grad, residual, samples, seed, everything=num_samples >= numel)
        return self._kth_largest(magnitudes, samples, keep_fraction, 0)

    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> Tensor:
        check_exact(grad, residual, k)
        numel = grad.numel()
        magnitudes = self._magnitudes(grad, residual, numel, 0, everything=True)
        return self._kth_largest(magnitudes, numel, 0.0, min(k, max(numel, 1)))

    def _magnitudes(
        self, grad: Tensor, residual: Tensor | None, samples: int, seed: int, *, everything: bool
    ) -> Tensor:
        """Bits of ``|grad + residual|``, int32 [samples]; -1 for what is not finite."""
        with launched_on(grad.device):
            magnitudes = torch.empty(samples, dtype=torch.int32, device=grad.device)
            device.sample[_programs(samples, _CHUNK)](
                *(_readable(grad), residual, magnitudes, grad.numel(), samples, signed(seed)),
                ALL=everything,
                GRAD=_GRAD_CODE[grad.dtype],
                HAS_RESIDUAL=residual is not None,
            )
            return magnitudes

    def _kth_largest(self, magnitudes: Tensor, samples: int, keep_fraction: float, k: int) -> Tensor:
        """fp32 []: the ``k``-th largest, or (0) the one that keeps a share of what is finite."""
        if samples <= _MOST_SAMPLES:
            tau = torch.empty((), dtype=torch.float32, device=magnitudes.device)
            (share,) = struct.unpack("<q", struct.pack("<d", keep_fraction))
            size = 1 << max(10, (samples - 1).bit_length())
            with launched_on(magnitudes.device):
                device.kth_largest[(1,)](
                    magnitudes, tau, share, samples, k, SIZE=size, num_warps=min(32, size // 256)
                )
            return tau
        ordered = magnitudes.sort(descending=True).values
        count = (ordered >= 0).sum()
        rank = (count.to(torch.float64) * keep_fraction + 0.5).to(torch.int64).clamp(min=1) if k == 0 else k
        at = torch.minimum(count, rank if isinstance(rank, Tensor) else torch.full_like(count, rank))
        found = ordered.gather(0, (at - 1).clamp(min=0).view(1)).clamp(min=0)
        return found.view(torch.float32).clamp(min=SMALLEST_TAU).view(())

    # -- residuals ---

    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        check_pack(values, out, exponents)
        grouped = exponents is not None
        with launched_on(values.device):
            device.pack[_programs(values.numel(), _CHUNK)](
                *(values, _readable(out), exponents, values.numel(), signed(seed, 32)),
                GROUPED=grouped,
                enable_fp_fusion=False,
            )

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        check_pack(out, packed, exponents)
        with launched_on(out.device):
            device.unpack[_programs(out.numel(), _CHUNK)](
                _readable(packed), exponents, out, out.numel(), GROUPED=exponents is not None
            )

    # -- positions alone ---

    def encode_indices(
        self, idx: Tensor, numel: int, encoding: int | None = None
    ) -> tuple[IndexEncoding, int, Tensor]:
        return encode_indices(idx, numel, encoding, among=WRITTEN)

    def decode_indices(self, encoding: int, param: int, data: Tensor, nnz: int, numel: int) -> Tensor:
        return decode_indices(encoding, param, data, nnz, numel)

    # -- inside ---

    def _state(self, where: torch.device, blocks: int = 0) -> Tensor:
        return torch.zeros(_STATE + blocks, dtype=torch.int64, device=where)

    def _error(self, where: torch.device) -> Tensor:
        """What was wrong with a payload, until the next one that is written takes it to the host: int32."""
        error = self._errors.get(where)
        if error is None:
            error = self._errors[where] = torch.zeros(1, dtype=torch.int32, device=where)
        return error


def upload(table: Any, where: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Tensor of numbers that the host has, without waiting."""
    if where.type != "cuda":
        return torch.tensor(table, dtype=dtype, device=where)
    return torch.tensor(table, dtype=dtype, pin_memory=True).to(where, non_blocking=True)


def launched_on(where: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
