"""Vectors and their gradients as messages, one for each rank.

Rows are in the order of the request that named them. Under a threshold the entries that reach it cross, and
gradients come back at these entries only: as values without positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..codecs.payload import HEADER_NBYTES, Payload
from ..codecs.values import ValueDtype
from ..compression.stream import as_flat, wire_dtype
from ..errors import PayloadError
from ..kernels.backend import mask_of
from ..kernels.embedding import FloatArray, IntArray, Outgoing
from .vector_codec import BOUNDED, PACKED, PLAIN, PLAIN_KINDS, OutgoingValues, VectorCodec, WrittenValues

# Bit of a message's last byte: gradients come back at the entries that crossed only.
_MASKED = 2


class VectorBlock(NamedTuple):
    """Vectors for one rank.

    Attributes:
        x: [rows, dim], the rows of several tables one after the other.
        rows: Rows of each table.
        mask: bool [rows, dim], entries that reach the threshold; None: no threshold applies.
        bounds: Absolute error bounds, float64 [tables]; None: nothing is quantised.
    """

    x: Tensor
    rows: Sequence[int]
    mask: Tensor | None
    bounds: FloatArray | None


class Messages(NamedTuple):
    """The messages to all ranks, in rank order.

    Attributes:
        data: uint8 each; that to this rank is empty.
        masks: Where gradients come back, bool [rows, dim]; None: everywhere.
        own: [rows, dim], what this rank has for itself.
        kept: Entries that cross.
    """

    data: list[Tensor]
    masks: list[Tensor | None]
    own: Tensor
    kept: int


class VectorMessages:
    """Writes and reads the messages of one embedding exchange.

    Args:
        codec: Codes the numbers.
        dim: Width of the vectors.
    """

    def __init__(self, codec: VectorCodec, dim: int) -> None:
        self.codec = codec
        self.config = codec.config
        self.dim = dim

    def encode(self, blocks: Sequence[VectorBlock], own: int) -> Messages:
        """Write the vectors for all ranks.

        Those for rank ``own`` stay here, and become what a peer would decode: rows of this rank pass the same
        layers.
        """
        flats = [_masked(block) for block in blocks]
        outgoing, values = {}, {}
        for r, (block, flat) in enumerate(zip(blocks, flats, strict=True)):
            if not block.x.numel():
                continue
            kind, code = self._masked_bit(block), self._code(block, flat)
            if block.bounds is not None:
                x, lengths = flat.to(torch.float32), self.lengths(block.rows)
                outgoing[r] = Outgoing(x, lengths, block.bounds, send=r != own, kind=BOUNDED | kind)
            elif r != own or code is not ValueDtype.lossless(flat.dtype):
                values[r] = OutgoingValues(flat, code, kind, zeros=block.mask is None)
        decoded = any(blocks[r].mask is not None for r in outgoing)
        coded = self.codec.encode(outgoing, decoded=decoded)
        data = [block.x.new_empty(0, dtype=torch.uint8) for block in blocks]
        masks = [block.mask for block in blocks]
        vectors, kept, counted = blocks[own].x, 0, []
        written = self.codec.encode_values(values)
        for r, (block, flat) in enumerate(zip(blocks, flats, strict=True)):
            if not block.x.numel():
                continue
            if r in coded:
                if (rounded := coded[r].decoded) is not None:  # else: not finite, and nobody rounds that
                    flat = rounded
                if block.mask is not None:
                    masks[r] = (flat != 0).view(block.x.shape)
                if (message := coded[r].message) is not None:
                    data[r] = message
                    kept += 0 if block.mask is not None else len(flat)
                    counted += [] if block.mask is None else [flat.count_nonzero()]
            elif r == own:
                flat = self._rounded(flat, written.get(r))
            else:
                data[r], kept = written[r].message, kept + written[r].number
            if r == own:
                vectors = flat.view(block.x.shape).to(block.x.dtype)
        kept += int(torch.stack(counted).sum()) if counted else 0
        return Messages(data, [None] * len(blocks) if self.config.dense_gradient else masks, vectors, kept)

    def encode_gradients(
        self,
        parts: Sequence[Tensor],
        own: int,
        rows: Sequence[Sequence[int]],
        masks: Sequence[Tensor | None],
        *,
        quantised: bool,
    ) -> Messages:
        """Write the gradients [rows, dim] of the vectors that came from all ranks.

        Args:
            rows, masks: Per rank: rows of each segment, and the mask of its message.
            quantised: ``gradient_bound`` applies, relative to the root mean square of each table's gradient.
        """
        data = [part.new_empty(0, dtype=torch.uint8) for part in parts]
        peers = [r for r, part in enumerate(parts) if part.numel() and r != own]
        masked = {r: mask for r in peers if (mask := masks[r]) is not None}
        (counted,) = _read([self._counts(rows, masked)])
        lengths = self._lengths(peers, rows, masked, counted)
        flats = {r: as_flat(parts[r]) for r in peers}
        flats |= _entries({r: flats[r] for r in masked}, masked, [int(lengths[r].sum()) for r in masked])
        outgoing, values, kept = {}, {}, 0
        for r, flat in flats.items():
            if quantised:
                bounds = np.zeros(len(lengths[r]))
                outgoing[r] = Outgoing(flat.to(torch.float32), lengths[r], bounds, kind=BOUNDED)
                kept += flat.numel()
            else:
                code = wire_dtype(flat.dtype, self.config.value_dtype, dense=r not in masked)
                values[r] = OutgoingValues(flat, code, 0)
        for r, written in self.codec.encode_values(values).items():
            data[r], kept = written.message, kept + written.number
        for r, encoded in self.codec.encode(outgoing, relative=self.config.gradient_bound or 0.0).items():
            assert encoded.message is not None
            data[r] = encoded.message
        mask = masks[own]
        gradient = parts[own] if mask is None else parts[own] * mask
        return Messages(data, [None] * len(parts), gradient, kept)

    def decode(
        self,
        messages: Sequence[Tensor],
        own: int,
        values: Tensor,
        rows: Sequence[Sequence[int]],
        masks: Sequence[Tensor | None] | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Read vectors, or the gradients that answer them.

        Args:
            messages: From all ranks; that of rank ``own`` is not read.
            values: Of rank ``own``, [rows, dim]; they give dtype and device.
            rows: Per rank, rows of each of its segments.
            masks: For gradients: the masks of the vectors that were sent to each rank.

        Returns:
            [sum of rows, dim] in rank order, gradients with zeros outside the masks; and the masks of
            vectors.

        Raises:
            PayloadError: A message is damaged, or not of these rows; names the rank.
        """
        what = "message" if masks is None else "gradient"
        counts = [sum(each) * self.dim for each in rows]
        out = torch.empty(sum(counts), dtype=torch.float32, device=values.device)
        slices = list(out.split(counts))
        found: list[Tensor | None] = [None] * len(rows)
        peers = [source for source, part in enumerate(slices) if part.numel() and source != own]
        masked = {s: mask for s in peers if masks is not None and (mask := masks[s]) is not None}
        # What tells how to read a message: the header of its payload, and its last byte.
        heads = [message[: max(len(message) - 1, 0)][:HEADER_NBYTES] for message in messages]
        last = [message[-1:] for message in messages]
        *read, counted = _read([*heads, *last, self._counts(rows, masked)])
        kinds = [each[0] if each else -1 for each in read[len(messages) :]]
        lengths = self._lengths(peers, rows, masked, counted)
        outs = {s: out.new_empty(lengths[s].sum()) if s in masked else slices[s] for s in peers}
        slices[own].copy_(values.reshape(-1))
        for source in peers:
            self._check_kind(kinds[source], source)
            if not kinds[source] & BOUNDED:
                message, head = messages[source], bytes(read[source])
                with self.codec.blame(what, source):
                    mask = self._add_values(message, kinds[source], head, outs[source].zero_())
                found[source] = None if mask is None else mask.view(-1, self.dim)
        bounded = [source for source in peers if kinds[source] & BOUNDED]
        packed_ones = [source for source in bounded if kinds[source] & PACKED]
        payloads = {source: messages[source][:-1] for source in bounded}
        self.codec.decode(payloads, lengths, outs, what, packed_ones=packed_ones)
        for source, mask in masked.items():
            slices[source].zero_().masked_scatter_(mask.view(-1), outs[source])
        for source in bounded:
            if kinds[source] & _MASKED:
                found[source] = (slices[source] != 0).view(-1, self.dim)
        return out.view(-1, self.dim).to(values.dtype), found

    def lengths(self, rows: Sequence[int]) -> IntArray:
        """Return the entries of each segment of so many rows."""
        return np.array(rows, dtype=np.int64) * self.dim

    # -- inside ---

    def _counts(self, rows: Sequence[Sequence[int]], masked: Mapping[int, Tensor]) -> Tensor:
        """Count the entries of masks, bool [rows, dim], in each segment of their ranks: int64 [segments]."""
        if not masked:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        joined = torch.cat([*masked.values()])
        ends = np.cumsum([0, *itertools.chain.from_iterable(rows[r] for r in masked)])
        until = torch.nn.functional.pad(joined.sum(dim=1).cumsum(0), (1, 0))
        return until[to_device(torch.from_numpy(ends), joined.device)].diff()

    def _lengths(
        self,
        ranks: Sequence[int],
        rows: Sequence[Sequence[int]],
        masked: Collection[int],
        counts: Sequence[int],
    ) -> dict[int, IntArray]:
        """Return the entries of each segment, by rank; ``counts``: those of :meth:`_counts`."""
        counted = iter(counts)
        return {
            r: np.array([next(counted) for _ in rows[r]], dtype=np.int64)
            if r in masked
            else self.lengths(rows[r])
            for r in ranks
        }

    def _masked_bit(self, block: VectorBlock) -> int:
        """Return :data:`_MASKED` if gradients come back at the entries that crossed only, else 0."""
        return 0 if block.mask is None or self.config.dense_gradient else _MASKED

    def _code(self, block: VectorBlock, flat: Tensor) -> ValueDtype:
        return wire_dtype(flat.dtype, self.config.value_dtype, dense=block.mask is None)

    def _rounded(self, flat: Tensor, written: WrittenValues | None) -> Tensor:
        """Return ``flat`` as a peer would decode it; ``written`` is None where values are exact."""
        if written is None:
            return flat
        decoded = torch.zeros(flat.numel(), dtype=torch.float32, device=flat.device)
        self.codec.add_values(written.message, written.kind, decoded, written.payload)
        return decoded

    def _add_values(self, message: Tensor, kind: int, head: bytes, out: Tensor) -> Tensor | None:
        """Add values of one floating type to ``out``, fp32 zeros. Return the mask of vectors under a
        threshold, bool [entries]; None for others.

        Args:
            kind: The message's last byte.
            head: Its first bytes.
        """
        payload = None
        if not kind & PLAIN:
            payload = Payload.from_tensor(message[:-1], verify=False, head=head)
        self.codec.add_values(message, kind, out, payload)
        if payload is None or not kind & _MASKED:
            return None
        return mask_of(self.codec.backend(out.device), payload, out.numel())

    def _check_kind(self, kind: int, source: int) -> None:
        coded = 0 <= kind <= BOUNDED | _MASKED | PACKED and kind & (BOUNDED | PACKED) != PACKED
        if not coded and kind not in PLAIN_KINDS:
            what = "no message" if kind < 0 else f"a message of unknown kind {kind}"
            raise PayloadError(f"{self.codec.name}: {what} from rank {source} of the group")


def _read(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of tensors, [any] each, with one look at their device."""
    filled = [each for each in tensors if each.numel()]
    numbers = iter(torch.cat(filled).tolist() if filled else ())
    return [[*itertools.islice(numbers, each.numel())] for each in tensors]


def _entries(
    flats: Mapping[int, Tensor], masks: Mapping[int, Tensor], counts: Sequence[int]
) -> dict[int, Tensor]:
    """Return the entries of 1-D tensors that masks name, by rank; ``counts``: their numbers. A mask as an
    index would have the host wait for each number.
    """
    if not flats:
        return {}
    joined, entries = torch.cat([*flats.values()]), torch.cat([mask.view(-1) for mask in masks.values()])
    total = sum(counts)
    places = torch.where(entries, entries.cumsum(0) - 1, total)
    found = joined.new_empty(total + 1).scatter_(0, places, joined)[:total]
    return dict(zip(flats, found.split([*counts]), strict=True))


def _masked(block: VectorBlock) -> Tensor:
    """Return the entries that reach the threshold, 1-D, with zeros in place of the others."""
    flat = as_flat(block.x)
    return flat if block.mask is None else torch.where(block.mask.view(-1), flat, torch.zeros_like(flat))
