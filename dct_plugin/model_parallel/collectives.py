"""Collectives whose backward passes reuse the forward masks, for the ranks of a model-parallel group."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs.payload import Header, header_bytes, parse_payload, payload_bound
from ..collectives import Exchange
from ..errors import PayloadError
from ..metrics import Metrics
from ..stream import ActivationStream, Encoded, add_payload, as_flat, encode_at, values_nbytes


class MaskedCollectives:
    """Collectives of a model-parallel group whose backward passes reuse the forward masks.

    All methods are collectives in both directions: every rank calls them in the same order with tensors of
    the same shape, and runs their backward passes in the same order. ``docs/model-parallel.md`` shows them at
    work.

    Args:
        group: Process group (gloo or nccl), None for the default one.
        device: Device of the tensors.
        metrics: Where bytes, density and times are recorded.
        cls: Tensor class of the records; gradients are recorded as ``cls + "_gradient"``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        metrics: Metrics | None = None,
        cls: str = "activation",
    ) -> None:
        self.exchange = Exchange(group, torch.device(device))
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        self.metrics = metrics
        self.cls = cls

    def all_gather(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Concatenate the ranks' tensors along the first dimension; others see this rank's thresholded.

        The gradient of this rank's tensor is the sum of its own part's and of the others' at the mask.
        """
        return _Exchanged.apply(tensor, self, stream, "all_gather", None, [tensor.shape[0]] * self.world_size)

    def reduce_scatter(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Sum equal chunks (along the first dimension) of the ranks' partial sums at the chunk's rank.

        What goes to other ranks is thresholded; its gradient comes back at the mask. The own chunk is exact.
        """
        leaving = _splits(tensor.shape[0], self.world_size, None, stream)
        return _Exchanged.apply(tensor, self, stream, "reduce_scatter", leaving, None)

    def all_reduce(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Sum the ranks' thresholded partial sums, the own one too: bitwise the same result on every rank.

        Backward needs no communication where the gradient of the sum is the same on every rank: it is kept at
        the own mask.
        """
        return _AllReduce.apply(tensor, self, stream)

    def all_to_all(
        self,
        tensor: Tensor,
        stream: ActivationStream,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """Send row blocks to the ranks, thresholded, and concatenate what arrives.

        Gradients return as values at the masks. As between experts: the own block is exact.

        Args:
            tensor: ``[rows, ...]``.
            input_splits: Rows for each rank; equal parts when None.
            output_splits: Rows from each rank; equal to the input's when None.

        Raises:
            ValueError: The splits do not add up to the rows.
        """
        leaving = _splits(tensor.shape[0], self.world_size, input_splits, stream)
        arriving = leaving if output_splits is None else list(output_splits)
        return _Exchanged.apply(tensor, self, stream, "all_to_all", leaving, arriving)

    # -- forward and backward halves ---------------------------------------------------------------------

    def _send_parts(
        self, parts: list[Tensor], stream: ActivationStream, kind: str
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Each rank's part to that rank: ``(payloads sent, payloads received)``; the own ones are empty.

        ``parts`` may hold the same tensor for all ranks, which is encoded once.
        """
        with self.exchange.abort_on_error():
            # By identity: a tensor that goes to several ranks is encoded once.
            leaving = {id(part): as_flat(part) for rank, part in enumerate(parts) if rank != self.rank}
            flats = list(leaving.values())
            outs = [
                torch.empty(
                    payload_bound(flat.numel(), flat.numel(), stream.value_dtype(flat.dtype)),
                    dtype=torch.uint8,
                    device=flat.device,
                )
                for flat in flats
            ]
            encoded = stream.encode(flats, outs)
            payloads = {
                key: out[: stats.nbytes].clone()
                for key, out, stats in zip(leaving, outs, encoded.stats, strict=True)
            }
            empty = torch.empty(0, dtype=torch.uint8, device=parts[0].device)
            sent = [empty if r == self.rank else payloads[id(part)] for r, part in enumerate(parts)]
        fingerprint = zlib.crc32(f"{kind}:{stream.name}:{[tuple(p.shape[1:]) for p in parts]}".encode())
        with self._recorded(self.cls, parts, encoded):
            return sent, self.exchange.all_to_all(sent, fingerprint)

    def _return_values(
        self, parts: list[Tensor], received: list[Tensor], sent: list[Tensor], stream: ActivationStream
    ) -> list[Tensor]:
        """Backward of :meth:`_send_parts`: gradient parts to their senders, at the masks, sizes known."""
        own = parts[self.rank]
        code = stream.value_dtype(own.dtype, gradient=True)
        kernels = stream.backend(own.device)
        messages = [torch.empty(0, dtype=torch.uint8, device=own.device)] * len(parts)
        encoded = Encoded(density=stream.density)
        for rank, (part, mask) in enumerate(zip(parts, received, strict=True)):
            if rank != self.rank:
                messages[rank], stats = encode_at(kernels, as_flat(part), mask, code)
                encoded.stats.append(stats)
        sizes = [0 if r == self.rank else values_nbytes(p, code) for r, p in enumerate(sent)]
        with self._recorded(f"{self.cls}_gradient", parts, encoded):
            answers = self.exchange.transfer(messages, sizes)
        return [
            answer if rank == self.rank else answer[: Header.parse(header_bytes(answer)).nbytes]
            for rank, answer in enumerate(answers)
        ]

    @contextmanager
    def _recorded(self, cls: str, parts: list[Tensor], encoded: Encoded) -> Iterator[None]:
        """Around the exchange of ``parts``."""
        others = [part for rank, part in enumerate(parts) if rank != self.rank]
        before = self.exchange.sent_bytes
        record = encoded.record(
            cls, dense_bytes=sum(part.numel() * part.element_size() for part in others), sent_bytes=0
        )
        with record.timed("exchange"):
            yield
        # A tensor that goes to all ranks is encoded once and counted once per receiver.
        record.nnz = round(record.nnz * len(others) / max(len(encoded.stats), 1))
        record.numel = sum(part.numel() for part in others)
        record.sent_bytes = self.exchange.sent_bytes - before
        if self.metrics is not None:
            self.metrics.record(record)


def _checked(payload: Tensor, numel: int, stream: ActivationStream, sender: int) -> Tensor:
    try:
        parse_payload(payload, numel, verify=False)  # decoding verifies
    except PayloadError as error:
        raise PayloadError(f"{stream.name}: message from rank {sender} of the group: {error}") from error
    return payload


class _Exchanged(torch.autograd.Function):
    """Blocks of rows to the ranks, and the others' blocks from them.

    ``leaving`` are the rows for each rank; None: every rank gets all rows. ``arriving`` are those from each
    rank, which are concatenated; None: what arrives is summed up. Backward they change places.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        comm: MaskedCollectives,
        stream: ActivationStream,
        kind: str,
        leaving: list[int] | None,
        arriving: list[int] | None,
    ) -> Tensor:
        parts = _parts(tensor, leaving, comm)
        sent, received = comm._send_parts(parts, stream, kind)
        ctx.comm, ctx.stream, ctx.sent, ctx.received = comm, stream, sent, received
        ctx.leaving, ctx.arriving = leaving, arriving
        return _combined(parts[comm.rank], received, arriving, comm, stream)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        comm, stream = ctx.comm, ctx.stream
        parts = _parts(gradients[0], ctx.arriving, comm)
        answers = comm._return_values(parts, ctx.received, ctx.sent, stream)
        out = _combined(parts[comm.rank], answers, ctx.leaving, comm, stream, masks=ctx.sent)
        return out, None, None, None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: MaskedCollectives, stream: ActivationStream) -> Tensor:
        tensor = tensor.contiguous()
        sent, received = comm._send_parts([tensor] * comm.world_size, stream, "all_reduce")
        own = next((payload for payload in sent if payload.numel()), None)
        total = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
        kernels = stream.backend(tensor.device)
        for rank, payload in enumerate(received):
            if rank != comm.rank:
                add_payload(kernels, _checked(payload, tensor.numel(), stream, rank), total)
            elif own is not None:
                add_payload(kernels, own, total)
            else:
                total.add_(tensor)
        ctx.stream, ctx.own = stream, own
        return total.to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        if ctx.own is not None:
            mask = ctx.stream.backend(gradient.device).decode_mask(ctx.own, gradient.numel())
            gradient = gradient * mask.view(gradient.shape)
        return gradient, None, None


def _parts(tensor: Tensor, rows: list[int] | None, comm: MaskedCollectives) -> list[Tensor]:
    tensor = tensor.contiguous()
    return [tensor] * comm.world_size if rows is None else list(tensor.split(rows))


def _combined(
    own: Tensor,
    payloads: list[Tensor],
    rows: list[int] | None,
    comm: MaskedCollectives,
    stream: ActivationStream,
    masks: list[Tensor] | None = None,
) -> Tensor:
    """``own`` and the others' payloads, in blocks of ``rows``, or (None) summed in fp32 and in rank order;
    with ``masks`` the payloads hold values only.
    """
    if rows is None:
        out = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        blocks: Sequence[Tensor] = [out] * len(payloads)
    else:
        out = own.new_zeros((sum(rows), *own.shape[1:]))
        blocks = out.split(rows)
    for rank, (payload, block) in enumerate(zip(payloads, blocks, strict=True)):
        if rank != comm.rank:
            _add(payload, block, rank, stream, masks)
        elif rows is None:
            block.add_(own)
        else:
            block.copy_(own)
    return out.to(own.dtype)


def _add(
    payload: Tensor, out: Tensor, rank: int, stream: ActivationStream, masks: list[Tensor] | None
) -> None:
    kernels = stream.backend(out.device)
    if masks is None:
        add_payload(kernels, _checked(payload, out.numel(), stream, rank), out)
    else:
        add_payload(kernels, payload, out, masks[rank])


def _splits(rows: int, world_size: int, splits: Sequence[int] | None, stream: ActivationStream) -> list[int]:
    if splits is None:
        if rows % world_size:
            raise ValueError(f"{stream.name}: {rows} rows are not a multiple of {world_size} ranks")
        return [rows // world_size] * world_size
    if sum(splits) != rows or len(splits) != world_size or min(splits) < 0:
        raise ValueError(f"{stream.name}: splits {list(splits)} do not add up to {rows} rows")
    return list(splits)
