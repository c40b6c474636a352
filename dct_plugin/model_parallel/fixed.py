"""Messages whose size both ends know in advance, for pipelines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compression.stream import Encoded
from ..errors import PayloadError, blamed
from ..transport import lost_ranks
from .compressors.compressor import NUMBER_NBYTES
from .stream import ActivationStream


class Kept(NamedTuple):
    """The part of a forward message that a rank keeps until the gradient has been exchanged.

    Attributes:
        number: The sender's number of the message.
        content: The compressor's part.
    """

    number: int
    content: Any


class FixedMessages:
    """Messages between two ranks whose size follows from shape and configuration alone.

    A message is a number (int64), the compressor's payload, and padding to the fixed size. The number
    names the forward message of a gradient, so several may be in flight in any order.

    Args:
        stream: Compressor; the receiver's needs the same settings and name.
    """

    def __init__(self, stream: ActivationStream) -> None:
        self.stream = stream

    def nbytes(
        self, shape: torch.Size, dtype: torch.dtype, *, gradient: bool = False, kept: Kept | None = None
    ) -> int:
        """Return the size of every forward (or ``gradient``) message about a tensor.

        With ``kept``, that of the gradient message that answers it and holds no room to spare.
        """
        if gradient:
            content = None if kept is None else kept.content
            return NUMBER_NBYTES + self.stream.gradients.nbytes(shape, dtype, content)
        return NUMBER_NBYTES + self.stream.activations.nbytes(shape, dtype)

    def encode(self, tensor: Tensor, number: int) -> tuple[Tensor, Kept, Encoded]:
        """Return the forward message of ``tensor``, the part to keep until its gradient returns, and the
        statistics.
        """
        written = self.stream.activations.encode([tensor])
        message = _numbered(number, written.messages[0], self.nbytes(tensor.shape, tensor.dtype))
        return message, Kept(number, written.kept[0]), written.encoded

    def decode(self, message: Tensor, out: Tensor) -> Kept:
        """Fill ``out`` (contiguous) from a forward message.

        Raises:
            PayloadError: The message is malformed or of a tensor of another size.
        """
        number = number_of(message)
        with blamed(f"{self.stream.name}: message {number}"):
            return Kept(number, self.stream.activations.decode(message[NUMBER_NBYTES:], out.zero_(), 0))

    def encode_gradient(self, gradient: Tensor, kept: Kept, *, exact: bool = False) -> tuple[Tensor, Encoded]:
        """Return the gradient message for ``kept``, and its statistics.

        ``exact`` leaves no room to spare, for receivers that know which message is answered next.
        """
        body, encoded = self.stream.gradients.encode(gradient, kept.content)
        size = self.nbytes(gradient.shape, gradient.dtype, gradient=True, kept=kept if exact else None)
        return _numbered(kept.number, body, size), encoded

    def decode_gradient(self, message: Tensor, awaited: dict[int, Kept], out: Tensor) -> None:
        """Fill ``out`` from a gradient message, and remove its forward message from ``awaited``.

        Raises:
            PayloadError: The message is malformed, or answers none of ``awaited``.
        """
        number = number_of(message)
        kept = awaited.pop(number, None)
        if kept is None:
            known = ", ".join(str(n) for n in sorted(awaited)) or "none"
            raise PayloadError(f"{self.stream.name}: gradient of message {number}; awaited are {known}")
        with blamed(f"{self.stream.name}: gradient of message {number}"):
            self.stream.gradients.decode(message[NUMBER_NBYTES:], kept.content, out.zero_())


def number_of(message: Tensor) -> int:
    """Return the number with which a message begins."""
    with lost_ranks.reported("receipt of a message of activations"):
        return int(lost_ranks.received(message[:NUMBER_NBYTES], None).view(torch.int64))


def _numbered(number: int, body: Tensor, size: int) -> Tensor:
    """Return ``body`` behind its number, with padding to ``size`` bytes."""
    message = torch.zeros(size, dtype=torch.uint8, device=body.device)
    start = torch.tensor([number], dtype=torch.int64, device="cpu").view(torch.uint8)
    message[:NUMBER_NBYTES] = start.to(body.device)
    message[NUMBER_NBYTES : NUMBER_NBYTES + body.numel()] = body
    return message
