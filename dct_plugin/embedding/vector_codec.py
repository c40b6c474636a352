"""Coding of the numbers of a message: error-bounded codes, or values of one floating type.

A message is a payload and one byte that says how to read it. Error-bounded codes (Feng et al., SC 2024,
arXiv:2407.04272) of all ranks are written in one call, and read in one call: ``|x - decoded| <= bound`` holds
for every entry. Kernels of the host code entropy (:mod:`~dct_plugin.kernels.embedding`); with others, codes
have a fixed number of bits per table (:mod:`~dct_plugin.kernels.packed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.payload import OVERFLOW_MAGNITUDE, Header, Payload
from ..codecs.stats import read_stats
from ..codecs.values import ValueDtype
from ..compression.stream import encode_all
from ..config import EmbeddingChannelConfig
from ..errors import PayloadError, blamed
from ..kernels import Backend, packed
from ..kernels import embedding as kernels
from ..kernels.embedding import Encoded, IntArray, Outgoing

#: Bits of a message's last byte: the payload holds error-bounded codes, in a fixed number of bits per table;
#: or the message is plain values, whose type's number stands behind these bits.
BOUNDED, PACKED, PLAIN = 1, 4, 8
_TYPES = {ValueDtype.FP32: torch.float32, ValueDtype.BF16: torch.bfloat16, ValueDtype.FP16: torch.float16}
_TYPE_SHIFT = 4
#: Picoseconds per bit at 1 Mbit/s: any code's work is worth its bits.
_SLOWEST = 1_000_000


def plain_kind(code: ValueDtype, backend: Backend) -> int:
    """Return the last byte of a message of plain values; 0 where they are a payload."""
    return PLAIN | code << _TYPE_SHIFT if code in _TYPES and not backend.lengths_on_host else 0


#: The last bytes of messages of plain values.
PLAIN_KINDS = frozenset(PLAIN | code << _TYPE_SHIFT for code in _TYPES)


class OutgoingValues(NamedTuple):
    """Values of one floating type for one rank."""

    flat: Tensor
    code: ValueDtype
    kind: int
    """The message's last byte, but for the type of plain values."""
    zeros: bool = True
    """Every entry crosses; else every one but zeros."""


class WrittenValues(NamedTuple):
    """The message of :class:`OutgoingValues`."""

    message: Tensor
    kind: int
    """Its last byte."""
    number: int
    """The entries that cross."""
    payload: Payload | None
    """The payload in the message; None if the message has plain values."""


