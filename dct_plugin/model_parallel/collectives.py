"""Collectives of compressed activations and their gradients, for the ranks of a model-parallel group."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PayloadError
from ..metrics import Metrics
from ..stream import Encoded
from ..transport import Exchange
from ..transport.exchange import most_bytes
from .stream import ActivationStream


class CompressedCollectives:
    """Collectives of a model-parallel group whose messages are a stream's, forward and backward.

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
        """Concatenate the ranks' tensors along the first dimension; others see this rank's compressed.

        The gradient of this rank's tensor is the sum of its own part's and of the others' as they come back.
        """
        return _Exchanged.apply(tensor, self, stream, "all_gather", None, [tensor.shape[0]] * self.world_size)

    def reduce_scatter(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Sum equal chunks (along the first dimension) of the ranks' partial sums at the chunk's rank.

        What goes to other ranks is compressed, and so is its gradient. The own chunk is exact.
        """
        leaving = _splits(tensor.shape[0], self.world_size, None, stream)
        return _Exchanged.apply(tensor, self, stream, "reduce_scatter", leaving, None)

    def all_reduce(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Sum the ranks' compressed partial sums, the own one too: bitwise the same result on every rank.

        Backward needs no communication where the gradient of the sum is the same on every rank: what is
        decoded of the own partial sum passes it on, exactly.
        """
        return _AllReduce.apply(tensor, self, stream)

    def all_to_all(
        self,
        tensor: Tensor,
        stream: ActivationStream,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """Send row blocks to the ranks, compressed, and concatenate what arrives.

        Gradients return by the same ways. As between experts: the own block is exact.

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
        self, parts: list[Tensor], stream: ActivationStream, kind: str, arriving: list[int] | None
    ) -> _Sent:
        """Each rank's part to that rank; one that goes to several ranks is encoded once.

        ``arriving`` are the rows from each rank; None: as many as in the own part.
        """
        with self.exchange.preparing():
            leaving = {id(part): part for rank, part in enumerate(parts) if rank != self.rank}
            written = stream.encode(list(leaving.values()))
            place = {key: number for number, key in enumerate(leaving)}
            nothing = torch.empty(0, dtype=torch.uint8, device=parts[0].device)
            where = [None if r == self.rank else place[id(part)] for r, part in enumerate(parts)]
            messages = [nothing if at is None else written.messages[at] for at in where]
        fingerprint = zlib.crc32(f"{kind}:{stream.name}:{[tuple(p.shape[1:]) for p in parts]}".encode())
        with self._recorded(self.cls, parts, written.encoded):
            own = parts[self.rank]
            rows = [own.shape[0] if own.dim() else 1] * len(parts) if arriving is None else arriving
            bounds = [most_bytes(count * math.prod(own.shape[1:])) for count in rows]
            received = self.exchange.all_to_all(messages, fingerprint, bounds=bounds)
        kept = [None if at is None else written.kept[at] for at in where]
        return _Sent(messages, kept, received)

    def _return_gradients(
        self,
        parts: list[Tensor],
        received: list[Any],
        sent: list[Any],
        shapes: list[torch.Size],
        stream: ActivationStream,
    ) -> list[Tensor]:
        """Backward of :meth:`_send_parts`: gradients of what was ``received`` to its senders, and those of
        what was ``sent``, of ``shapes``, from its receivers.
        """  # fmt: skip
        own = parts[self.rank]
        messages = [torch.empty(0, dtype=torch.uint8, device=own.device)] * len(parts)
        encoded = Encoded(density=stream.density)
        with self.exchange.preparing(announced=not stream.gradient_size_is_known):
            for rank, (part, kept) in enumerate(zip(parts, received, strict=True)):
                if rank != self.rank:
                    messages[rank], one = stream.encode_gradient(part, kept)
                    encoded.stats += one.stats
        with self._recorded(f"{self.cls}_gradient", parts, encoded):
            if not stream.gradient_size_is_known:
                bounds = [most_bytes(math.prod(shape)) for shape in shapes]
                fingerprint = zlib.crc32(f"{stream.name} gradient".encode())
                return self.exchange.all_to_all(messages, fingerprint, bounds=bounds)
            sizes = [
                0 if r == self.rank else stream.gradient_nbytes(shape, own.dtype, kept)
                for r, (shape, kept) in enumerate(zip(shapes, sent, strict=True))
            ]
            return self.exchange.transfer(messages, sizes)

    @contextmanager
    def _recorded(self, cls: str, parts: list[Tensor], encoded: Encoded) -> Iterator[None]:
        """Around the exchange of ``parts``."""
        others = [part for rank, part in enumerate(parts) if rank != self.rank]
        before, waited = self.exchange.sent_bytes, self.exchange.waited_ms
        record = encoded.record(
            cls, dense_bytes=sum(part.numel() * part.element_size() for part in others), sent_bytes=0
        )
        with record.timed("exchange"):
            yield
        # A tensor that goes to all ranks is encoded once and counted once per receiver.
        record.nnz = round(record.nnz * len(others) / max(len(encoded.stats), 1))
        record.numel = sum(part.numel() for part in others)
        record.sent_bytes = self.exchange.sent_bytes - before
        record.waited_ms = self.exchange.waited_ms - waited
        if self.metrics is not None:
            self.metrics.record(record)


class _Sent(NamedTuple):
    """By rank of the group: messages that went there, what is kept of them, and messages from there."""

    messages: list[Tensor]
    kept: list[Any]
    received: list[Tensor]


class _Exchanged(torch.autograd.Function):
    """Blocks of rows to the ranks, and the others' blocks from them.

    ``leaving`` are the rows for each rank; None: every rank gets all rows. ``arriving`` are those from each
    rank, which are concatenated; None: what arrives is summed up. Backward they change places.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        comm: CompressedCollectives,
        stream: ActivationStream,
        kind: str,
        leaving: list[int] | None,
        arriving: list[int] | None,
    ) -> Tensor:
        parts = _parts(tensor, leaving, comm)
        own = parts[comm.rank]
        crossed = comm._send_parts(parts, stream, kind, arriving)
        ctx.comm, ctx.stream, ctx.leaving, ctx.arriving = comm, stream, leaving, arriving
        ctx.sent, ctx.shapes = crossed.kept, [part.shape for part in parts]
        ctx.received = [None] * len(parts)

        def decode(rank: int, out: Tensor) -> None:
            ctx.received[rank] = _decoded(stream, crossed.received[rank], out, rank)

        return _combined(own, arriving, comm, decode)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        comm, stream = ctx.comm, ctx.stream
        parts = _parts(gradients[0], ctx.arriving, comm)
        answers = comm._return_gradients(parts, ctx.received, ctx.sent, ctx.shapes, stream)

        def decode(rank: int, out: Tensor) -> None:
            stream.decode_gradient(answers[rank], ctx.sent[rank], out, rank)

        return _combined(parts[comm.rank], ctx.leaving, comm, decode), None, None, None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: CompressedCollectives, stream: ActivationStream) -> Tensor:
        tensor = tensor.contiguous()
        crossed = comm._send_parts([tensor] * comm.world_size, stream, "all_reduce", None)
        ctx.stream, ctx.rank, ctx.received = stream, comm.rank, []
        if comm.world_size == 1:
            return tensor.clone()
        other = (comm.rank + 1) % comm.world_size
        total = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
        ctx.kept = crossed.kept[other]
        for rank, message in enumerate(crossed.received):
            message = crossed.messages[other] if rank == comm.rank else message
            ctx.received.append(_decoded(stream, message, total, rank))
        return total.to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = pulled = gradients[0]
        for rank, received in enumerate(ctx.received):
            if rank == ctx.rank:
                pulled = ctx.stream.pull_back(gradient, ctx.kept, received)
            else:
                ctx.stream.learn(gradient, received)
        return pulled, None, None


