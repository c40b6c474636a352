"""Triton kernels for CUDA tensors (device code: :mod:`dct_plugin.kernels.triton_kernels`).

Nothing here waits for the device. Thresholds and figures stay there; what is wrong with a payload that is
decoded is found there before anything is written, leaves the output alone, and raises
:class:`~dct_plugin.errors.PayloadError` where the figures of a later payload are read
(:func:`~dct_plugin.codecs.read_stats`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..codecs.index import IndexEncoding, decode_indices, encode_indices
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
except ImportError as error:  # no such package, or not for this platform
    raise OSError(f"triton cannot be imported: {error}") from error

logger = logging.getLogger("dct_plugin.kernels")

#: Index encodings that the kernels write; the smallest is taken. Rice code can only be read from its start.
WRITTEN = (IndexEncoding.DENSE, IndexEncoding.BITMAP, IndexEncoding.GAPS8, IndexEncoding.BLOCK16)

_SELECTED = -1  # which entries a kernel writes: those that were selected, with their positions
_BLOCK, _CHUNK, _STATE = device.BLOCK.value, device.CHUNK.value, device.STATE.value
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
        with _on(grad.device):
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
        device.compact[blocks](
            words, state, positions, kept_counts, numel, blocks[0], capacity, args.start, READING=False
        )
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
        with _on(source.device):
            state = self._state(source.device)
            numel, nnz, grad_code = mask.numel, mask.nnz, _GRAD_CODE[source.dtype]
            if mask.nonfinite:
                state[device.FLAG.value].fill_(1)
            else:
                positions, read_state = self._positions(mask)
                device.overflow_at[_programs(nnz, _CHUNK)](
                    *(_readable(source), positions, state, read_state, self._error(source.device)),
                    *(nnz, *_body_checks(mask.header)),
                    GRAD=grad_code,
                    DENSE_ENTRIES=positions is None,
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
        return self._add(payload, payload, out)

    def sum_messages(self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float = 1.0) -> None:
        for out in outs:
            check_vector("out", out, GRAD_DTYPES)
        split = self._split(messages, outs)
        early = scales_first(len(messages), scale)
        for position, out in enumerate(outs):
            in_place = out.dtype == torch.float32
            total = out if in_place else torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
            for payloads in split:
                self._add(payloads[position], payloads[position], total, scale if early else 1.0)
            if not early:
                total.mul_(scale)
            if not in_place:
                out.copy_(total)

    def _split(self, messages: Sequence[Tensor], outs: Sequence[Tensor]) -> list[list[Payload]]:
        """The payloads of messages, with one read of all their headers.

        Raises:
            PayloadError: a message does not hold one payload for each of ``outs``.
        """
        if not messages or not outs:
            return [[] for _ in messages]
        tables = torch.empty(
            (len(messages), len(outs), HEADER_NBYTES), dtype=torch.uint8, device=messages[0].device
        )
        with _on(tables.device):
            for which, message in enumerate(messages):
                check_vector("message", message, (torch.uint8,))
                device.headers[(1,)](message, tables[which], message.numel(), len(outs))
        split = []
        for which, (message, table) in enumerate(zip(messages, tables.cpu().numpy(), strict=True)):
            at, payloads = 0, []
            with naming_message(which):
                for row, out in zip(table, outs, strict=True):
                    header = Header.parse(row.tobytes(), message.numel() - at)
                    check_numel(header, out.numel())
                    payloads.append(Payload(message[at : at + header.nbytes], header))
                    at += header.nbytes
                if at != message.numel():
                    raise PayloadError(f"the message goes on behind its {len(outs)} payloads")
            split.append(payloads)
        return split

    def decode_shared_add(
        self, payload: Payload | Tensor, index_payload: Payload | Tensor, out: Tensor
    ) -> int:
        check_vector("out", out, (torch.float32,))
        payload = mask = open_payload(payload, out.numel(), verify=False)
        if not payload.nonfinite:
            mask = open_positions(index_payload, out.numel(), verify=False)
            check_shared(payload, mask)
        return self._add(payload, mask, out)

    def _add(self, payload: Payload, mask: Payload, out: Tensor, scale: float = 1.0) -> int:
        header, errors = payload.header, self._error(out.device)
        checks = _body_checks(header)
        with _on(out.device):
            if payload.nonfinite:
                state = self._checked(payload)
                grid = _programs(out.numel(), _CHUNK)
                device.poison[grid](out, state, errors, out.numel(), *checks)
                return 0
            positions, state = self._positions(mask)
            if mask is not payload:
                mask_state, state = state, self._checked(payload)
                device.pass_on[(1,)](mask_state, state, *_body_checks(mask.header))
            device.add[_programs(header.nnz, _CHUNK)](
                *(payload.data[HEADER_NBYTES:], positions, out, state, errors, scale),
                *(header.nnz, header.index_nbytes, *checks),
                DENSE_ENTRIES=positions is None,
                SCALED=scale != 1.0,
                VALUE=int(header.value_dtype),
                enable_fp_fusion=False,
            )
        return payload.nnz

    def decode_mask(self, payload: Payload | Tensor, numel: int) -> Tensor:
        payload = open_positions(payload, numel, verify=False)
        with _on(payload.data.device):
            mask = torch.zeros(numel, dtype=torch.uint8, device=payload.data.device)
            positions, state = self._positions(payload)
            header = payload.header
            device.mark[_programs(header.nnz, _CHUNK)](
                *(positions, mask, state, self._error(mask.device), header.nnz, *_body_checks(header)),
                DENSE_ENTRIES=positions is None,
            )
            return mask.view(torch.bool)

    def _checked(self, payload: Payload, blocks: int = 0) -> Tensor:
        """State with the checksums of a payload's body, and what is wrong with its values."""
        header, body = payload.header, payload.data[HEADER_NBYTES:]
        state = self._state(body.device, blocks)
        nbytes = header.nbytes - HEADER_NBYTES
        device.verify[_programs(max(-(-nbytes // 4), header.nnz), _CHUNK)](
            body, state, nbytes, header.nnz, header.index_nbytes, VALUE=int(header.value_dtype)
        )
        return state

    def _positions(self, payload: Payload) -> tuple[Tensor | None, Tensor]:
        """Positions of a payload (the lower 32 bits of each; None: all), and the state of its checks."""
        header = payload.header
        encoding, numel, nnz, nbytes = header.encoding, header.numel, header.nnz, header.index_nbytes
        blocks = _programs(numel, _BLOCK)
        index, where = payload.data[HEADER_NBYTES:], payload.data.device
        state = self._checked(payload, blocks[0])
        if encoding is IndexEncoding.DENSE:
            return None, state
        if encoding is IndexEncoding.RICE:
            _say_once("Rice code")
            found = decode_indices(encoding, header.param, index[:nbytes], nnz, numel)
            return found.to(torch.int32), state
        positions = torch.empty(nnz, dtype=torch.int32, device=where)
        if encoding is IndexEncoding.BITMAP:
            words = torch.empty(blocks[0] * (_BLOCK // 32), dtype=torch.int32, device=where)
            device.read_bitmap[blocks](index, words, state, numel)
            device.compact[blocks](
                *(words, state, positions, None, numel, blocks[0], nnz, 0),
                READING=True,
            )
        elif encoding is IndexEncoding.BLOCK16:
            counts = -(-numel // _BLOCK)  # none for an empty tensor, whose section has no byte to read
            device.read_block16[blocks](index, positions, state, numel, nnz, counts)
        else:
            chunks = _programs(nbytes, _CHUNK)
            sums = torch.empty(2 * chunks[0], dtype=torch.int64, device=where)
            device.gaps8_sums[chunks](index, sums, state, nbytes)
            device.read_gaps8[chunks](index, positions, sums, state, nbytes, nnz, numel)
        return positions, state

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
        with _on(grad.device):
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
            with _on(magnitudes.device):
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
        with _on(values.device):
            device.pack[_programs(values.numel(), _CHUNK)](
                *(values, _readable(out), exponents, values.numel(), signed(seed, 32)),
                GROUPED=grouped,
                enable_fp_fusion=False,
            )

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        check_pack(out, packed, exponents)
        with _on(out.device):
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


def _on(where: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()


def _body_checks(header: Header) -> tuple[int, int]:
    """What the checksums of the body alone have to be, as int32."""
    first, second = header.body_checks
    return signed(first, 32), signed(second, 32)
