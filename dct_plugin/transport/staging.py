"""Copies of messages on the device that a group can send from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Staging:
    """Copies between the device of the messages and the one that the transport sends from.

    Where both are the same, nothing is copied.

    Args:
        rank: Position of this rank, whose messages to itself are never copied.
        device: Device of the messages.
        transport_device: Device that the transport sends from.
    """

    def __init__(self, rank: int, device: torch.device, transport_device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._transport_device = transport_device

    def to_send(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Return ``messages`` for the transport; a message that all ranks get is copied once."""
        if self._transport_device == self._device:
            return list(messages)
        copies = {id(m): m.to(self._transport_device) for r, m in enumerate(messages) if r != self._rank}
        empty = torch.empty(0, dtype=torch.uint8, device=self._transport_device)
        return [empty if r == self._rank else copies[id(m)] for r, m in enumerate(messages)]

    @contextmanager
    def on_transport(self, buffer: Tensor) -> Iterator[Tensor]:
        """Within the block, the transport may read and write ``buffer`` in what this gives."""
        copied = buffer.to(self._transport_device)
        yield copied
        if copied is not buffer:
            buffer.copy_(copied)

    def received(self, received: Sequence[Tensor], own: Tensor) -> list[Tensor]:
        """Return the messages that were received, with this rank's own message to itself among them."""
        return [own if r == self._rank else m.to(self._device) for r, m in enumerate(received)]
