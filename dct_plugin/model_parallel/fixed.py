"""Messages whose size both ends know in advance, for pipelines."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.index import IndexEncoding
from ..codecs.payload import HEADER_NBYTES, Header, header_bytes, payload_bound
from ..codecs.values import VALUE_GROUP, ValueDtype, value_nbytes
from ..config import PipelineConfig
from ..errors import PayloadError
from ..stream import ActivationStream, Encoded, add_payload, as_flat

#: A message begins with its number, int64.
_PREAMBLE = 8


class Mask(NamedTuple):
    """What both ends keep of a forward message.

    Attributes:
        number: The sender's number of the message.
        payload: uint8, the forward payload, whose positions the gradient's values take.
        entries: How many positions those are.
    """

    number: int
    payload: Tensor
    entries: int


class FixedMessages:
    """Messages between a sender and a receiver whose size follows from shape and configuration alone.

    A message is a number (int64), one payload, and padding up to its capacity. The number says which forward
    message a gradient answers, so that several may be in flight in any order.

    Args:
        stream: Threshold and encoding; the receiver's needs the same settings. The capacity of its
            :class:`~dct_plugin.config.PipelineConfig` says how much room a message has, headers included.
    """

    def __init__(self, stream: ActivationStream) -> None:
        self.stream = stream
        self.capacity = stream.config.capacity if isinstance(stream.config, PipelineConfig) else 1.0

    def entries(self, numel: int, value_dtype: ValueDtype) -> int:
        """Most entries of a message about a tensor of ``numel`` entries."""
        density = self.stream.density
        if density >= 1.0:
            return numel
        room = int(self.capacity * density * numel)
        itemsize = value_nbytes(VALUE_GROUP, value_dtype) // VALUE_GROUP
        header = -(-(_PREAMBLE + HEADER_NBYTES) // itemsize)
        return max(1, min(numel, max(room // 2, room - header)))

    def nbytes(
        self, numel: int, dtype: torch.dtype, *, gradient: bool = False, mask: Mask | None = None
    ) -> int:
        """Size of every forward (or ``gradient``) message about a tensor of ``numel`` entries.

        With ``mask``, that of the gradient message that answers it and holds no room to spare.
        """
        forward = self.stream.value_dtype(dtype)
        entries = self.entries(numel, forward) if mask is None else mask.entries
        if gradient:
            value_dtype = self.stream.value_dtype(dtype, gradient=True)
            bound = payload_bound(numel, entries, value_dtype, IndexEncoding.SHARED_MASK)
        else:
            bound = payload_bound(numel, entries, forward)
        return _PREAMBLE + bound

    def encode(self, tensor: Tensor, number: int) -> tuple[Tensor, Mask, Encoded]:
        """The forward message of ``tensor``, the mask (a view of the message), and what was written."""
        flat = as_flat(tensor)
        message = self._message(flat, number, gradient=False)
        entries = self.entries(flat.numel(), self.stream.value_dtype(flat.dtype))
        encoded = self.stream.encode([flat], [message[_PREAMBLE:]], entries)
        payload = message[_PREAMBLE : _PREAMBLE + encoded.stats[0].nbytes]
        return message, Mask(number, payload, encoded.nnz), encoded

    def decode(self, message: Tensor, out: Tensor) -> Mask:
        """Fill ``out`` (contiguous) from a forward message; the mask is a view of the message.

        Raises:
            PayloadError: The message is malformed or of a tensor of another size.
        """
        mask = self._open(message)
        add_payload(self.stream.backend(out.device), mask.payload, out.zero_())
        return mask

    def encode_gradient(self, gradient: Tensor, mask: Mask, *, exact: bool = False) -> tuple[Tensor, Encoded]:
        """The message that answers ``mask``: the gradient's values there.

        ``exact`` leaves no room to spare, for receivers that know which mask is answered next.
        """
        flat = as_flat(gradient)
        message = self._message(flat, mask.number, gradient=True, mask=mask if exact else None)
        code = self.stream.value_dtype(flat.dtype, gradient=True)
        kernels = self.stream.backend(flat.device)
        stats = kernels.encode_shared(flat, mask.payload, code, message[_PREAMBLE:])
        return message, Encoded([stats], flat.numel(), self.stream.density)

    def decode_gradient(self, message: Tensor, masks: dict[int, Mask], out: Tensor) -> Mask:
        """Fill ``out`` from a gradient message; the mask it answers is taken out of ``masks``.

        Raises:
            PayloadError: The message is malformed, or answers none of ``masks``.
        """
        number, payload, _ = self._open(message)
        mask = masks.pop(number, None)
        if mask is None:
            known = ", ".join(str(n) for n in sorted(masks)) or "none"
            raise PayloadError(f"{self.stream.name}: gradient of message {number}; awaited are {known}")
        add_payload(self.stream.backend(out.device), payload, out.zero_(), mask.payload)
        return mask

    def _message(self, flat: Tensor, number: int, *, gradient: bool, mask: Mask | None = None) -> Tensor:
        size = self.nbytes(flat.numel(), flat.dtype, gradient=gradient, mask=mask)
        message = torch.empty(size, dtype=torch.uint8, device=flat.device)
        message[:_PREAMBLE] = torch.tensor([number], dtype=torch.int64).view(torch.uint8).to(flat.device)
        return message

    def _open(self, message: Tensor) -> Mask:
        number = int(message[:_PREAMBLE].cpu().view(torch.int64))
        body = message[_PREAMBLE:]
        try:
            header = Header.parse(header_bytes(body), body.numel())
        except PayloadError as error:
            raise PayloadError(f"{self.stream.name}: message {number}: {error}") from error
        return Mask(number, body[: header.nbytes], header.nnz)
