"""A message: the payloads for one peer, one after the other in one buffer that is kept between steps."""

from __future__ import annotations

import torch
from torch import Tensor


class MessageWriter:
    """Growing uint8 buffer that payloads are encoded into in place.

    Args:
        device: Where the payloads are encoded.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._length = 0

    def clear(self) -> None:
        """Start a new message; the memory is kept."""
        self._length = 0

    def reserve(self, size: int) -> Tensor:
        """Room for ``size`` more bytes, uninitialised; valid until the next call."""
        needed = self._length + size
        if needed > self._buffer.numel():
            grown = torch.empty(needed + needed // 4, dtype=torch.uint8, device=self._buffer.device)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        return self._buffer[self._length : needed]

    def advance(self, size: int) -> None:
        """``size`` bytes of the reserved room were written."""
        self._length += size

    @property
    def message(self) -> Tensor:
        """What was written since :meth:`clear` (a view: gone at the next :meth:`clear`)."""
        return self._buffer[: self._length]
