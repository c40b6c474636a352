"""What vectors and their gradients are on the wire.

A message is a payload and one byte that says how to read it: error-bounded codes
(:mod:`~dct_plugin.embedding.error_bounded`) or values of one floating type, with or without a mask. Rows are
in the order of the request that named them; gradients at the positions of a thresholded message are values
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.payload import OVERFLOW_MAGNITUDE
from ..codecs.values import ValueDtype
from ..config import EmbeddingChannelConfig
from ..errors import PayloadError
from ..kernels import Backend
from ..stream import as_flat, encode_all, encode_at, wire_dtype
from .error_bounded import Codes, decode_bounded, encode_bounded, quantise, within

__all__ = ["Mask", "Message", "VectorMessages"]

# Last byte of a message.
_BOUNDED = 1
_MASKED = 2


class Mask(NamedTuple):
    """Where gradients come back: ``entries``, bool [rows, dim], or the positions of a payload, uint8."""

    entries: Tensor | None = None
    payload: Tensor | None = None


class Message(NamedTuple):
    """A message for a peer.

    Attributes:
        data: uint8.
        mask: Where gradients come back; None: everywhere.
        kept: Entries that cross.
    """

    data: Tensor
    mask: Mask | None
    kept: int


class VectorMessages:
    """Writes and reads the messages of one channel.

    Args:
        config: ``dct.embedding``.
        dim: Width of the vectors.
        name: Name in errors.
        backend: Gives the kernels for tensors on a device.
    """

    def __init__(
        self,
        config: EmbeddingChannelConfig,
        *,
        dim: int,
        name: str,
        backend: Callable[[torch.device], Backend],
    ) -> None:
        self.config = config
        self.dim = dim
        self.name = name
        self._backend = backend

    # -- vectors ---

    def encode(self, x: Tensor, rows: Sequence[int], mask: Tensor | None, bounds: Tensor | None) -> Message:
        """Message of ``x``, [rows, dim].

        Args:
            x: The rows of several tables one after the other.
            rows: Rows of each table.
            mask: bool [rows, dim], entries that reach the threshold; None: no threshold applies.
            bounds: Absolute error bounds, float64 [tables]; None: nothing is quantised.
        """
        if not x.numel():
            return Message(_nothing(x.device), None, 0)
        flat, codes = self._layers(x, rows, mask, bounds)
        returned = mask is not None and not self.config.dense_gradient
        kind = _MASKED if returned else 0
        if codes is None:
            code = wire_dtype(flat.dtype, self.config.value_dtype, dense=mask is None)
            data, kept = self._values(flat, code, kind, zeros=mask is None)
            return Message(data, Mask(payload=data[:-1]) if returned else None, kept)
        data = _closed(self._bounded(codes, [r * self.dim for r in rows]), _BOUNDED | kind)
        if mask is None:
            return Message(data, None, x.numel())
        entries = (codes.decoded != 0).view(x.shape)
        return Message(data, Mask(entries=entries) if returned else None, int(entries.sum()))

    def receive_own(
        self, x: Tensor, rows: Sequence[int], mask: Tensor | None, bounds: Tensor | None
    ) -> tuple[Tensor, Mask | None]:
        """What a peer would decode from :meth:`encode`; rows that stay here pass the same layers."""
        if not x.numel():
            return x, None
        flat, codes = self._layers(x, rows, mask, bounds)
        if codes is not None:
            flat = codes.decoded
            mask = None if mask is None else (flat != 0).view(x.shape)
        else:
            code = wire_dtype(flat.dtype, self.config.value_dtype, dense=mask is None)
            if code is not ValueDtype.lossless(flat.dtype):
                data, _ = self._values(flat, code, 0, zeros=mask is None)
                flat = torch.zeros(flat.numel(), dtype=torch.float32, device=x.device)
                self._backend(x.device).decode_add(data[:-1], flat)
        answered = None if mask is None or self.config.dense_gradient else Mask(entries=mask)
        return flat.view(x.shape).to(x.dtype), answered

    def decode(
        self, message: Tensor, like: Tensor, rows: Sequence[int], source: int
    ) -> tuple[Tensor, Mask | None]:
        """Vectors [rows, dim] and mask of a message; ``like`` gives dtype and device.

        Raises:
            PayloadError: the message of rank ``source`` of the group is damaged, or not of these rows.
        """
        shape = (sum(rows), self.dim)
        if not shape[0]:
            return like.new_zeros(shape), None
        payload, kind = self._opened(message, source)
        kernels = self._backend(like.device)
        with self._blame("message", source):
            if kind & _BOUNDED:
                decoded, q = decode_bounded(payload, [r * self.dim for r in rows], kernels)
                mask = Mask(entries=(q != 0).view(shape)) if kind & _MASKED else None
            else:
                decoded = torch.zeros(shape[0] * self.dim, dtype=torch.float32, device=like.device)
                kernels.decode_add(payload, decoded)
                mask = Mask(payload=payload) if kind & _MASKED else None
        return decoded.view(shape).to(like.dtype), mask

    # -- gradients ---

    def encode_gradient(
        self, gradient: Tensor, rows: Sequence[int], mask: Mask | None, *, quantised: bool
    ) -> tuple[Tensor, int]:
        """Message of the gradients [rows, dim] of received vectors, and the entries in it.

        ``quantised`` applies ``gradient_bound``, relative to the root mean square of each table's gradient.
        """
        if not gradient.numel():
            return _nothing(gradient.device), 0
        flat = as_flat(gradient)
        code = wire_dtype(flat.dtype, self.config.gradient_value_dtype, dense=mask is None)
        if quantised and self.config.gradient_bound is not None:
            entries = self.entries(mask, gradient.shape, gradient.device)
            values = flat if entries is None else flat[entries.view(-1)]
            if is_finite(values):
                values = values.to(torch.float32)
                lengths = self._gradient_lengths(rows, entries, gradient.device)
                square = torch.segment_reduce(values.square(), "mean", lengths=lengths, initial=0.0)
                bounds = self.config.gradient_bound * square.to(torch.float64).nan_to_num(0.0).sqrt()
                payload = self._bounded(quantise(values, lengths, bounds), lengths.tolist())
                return _closed(payload, _BOUNDED), values.numel()
        if mask is not None and mask.payload is not None:
            payload, stats = encode_at(self._backend(flat.device), flat, mask.payload, code)
            return _closed(payload[: stats.nbytes], 0), stats.nnz
        entries = self.entries(mask, gradient.shape, gradient.device)
        return self._values(flat if entries is None else flat[entries.view(-1)], code, 0)

    def decode_gradient(
        self, message: Tensor, like: Tensor, rows: Sequence[int], mask: Mask | None, source: int
    ) -> Tensor:
        """Gradients [rows, dim] of a message of :meth:`encode_gradient`, zero outside the mask.

        Raises:
            PayloadError: as for :meth:`decode`.
        """
        shape = torch.Size((sum(rows), self.dim))
        if not shape[0]:
            return like.new_zeros(shape)
        payload, kind = self._opened(message, source)
        kernels = self._backend(like.device)
        with self._blame("gradient", source):
            if not kind & _BOUNDED and mask is not None and mask.payload is not None:
                out = torch.zeros(shape.numel(), dtype=torch.float32, device=like.device)
                kernels.decode_shared_add(payload, mask.payload, out)
                return out.view(shape).to(like.dtype)
            entries = self.entries(mask, shape, like.device)
            if kind & _BOUNDED:
                lengths = self._gradient_lengths(rows, entries, like.device).tolist()
                values, _ = decode_bounded(payload, lengths, kernels)
            else:
                count = shape.numel() if entries is None else int(entries.sum())
                values = torch.zeros(count, dtype=torch.float32, device=like.device)
                kernels.decode_add(payload, values)
        values = values.to(like.dtype)
        if entries is None:
            return values.view(shape)
        return like.new_zeros(shape).masked_scatter_(entries, values)

    def entries(self, mask: Mask | None, shape: torch.Size, device: torch.device) -> Tensor | None:
        """A mask as bool [rows, dim]."""
        if mask is None or mask.payload is None:
            return None if mask is None else mask.entries
        return self._backend(device).decode_mask(mask.payload, shape.numel()).view(shape)

    # -- inside ---

    def _layers(
        self, x: Tensor, rows: Sequence[int], mask: Tensor | None, bounds: Tensor | None
    ) -> tuple[Tensor, Codes | None]:
        """What threshold and bounds leave: 1-D, and quantised where bounds apply."""
        flat = as_flat(x)
        if mask is not None:
            flat = torch.where(mask.view(-1), flat, torch.zeros_like(flat))
        if bounds is None:
            return flat, None
        return flat, quantise(flat.to(torch.float32), self._lengths(rows, x.device), bounds)

    def _values(self, flat: Tensor, code: ValueDtype, kind: int, *, zeros: bool = True) -> tuple[Tensor, int]:
        """Message of every entry (or every one but zeros), and their number."""
        writer = MessageWriter(flat.device)
        encoded = encode_all(self._backend(flat.device), flat, writer, code, zeros=zeros)
        writer.reserve(1).fill_(kind)
        writer.advance(1)
        return writer.message, encoded.nnz

    def _bounded(self, codes: Codes, lengths: Sequence[int]) -> Tensor:
        return encode_bounded(
            codes,
            lengths,
            self._backend(codes.q.device),
            entropy=self.config.entropy,
            repeats=not self.config.deduplicate,
        )

    def _lengths(self, rows: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device) * self.dim

    def _gradient_lengths(self, rows: Sequence[int], mask: Tensor | None, device: torch.device) -> Tensor:
        """Entries of each segment of a gradient message."""
        if mask is None:
            return self._lengths(rows, device)
        counts = torch.tensor(rows, dtype=torch.int64, device=device)
        per_row = mask.sum(dim=1).to(torch.float64)
        return torch.segment_reduce(per_row, "sum", lengths=counts, initial=0.0).to(torch.int64)

    def _opened(self, message: Tensor, source: int) -> tuple[Tensor, int]:
        kind = int(message[-1]) if message.numel() else -1
        if not 0 <= kind <= _BOUNDED | _MASKED:
            what = "no message" if kind < 0 else f"a message of unknown kind {kind}"
            raise PayloadError(f"{self.name}: {what} from rank {source} of the group")
        return message[:-1], kind

    @contextmanager
    def _blame(self, what: str, source: int) -> Iterator[None]:
        try:
            yield
        except PayloadError as error:
            raise PayloadError(f"{self.name}: {what} from rank {source} of the group: {error}") from error


def is_finite(flat: Tensor) -> bool:
    """Whether the kernels take all of ``flat`` for finite: magnitudes below 2**126."""
    return within(flat, OVERFLOW_MAGNITUDE)


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _closed(payload: Tensor, kind: int) -> Tensor:
    """A message: the payload, then one byte that says how to read it."""
    return torch.cat([payload, torch.tensor([kind], dtype=torch.uint8, device=payload.device)])
