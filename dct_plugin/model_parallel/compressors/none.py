"""Everything, in the tensor's own type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...codecs.payload import payload_bound
from ...config.methods import Method
from ...stream import Encoded, as_flat, wire_dtype
from .compressor import ActivationCompressor, Site, Written
from .entries import add_entries, stream_of, write_entries


class Whole(ActivationCompressor[Method]):
    """What crosses in warm-up steps, and where nothing is to be left out; finite entries arrive bitwise."""

    exact = False  # one that holds a non-finite entry is short

    def __init__(self, config: Method, site: Site) -> None:
        super().__init__(config, site)
        self._stream = stream_of(site)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return payload_bound(shape.numel(), None, wire_dtype(dtype, dense=True))

    def encode(self, parts: Sequence[Tensor]) -> Written:
        encoded = Encoded(numel=sum(part.numel() for part in parts))
        flats = [as_flat(part) for part in parts]
        messages = write_entries(
            self._stream,
            encoded,
            flats,
            [wire_dtype(part.dtype, dense=True) for part in parts],
            [0.0] * len(flats),
            [flat.numel() for flat in flats],
        )
        return Written(messages, [None] * len(messages), encoded)

    def decode(self, message: Tensor, out: Tensor, peer: int) -> None:
        add_entries(self._stream, message, out)