@dataclass
class VectorCodec:
    """Codes the vectors and gradients of one embedding exchange.

    Args:
        config: ``dct.embedding``.
        name: Name of the exchange in errors.
        backend: Gives the kernels for tensors on a device.

    Attributes:
        bit_cost: Picoseconds that a bit takes on the wire (:meth:`observe`), against which the work of the
            smaller code is weighed for each table.
    """

    config: EmbeddingChannelConfig
    name: str
    backend: Callable[[torch.device], Backend]
    bit_cost: int = _SLOWEST

    def observe(self, nbytes: float, seconds: float) -> None:
        """Note how long an exchange took; the fastest of the last ones tells of the link."""
        if nbytes:
            measured = int(1e12 * seconds / (8 * nbytes))
            self.bit_cost = min(measured, self.bit_cost + self.bit_cost // 16 + 1, _SLOWEST)

    # -- error-bounded codes ---

    def encode(
        self, parts: Mapping[int, Outgoing], *, relative: float | None = None, decoded: bool = False
    ) -> dict[int, Encoded]:
        """Quantise and code segments of entries, by rank.

        Args:
            relative: Bounds relative to the root mean square of each segment, in place of those of ``parts``.
            decoded: Whether the decoded values of parts that are sent are wanted, too.
        """
        if not parts:
            return {}
        outgoing = list(parts.values())
        backend = self.backend(outgoing[0].x.device)
        if not backend.codes_entropy:
            outgoing = [part._replace(kind=part.kind | PACKED) for part in outgoing]
            return dict(zip(parts, packed.encode(backend, outgoing, relative), strict=True))
        if relative is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                bounds = [relative * square**0.5 for square in kernels.mean_squares(outgoing)]
            outgoing = [part._replace(bounds=each) for part, each in zip(outgoing, bounds, strict=True)]
        encoded = kernels.encode(outgoing, self.bit_cost, decoded=decoded)
        return dict(zip(parts, encoded, strict=True))

    def decode(
        self,
        payloads: Mapping[int, Tensor],
        lengths: Mapping[int, IntArray],
        outs: Mapping[int, Tensor],
        what: str = "message",
        *,
        packed_ones: Collection[int] = (),
    ) -> None:
        """Decode payloads of error-bounded codes, by rank, into ``outs``, fp32.

        Args:
            lengths: int64 [segments], entries of each segment.
            what: Name of the payloads in errors.
            packed_ones: The ranks whose codes have a fixed number of bits per table.

        Raises:
            PayloadError: A payload is damaged, or not of these segments; names the rank.
        """
        coded = [source for source in payloads if source not in packed_ones]
        for sources, decode in ((coded, kernels.decode), (list(packed_ones), self._unpacked)):
            if not sources:
                continue
            faults = decode(
                [payloads[s] for s in sources], [lengths[s] for s in sources], [outs[s] for s in sources]
            )
            for source, fault in zip(sources, faults, strict=True):
                if fault is not None:
                    with self.blame(what, source):
                        raise PayloadError(fault)

    def _unpacked(
        self, payloads: Sequence[Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
    ) -> list[str | None]:
        return packed.decode(self.backend(outs[0].device), payloads, lengths, outs)

    # -- values of one floating type ---

    def encode_values(self, parts: Mapping[int, OutgoingValues]) -> dict[int, WrittenValues]:
        """Write values, by rank. Where every entry crosses and lengths stay on a device, there is no header:
        the host knows the size. The sizes of all other messages are read at once.
        """
        messages, written, encoded = {}, dict[int, WrittenValues](), {}
        if not parts:
            return written
        backend = self.backend(next(iter(parts.values())).flat.device)
        with backend.batched():
            for rank, (flat, code, kind, zeros) in parts.items():
                if zeros and (plain := plain_kind(code, backend)):
                    values = flat.to(_TYPES[code]).view(torch.uint8)
                    message = values.new_empty(len(values) + 1)
                    message[:-1] = values
                    message[-1:].fill_(kind | plain)
                    written[rank] = WrittenValues(message, kind | plain, flat.numel(), None)
                    continue
                messages[rank] = writer = MessageWriter(flat.device)
                encoded[rank] = encode_all(backend, flat, writer, code, zeros=zeros)
                writer.reserve(1).fill_(kind)
                writer.advance(1)
        read_stats(itertools.chain.from_iterable(each.stats for each in encoded.values()))
        for rank, each in encoded.items():
            flat, code, kind, _ = parts[rank]
            message, totals = messages[rank].message, each.totals()
            if backend.lengths_on_host:
                payload = Payload.from_tensor(message[:-1], verify=False)
            else:  # kernels read the checksums themselves
                header = Header(code, totals.nonfinite, flat.numel(), totals.nnz)
                payload = Payload(message[:-1], header)
            written[rank] = WrittenValues(message, kind, totals.nnz, payload)
        return written

    def add_values(self, message: Tensor, kind: int, out: Tensor, payload: Payload | None) -> None:
        """Add the values of a message to ``out``, fp32 zeros; one that is not finite makes all of them NaN.

        Args:
            kind: The message's last byte.
            payload: The payload in the message; None if the message has plain values.

        Raises:
            PayloadError: The message is damaged, or not of as many entries.
        """
        if payload is not None:
            self.backend(out.device).decode_add(payload, out)
            return
        dtype = _TYPES[ValueDtype(kind >> _TYPE_SHIFT)]
        if len(message) - 1 != out.numel() * dtype.itemsize:
            raise PayloadError(f"{len(message) - 1} bytes are no {out.numel()} values of {dtype}")
        values = message[:-1].view(dtype)
        out += values
        out.masked_fill_((values.abs() < OVERFLOW_MAGNITUDE).logical_not_().any(), torch.nan)

    # -- errors ---

    def blame(self, what: str, source: int) -> AbstractContextManager[None]:
        """Name the sender in errors about a message."""
        return blamed(f"{self.name}: {what} from rank {source} of the group")
