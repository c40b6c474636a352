"""Collectives of compressed activations and their gradients, for the ranks of a model-parallel group."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import with_gradient
from ..compression.stream import Encoded
from ..errors import blamed
from ..metrics import Metrics
from ..transport import Exchange
from ..transport.exchange import most_bytes
from .stream import ActivationStream


class CompressedCollectives:
    """Collectives of a model-parallel group with compressed messages, forward and backward.

    All methods are collectives in both directions: every rank calls them in the same order with tensors of
    the same shape, and runs their backward passes in the same order. ``docs/model-parallel.md`` has an
    example.

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
        """Concatenate the ranks' tensors along the first dimension; tensors of other ranks are compressed.

        The gradient of this rank's tensor is the sum of its own part and of the compressed gradients of the
        others.
        """
        return self.gather_trip(tensor, stream).apply(tensor)

    def gather_trip(self, tensor: Tensor, stream: ActivationStream) -> _BlockRoundTrip:
        """Return both ways of :meth:`all_gather`, for a caller with an autograd function of its own."""
        return _BlockRoundTrip(self, stream, "all_gather", None, [tensor.shape[0]] * self.world_size)

    def reduce_scatter(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Sum equal chunks (along the first dimension) of the ranks' partial sums at the chunk's rank.

        Chunks for other ranks are compressed, and so are their gradients. The own chunk is exact.
        """
        leaving = _splits(tensor.shape[0], self.world_size, None, stream)
        return _BlockRoundTrip(self, stream, "reduce_scatter", leaving, None).apply(tensor)

    def all_reduce(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Sum the ranks' compressed partial sums, the own one included: bitwise the same result on every
        rank.

        Backward needs no communication, because the gradient of the sum is the same on every rank.
        """
        if self.world_size == 1:
            return tensor.clone()
        kept, other = None, (self.rank + 1) % self.world_size

        def forward(tensor: Tensor) -> Tensor:
            nonlocal kept
            parts = [tensor.contiguous()] * self.world_size
            messages, sent, received = self.send(parts, stream, "all_reduce", None)
            kept, received[self.rank] = sent[other], messages[other]
            total = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            for rank, message in enumerate(received):
                _decoded(stream, message, total, rank)
            return total.to(tensor.dtype)

        return with_gradient(tensor, forward, lambda gradient: stream.gradients.pull_back(gradient, kept))

    def all_to_all(
        self,
        tensor: Tensor,
        stream: ActivationStream,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """Send compressed blocks of rows to the ranks, and concatenate the received blocks.

        Gradients return compressed. The own block is exact.

        Args:
            tensor: ``[rows, ...]``.
            input_splits: Rows for each rank; equal parts when None.
            output_splits: Rows from each rank; equal to the input's when None.

        Raises:
            ValueError: The splits do not add up to the rows, or those of the output have no place for the
                block that stays here.
        """
        leaving = _splits(tensor.shape[0], self.world_size, input_splits, stream)
        arriving = leaving if output_splits is None else list(output_splits)
        own = leaving[self.rank]
        if len(arriving) != self.world_size or min(arriving) < 0 or arriving[self.rank] != own:
            raise ValueError(
                f"{stream.name}: output splits {arriving} are not the rows from {self.world_size} ranks, "
                f"with {own} from rank {self.rank} itself"
            )
        return _BlockRoundTrip(self, stream, "all_to_all", leaving, arriving).apply(tensor)

    # -- messages of one direction ---

    def send(
        self, parts: Sequence[Tensor], stream: ActivationStream, what: str, arriving: list[int] | None
    ) -> tuple[list[Tensor], list[Any], list[Tensor]]:
        """Send each rank its part; a part that goes to all ranks is encoded once.

        Args:
            what: Name of the operation, part of the fingerprint.
            arriving: Rows from each rank; None: as many as in the own part.

        Returns:
            By rank: the messages that went there, what is kept of them until the gradients arrive, and the
            messages from there.
        """
        own = parts[self.rank]
        others = [r for r in range(self.world_size) if r != self.rank]
        shared = all(part is own for part in parts)
        with self.exchange.preparing():
            written = stream.activations.encode([parts[r] for r in (others[:1] if shared else others)])
            messages = [own.new_empty(0, dtype=torch.uint8)] * len(parts)
            kept: list[Any] = [None] * len(parts)
            for at, r in enumerate(others):
                messages[r], kept[r] = (each[0 if shared else at] for each in written[:2])
        shape = own.shape[1:]
        fingerprint = zlib.crc32(f"{what}:{stream.name}:{[tuple(p.shape[1:]) for p in parts]}".encode())
        rows = [own.shape[0] if own.dim() else 1] * len(parts) if arriving is None else arriving
        bounds = [most_bytes(count * math.prod(shape)) for count in rows]
        with self._recorded(self.cls, parts, written.encoded):
            received = self.exchange.all_to_all(messages, fingerprint, bounds=bounds)
        return messages, kept, received

    def send_gradients(
        self,
        parts: Sequence[Tensor],
        received: Sequence[Any],
        sent: Sequence[Any],
        shapes: Sequence[torch.Size],
        stream: ActivationStream,
    ) -> list[Tensor]:
        """Send the gradients of what was ``received`` to its senders, the backward pass of :meth:`send`.

        Args:
            received, sent: What was kept of the messages from each rank, and to it.
            shapes: Shapes of the parts that were sent.

        Returns:
            Messages with the gradients of what was sent, from its receivers.
        """
        own = parts[self.rank]
        messages = [own.new_empty(0, dtype=torch.uint8)] * len(parts)
        encoded = Encoded(density=stream.density)
        gradients, known = stream.gradients, stream.gradients.size_is_known
        with self.exchange.preparing():
            for rank, (part, kept) in enumerate(zip(parts, received, strict=True)):
                if rank != self.rank:
                    messages[rank], one = gradients.encode(part, kept)
                    encoded.stats += one.stats
        with self._recorded(f"{self.cls}_gradient", parts, encoded):
            if not known:
                bounds = [most_bytes(math.prod(shape)) for shape in shapes]
                fingerprint = zlib.crc32(f"{stream.name} gradient".encode())
                return self.exchange.all_to_all(messages, fingerprint, bounds=bounds)
            sizes = [
                0 if r == self.rank else gradients.nbytes(shape, own.dtype, kept)
                for r, (shape, kept) in enumerate(zip(shapes, sent, strict=True))
            ]
            return self.exchange.transfer(messages, sizes)

    @contextmanager
    def _recorded(self, cls: str, parts: Sequence[Tensor], encoded: Encoded) -> Iterator[None]:
        """Record the exchange of ``parts`` within the block."""
        others = [part for rank, part in enumerate(parts) if rank != self.rank]
        record = encoded.record(cls, dense_bytes=sum(part.nbytes for part in others), sent_bytes=0)
        with record.timed("exchange"), self.exchange.recorded(record):
            yield
        # A tensor that goes to all ranks is encoded once and counted once per receiver.
        record.nnz = round(record.nnz * len(others) / max(len(encoded.stats), 1))
        record.numel = sum(part.numel() for part in others)
        if self.metrics is not None:
            self.metrics.record(record)


@dataclass
class _BlockRoundTrip:
    """Blocks of rows to the ranks, and the others' blocks from them; the gradients go back the same ways.

    Args:
        what: Name of the operation.
        leaving: Rows for each rank; None: every rank gets all rows.
        arriving: Rows from each rank, which are concatenated; None: what arrives is summed up.
    """

    comm: CompressedCollectives
    stream: ActivationStream
    what: str
    leaving: list[int] | None
    arriving: list[int] | None

    def __post_init__(self) -> None:
        self._received: list[Any] = [None] * self.comm.world_size

    def apply(self, tensor: Tensor) -> Tensor:
        """Return what arrives forward; the backward pass goes the other way."""
        return with_gradient(tensor, self.forward, self.backward)

    def forward(self, tensor: Tensor) -> Tensor:
        parts = self._parts(tensor, self.leaving)
        _, self._sent, received = self.comm.send(parts, self.stream, self.what, self.arriving)
        self._shapes = [part.shape for part in parts]

        def decode(rank: int, out: Tensor) -> None:
            self._received[rank] = _decoded(self.stream, received[rank], out, rank)

        return self._combined(parts, self.arriving, decode)

    def backward(self, gradient: Tensor) -> Tensor:
        parts = self._parts(gradient, self.arriving)
        messages = self.comm.send_gradients(parts, self._received, self._sent, self._shapes, self.stream)

        def decode(rank: int, out: Tensor) -> None:
            self.stream.gradients.decode(messages[rank], self._sent[rank], out, rank)

        return self._combined(parts, self.leaving, decode)

    def _parts(self, tensor: Tensor, rows: list[int] | None) -> Sequence[Tensor]:
        """Return the block for each rank."""
        tensor = tensor.contiguous()
        return [tensor] * self.comm.world_size if rows is None else tensor.split(rows)

    def _combined(
        self, parts: Sequence[Tensor], rows: list[int] | None, decode: Callable[[int, Tensor], None]
    ) -> Tensor:
        """Put this rank's part and what ``decode(rank, out)`` adds for the others together: in blocks of
        ``rows``, or (None) summed in fp32 and in rank order.
        """
        own = parts[self.comm.rank]
        if rows is None:
            out = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
            blocks: Sequence[Tensor] = [out] * len(parts)
        else:
            out = own.new_zeros((sum(rows), *own.shape[1:]))
            blocks = out.split(rows)
        for rank, block in enumerate(blocks):
            if rank != self.comm.rank:
                decode(rank, block)
            elif rows is None:
                block.add_(own)
            else:
                block.copy_(own)
        return out.to(own.dtype)


def _decoded(stream: ActivationStream, message: Tensor, out: Tensor, sender: int) -> Any:
    with blamed(f"{stream.name}: message from rank {sender} of the group"):
        return stream.activations.decode(message, out, sender)


def _splits(rows: int, world_size: int, splits: Sequence[int] | None, stream: ActivationStream) -> list[int]:
    if splits is None:
        if rows % world_size:
            raise ValueError(f"{stream.name}: {rows} rows are not a multiple of {world_size} ranks")
        return [rows // world_size] * world_size
    if sum(splits) != rows or len(splits) != world_size or min(splits) < 0:
        raise ValueError(f"{stream.name}: splits {list(splits)} do not add up to {rows} rows")
    return list(splits)
