"""Everything, in the tensor's own type; and the base class of compressors whose messages are payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...codecs.payload import Header, header_bytes, payload_bound
from ...codecs.stats import read_stats
from ...codecs.values import ValueDtype
from ...compression.stream import START_STRIDE, Encoded, Stream, add_payload, as_flat, wire_dtype
from ...compression.thresholds import Threshold
from ...kernels import Job
from ...kernels.job import Tau
from .compressor import ActivationCompressor, Settings, Site, Written


class Whole(ActivationCompressor[Settings]):
    """All entries cross, in warm-up steps and if nothing is to be left out; finite ones arrive bitwise.

    Messages are payloads of the kernels.
    """

    # A message that holds a non-finite entry is shorter than others.
    exact = False

    def __init__(self, config: Settings, site: Site, name: str = "") -> None:
        super().__init__(config, site, name)
        threshold = Threshold.of_activations(self.name, site.rank)
        self._stream = Stream(threshold, name=self.name, kernels=site.kernels)
        self.backend = self._stream.backend

    def value_type(self, dtype: torch.dtype) -> ValueDtype:
        """Return the type of the values on the wire."""
        return wire_dtype(dtype, dense=True)

    def entries(self, numel: int, value_dtype: ValueDtype) -> int:
        """Return the most entries of a message about ``numel``."""
        return numel

    def _tau(self, encoded: Encoded, flats: Sequence[Tensor]) -> Tau:
        """Return the threshold of these tensors."""
        return 0.0

    def _observe(self, encoded: Encoded) -> None:
        """Take note of the figures of messages."""

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        numel, code = shape.numel(), self.value_type(dtype)
        return payload_bound(numel, self.entries(numel, code), code, dense=self.density >= 1.0)

    def encode(self, parts: Sequence[Tensor]) -> Written:
        """Write one payload for each tensor; their figures are read at once."""
        flats = [as_flat(part) for part in parts]
        encoded = Encoded(numel=sum(flat.numel() for flat in flats), density=self.density)
        tau = self._tau(encoded, flats)
        buffers = []
        for part, flat in zip(parts, flats, strict=True):
            code = self.value_type(part.dtype)
            capacity = self.entries(flat.numel(), code)
            size = self.nbytes(part.shape, part.dtype)
            buffers.append(torch.empty(size, dtype=torch.uint8, device=flat.device))
            start = self.site.step * START_STRIDE
            job = Job(flat, None, tau, buffers[-1], capacity=capacity, start=start, value_dtype=code)
            encoded.stats.append(self.backend(flat.device).compress(job))
        read_stats(encoded.stats)
        self._observe(encoded)
        messages = [
            buffer[: stats.nbytes].clone() for buffer, stats in zip(buffers, encoded.stats, strict=True)
        ]
        return Written(messages, [None] * len(messages), encoded)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> Any:
        add_payload(self.backend(out.device), without_padding(message), out)


def without_padding(message: Tensor) -> Tensor:
    """Return the payload with which a message begins."""
    return message[: Header.parse(header_bytes(message), message.numel()).nbytes]
