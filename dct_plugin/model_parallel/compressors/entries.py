"""Entries and their positions, as payloads of the kernels: what threshold and topk have in common."""

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
from .compressor import NUMBER_NBYTES, AnsweringCompressor, Site, Written

#: Room of a message of fixed size, as a multiple of the target density: that is what crosses. Entries that do
#: not fit are dropped like entries below the threshold.
CAPACITY = 1.0


class KeptEntries(AnsweringCompressor[EntriesMethod]):
    """Some entries cross with their positions; gradients come back as values there.

    Both ends keep the payload for its positions. That is the exact gradient of "choose, then send" (DCT-MP,
    Gupta et al., KDD 2021, section 4). A tensor with a non-finite entry arrives as NaN, and so does its
    gradient.
    """

    exact = False

    def __init__(self, config: EntriesMethod, site: Site) -> None:
        super().__init__(config, site)
        self._stream = stream_of(site)

    @property
    def density(self) -> float:
        return self.config.density

    @abstractmethod
    def _taus(self, encoded: Encoded, flats: Sequence[Tensor]) -> Sequence[Tau]:
        """The threshold of each tensor."""

    def _observe(self, encoded: Encoded) -> None:
        """What was written, its figures read."""

    def _entries(self, numel: int, value_dtype: ValueDtype) -> int:
        """Most entries of a message about ``numel``: as many as a message of fixed size has room for, headers
        included; else all of them.
        """
        if not self.site.fixed_size:
            return numel
        room = int(CAPACITY * self.density * numel)
        itemsize = value_nbytes(VALUE_GROUP, value_dtype) / VALUE_GROUP
        header = int(-(-(NUMBER_NBYTES + HEADER_NBYTES) // itemsize))
        return max(1, min(numel, max(room // 2, room - header)))

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        code = wire_dtype(dtype, self.config.value_dtype)
        return payload_bound(shape.numel(), self._entries(shape.numel(), code), code)

    def encode(self, parts: Sequence[Tensor]) -> Written:
        flats = [as_flat(part) for part in parts]
        encoded = Encoded(numel=sum(flat.numel() for flat in flats), density=self.density)
        types = [wire_dtype(part.dtype, self.config.value_dtype) for part in parts]
        taus = self._taus(encoded, flats)
        messages = write_entries(
            self._stream,
            encoded,
            flats,
            types,
            taus,
            [self._entries(flat.numel(), code) for flat, code in zip(flats, types, strict=True)],
            step=self.site.step,
        )
        self._observe(encoded)
        return Written(messages, list(messages), encoded)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> Tensor:
        return add_entries(self._stream, message, out)

    def answer_nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Tensor | None = None) -> int:
        code = wire_dtype(dtype, self.site.answer.value_dtype)
        if kept is not None:
            return values_nbytes(kept, code)
        entries = self._entries(shape.numel(), wire_dtype(dtype, self.config.value_dtype))
        return payload_bound(shape.numel(), entries, code, IndexEncoding.SHARED_MASK)

    def encode_answer(self, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Encoded]:
        flat = as_flat(gradient)
        code = wire_dtype(gradient.dtype, self.site.answer.value_dtype)
        message, stats = encode_at(self._stream.backend(flat.device), flat, kept, code)
        return message, Encoded([stats], flat.numel(), self.density)

    def decode_answer(self, message: Tensor, kept: Tensor, out: Tensor) -> None:
        add_payload(self._stream.backend(out.device), _trimmed(message), out, kept)

    def pull_back(self, gradient: Tensor, kept: Tensor, received: Any) -> Tensor:
        mask = self._stream.backend(gradient.device).decode_mask(kept, gradient.numel())
        return gradient * mask.view(gradient.shape)


def stream_of(site: Site) -> Stream:
    """The stream that writes the payloads of a site."""
    threshold = Threshold.of_activations(site.name, site.rank)
    return Stream(threshold, name=site.name, kernels=site.kernels)


def write_entries(
    stream: Stream,
    encoded: Encoded,
    flats: Sequence[Tensor],
    types: Sequence[ValueDtype],
    taus: Sequence[Tau],
    capacities: Sequence[int],
    *,
    step: int = 0,
) -> list[Tensor]:
    """One payload for each tensor, their figures read at once; see :meth:`Stream.write`."""
    rooms = []
    for flat, code, tau, capacity in zip(flats, types, taus, capacities, strict=True):
        size = payload_bound(flat.numel(), capacity, code)
        rooms.append(torch.empty(size, dtype=torch.uint8, device=flat.device))
        start = first_position(step, flat.numel())
        job = Job(flat, None, tau, rooms[-1], capacity=capacity, start=start, value_dtype=code)
        stream.write(encoded, job)
    read_stats(encoded.stats)
    return [room[: stats.nbytes].clone() for room, stats in zip(rooms, encoded.stats, strict=True)]


def add_entries(stream: Stream, message: Tensor, out: Tensor) -> Tensor:
    """Add the payload with which a message begins to ``out``; returns the payload."""
    payload = _trimmed(message)
    add_payload(stream.backend(out.device), payload, out)
    return payload


def _trimmed(message: Tensor) -> Tensor:
    """Without padding."""
    return message[: Header.parse(header_bytes(message), message.numel()).nbytes]
