"""The base classes of compressors that write payloads of the kernels, and of threshold and topk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...codecs.index import IndexEncoding
from ...codecs.payload import HEADER_NBYTES, Header, header_bytes, payload_bound
from ...codecs.stats import read_stats
from ...codecs.values import VALUE_GROUP, ValueDtype, value_nbytes
from ...config.methods import EntriesMethod
from ...kernels import Job, Tau
from ...stream import (
    Encoded,
    Stream,
    add_payload,
    as_flat,
    encode_at,
    first_position,
    values_nbytes,
    wire_dtype,
)
from ...thresholds import Threshold
from .compressor import (
    NUMBER_NBYTES,
    ActivationCompressor,
    AnsweringCompressor,
    Settings,
    Site,
    Written,
)

#: Room of a message of fixed size, as a multiple of the target density: that is what crosses. Entries that do
#: not fit are dropped like entries below the threshold.
CAPACITY = 1.0


class PayloadCompressor(ActivationCompressor[Settings]):
    """The base class of compressors whose messages are payloads of the kernels."""

    exact = False

    def __init__(self, config: Settings, site: Site) -> None:
        super().__init__(config, site)
        threshold = Threshold.of_activations(site.name, site.rank)
        self._stream = Stream(threshold, name=site.name, kernels=site.kernels)

    @abstractmethod
    def _value_type(self, dtype: torch.dtype) -> ValueDtype:
        """Return the type of the values on the wire."""

    def _entries(self, numel: int, value_dtype: ValueDtype) -> int:
        """Return the most entries of a message about ``numel``."""
        return numel

    @abstractmethod
    def _taus(self, encoded: Encoded, flats: Sequence[Tensor]) -> Sequence[Tau]:
        """Return the threshold of each tensor."""

    def _observe(self, encoded: Encoded) -> None:
        """Take note of the figures of messages."""
        return

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        code = self._value_type(dtype)
        return payload_bound(shape.numel(), self._entries(shape.numel(), code), code)

    def _write(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Encoded]:
        """Write one payload for each tensor; their figures are read at once."""
        flats = [as_flat(part) for part in parts]
        encoded = Encoded(numel=sum(flat.numel() for flat in flats), density=self.density)
        taus = self._taus(encoded, flats)
        buffers = []
        for part, flat, tau in zip(parts, flats, taus, strict=True):
            code = self._value_type(part.dtype)
            capacity = self._entries(flat.numel(), code)
            size = payload_bound(flat.numel(), capacity, code)
            buffers.append(torch.empty(size, dtype=torch.uint8, device=flat.device))
            start = first_position(self.site.step, flat.numel())
            job = Job(flat, None, tau, buffers[-1], capacity=capacity, start=start, value_dtype=code)
            self._stream.write(encoded, job)
        read_stats(encoded.stats)
        self._observe(encoded)
        messages = [
            buffer[: stats.nbytes].clone() for buffer, stats in zip(buffers, encoded.stats, strict=True)
        ]
        return messages, encoded

    def _add(self, message: Tensor, out: Tensor) -> Tensor:
        """Add the payload with which a message begins to ``out``; return the payload."""
        payload = _without_padding(message)
        add_payload(self._stream.backend(out.device), payload, out)
        return payload


class KeptEntries(PayloadCompressor[EntriesMethod], AnsweringCompressor[EntriesMethod]):
    """Some entries cross with their positions; gradients come back as values there.

    Both ends keep the payload for its positions. That is the exact gradient of "choose, then send" (DCT-MP,
    Gupta et al., KDD 2021, section 4). A tensor with a non-finite entry arrives as NaN, and so does its
    gradient.
    """

    @property
    def density(self) -> float:
        return self.config.density

    def _value_type(self, dtype: torch.dtype) -> ValueDtype:
        return wire_dtype(dtype, self.config.value_dtype)

    def _entries(self, numel: int, value_dtype: ValueDtype) -> int:
        """Return the most entries of a message about ``numel``: all, or as many as a message of fixed size
        has room for, headers included.
        """
        if not self.site.fixed_size:
            return numel
        room = int(CAPACITY * self.density * numel)
        itemsize = value_nbytes(VALUE_GROUP, value_dtype) / VALUE_GROUP
        header = int(-(-(NUMBER_NBYTES + HEADER_NBYTES) // itemsize))
        return max(1, min(numel, max(room // 2, room - header)))

    def encode(self, parts: Sequence[Tensor]) -> Written:
        messages, encoded = self._write(parts)
        return Written(messages, list(messages), encoded)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> Tensor:
        return self._add(message, out)

    def answer_nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Tensor | None = None) -> int:
        code = wire_dtype(dtype, self.site.answer.value_dtype)
        if kept is not None:
            return values_nbytes(kept, code)
        entries = self._entries(shape.numel(), self._value_type(dtype))
        return payload_bound(shape.numel(), entries, code, IndexEncoding.SHARED_MASK)

    def encode_answer(self, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Encoded]:
        flat = as_flat(gradient)
        code = wire_dtype(gradient.dtype, self.site.answer.value_dtype)
        message, stats = encode_at(self._stream.backend(flat.device), flat, kept, code)
        return message, Encoded([stats], flat.numel(), self.density)

    def decode_answer(self, message: Tensor, kept: Tensor, out: Tensor) -> None:
        add_payload(self._stream.backend(out.device), _without_padding(message), out, kept)

    def pull_back(self, gradient: Tensor, kept: Tensor, received: Any) -> Tensor:
        mask = self._stream.backend(gradient.device).decode_mask(kept, gradient.numel())
        return gradient * mask.view(gradient.shape)


def _without_padding(message: Tensor) -> Tensor:
    return message[: Header.parse(header_bytes(message), message.numel()).nbytes]