def _parts(tensor: Tensor, rows: list[int] | None, comm: CompressedCollectives) -> list[Tensor]:
    tensor = tensor.contiguous()
    return [tensor] * comm.world_size if rows is None else list(tensor.split(rows))


def _combined(
    own: Tensor, rows: list[int] | None, comm: CompressedCollectives, decode: Callable[[int, Tensor], None]
) -> Tensor:
    """``own`` and what ``decode(rank, out)`` adds for the others, in blocks of ``rows``, or (None) summed in
    fp32 and in rank order.
    """
    if rows is None:
        out = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        blocks: Sequence[Tensor] = [out] * comm.world_size
    else:
        out = own.new_zeros((sum(rows), *own.shape[1:]))
        blocks = out.split(rows)
    for rank, block in enumerate(blocks):
        if rank != comm.rank:
            decode(rank, block)
        elif rows is None:
            block.add_(own)
        else:
            block.copy_(own)
    return out.to(own.dtype)


def _decoded(stream: ActivationStream, message: Tensor, out: Tensor, sender: int) -> Any:
    try:
        return stream.decode(message, out, sender)
    except PayloadError as error:
        raise PayloadError(f"{stream.name}: message from rank {sender} of the group: {error}") from error


def _splits(rows: int, world_size: int, splits: Sequence[int] | None, stream: ActivationStream) -> list[int]:
    if splits is None:
        if rows % world_size:
            raise ValueError(f"{stream.name}: {rows} rows are not a multiple of {world_size} ranks")
        return [rows // world_size] * world_size
    if sum(splits) != rows or len(splits) != world_size or min(splits) < 0:
        raise ValueError(f"{stream.name}: splits {list(splits)} do not add up to {rows} rows")
    return list(splits)
