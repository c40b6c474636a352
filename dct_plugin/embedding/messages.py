"""Vectors and their gradients as messages, one for each rank.

Rows are in the order of the request that named them. Under a threshold the entries that reach it cross, and
gradients come back at these entries only: as values without positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.values import ValueDtype
from ..compression.stream import as_flat, wire_dtype
from ..errors import PayloadError
from ..kernels.backend import mask_of
from ..kernels.embedding import FloatArray, IntArray, Outgoing
from .vector_codec import BOUNDED, PACKED, PLAIN_KINDS, VectorCodec, plain_kind

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
        outgoing = {}
        for r, (block, flat) in enumerate(zip(blocks, flats, strict=True)):
            if block.bounds is not None and block.x.numel():
                x, lengths = flat.to(torch.float32), self.lengths(block.rows)
                kind = BOUNDED | self._masked_bit(block)
                outgoing[r] = Outgoing(x, lengths, block.bounds, send=r != own, kind=kind)
        decoded = any(blocks[r].mask is not None for r in outgoing)
        coded = self.codec.encode(outgoing, decoded=decoded)
        data = [block.x.new_empty(0, dtype=torch.uint8) for block in blocks]
        masks = [block.mask for block in blocks]
        vectors, kept = blocks[own].x, 0
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
                    kept += len(flat) if block.mask is None else int(flat.count_nonzero())
            elif r == own:
                flat = self._rounded(block, flat)
            else:
                code, kind = self._code(block, flat), self._masked_bit(block)
                data[r], number = self.codec.encode_values(flat, code, kind, zeros=block.mask is None)
                kept += number
            if r == own:
                vectors = flat.view(block.x.shape).to(block.x.dtype)
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
        outgoing: dict[int, Outgoing] = {}
        gradient, kept = parts[own], 0
        for r, (part, mask) in enumerate(zip(parts, masks, strict=True)):
            if not part.numel():
                continue
            if r == own:
                gradient = part if mask is None else part * mask
                continue
            flat = as_flat(part) if mask is None else as_flat(part)[mask.view(-1)]
            if quantised:
                lengths = self.lengths(rows[r], mask)
                bounds = np.zeros(len(lengths))
                outgoing[r] = Outgoing(flat.to(torch.float32), lengths, bounds, kind=BOUNDED)
                kept += flat.numel()
            else:
                code = wire_dtype(flat.dtype, self.config.value_dtype, dense=mask is None)
                data[r], number = self.codec.encode_values(flat, code, 0)
                kept += number
        for r, encoded in self.codec.encode(outgoing, relative=self.config.gradient_bound or 0.0).items():
            assert encoded.message is not None
            data[r] = encoded.message
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
        bounded: dict[int, Tensor | None] = {}
        kinds = _kinds(messages)
        for source, (message, part) in enumerate(zip(messages, slices, strict=True)):
            mask = None if masks is None else masks[source]
            if source == own:
                part.copy_(values.reshape(-1))
            elif part.numel():
                self._check_kind(kinds[source], source)
                if kinds[source] & BOUNDED:
                    bounded[source] = mask
                    continue
                with self.codec.blame(what, source):
                    self._read_values(message, kinds[source], part.zero_(), mask)
                    if kinds[source] & _MASKED:
                        kept = mask_of(self.codec.backend(out.device), message[:-1], part.numel())
                        found[source] = kept.view(-1, self.dim)
        lengths = {s: self.lengths(rows[s], mask) for s, mask in bounded.items()}
        outs = {s: slices[s] if m is None else out.new_empty(lengths[s].sum()) for s, m in bounded.items()}
        packed_ones = [s for s in bounded if kinds[s] & PACKED]
        payloads = {s: messages[s][:-1] for s in bounded}
        self.codec.decode(payloads, lengths, outs, what, packed_ones=packed_ones)
        for source, mask in bounded.items():
            if mask is not None:
                slices[source].zero_().masked_scatter_(mask.view(-1), outs[source])
            if kinds[source] & _MASKED:
                found[source] = (slices[source] != 0).view(-1, self.dim)
        return out.view(-1, self.dim).to(values.dtype), found

    def lengths(self, rows: Sequence[int], entries: Tensor | None = None) -> IntArray:
        """Count the entries of each segment: of those in ``entries``, bool [rows, dim], if given."""
        counts = np.array(rows, dtype=np.int64)
        if entries is None:
            return counts * self.dim
        ends = np.cumsum(counts)
        kept = np.concatenate([[0], np.cumsum(entries.sum(dim=1).cpu().numpy())])
        return np.asarray(kept[ends] - kept[ends - counts], dtype=np.int64)

    # -- inside ---

    def _masked_bit(self, block: VectorBlock) -> int:
        """Return :data:`_MASKED` if gradients come back at the entries that crossed only, else 0."""
        return 0 if block.mask is None or self.config.dense_gradient else _MASKED

    def _code(self, block: VectorBlock, flat: Tensor) -> ValueDtype:
        return wire_dtype(flat.dtype, self.config.value_dtype, dense=block.mask is None)

    def _rounded(self, block: VectorBlock, flat: Tensor) -> Tensor:
        """Return ``flat`` as a peer would decode it from values of one floating type."""
        code = self._code(block, flat)
        if code is ValueDtype.lossless(flat.dtype):
            return flat
        message, _ = self.codec.encode_values(flat, code, 0, zeros=block.mask is None)
        decoded = torch.zeros(flat.numel(), dtype=torch.float32, device=flat.device)
        kind = 0 if block.mask is not None else plain_kind(code, self.codec.backend(flat.device))
        self.codec.add_values(message, kind, decoded)
        return decoded

    def _read_values(self, message: Tensor, kind: int, out: Tensor, mask: Tensor | None) -> None:
        """Add values of one floating type, which are at the entries of ``mask``, to ``out``, fp32 zeros."""
        values = out if mask is None else out.new_zeros(int(mask.count_nonzero()))
        self.codec.add_values(message, kind, values)
        if mask is not None:
            out.masked_scatter_(mask.view(-1), values)

    def _check_kind(self, kind: int, source: int) -> None:
        coded = 0 <= kind <= BOUNDED | _MASKED | PACKED and kind & (BOUNDED | PACKED) != PACKED
        if not coded and kind not in PLAIN_KINDS:
            what = "no message" if kind < 0 else f"a message of unknown kind {kind}"
            raise PayloadError(f"{self.codec.name}: {what} from rank {source} of the group")


def _kinds(messages: Sequence[Tensor]) -> list[int]:
    """Read the last bytes of all messages at once; -1 for an empty one."""
    last = [message[-1:] for message in messages if message.numel()]
    read = iter(torch.cat(last).tolist() if last else ())
    return [next(read) if message.numel() else -1 for message in messages]


def _masked(block: VectorBlock) -> Tensor:
    """Return the entries that reach the threshold, 1-D, with zeros in place of the others."""
    flat = as_flat(block.x)
    return flat if block.mask is None else torch.where(block.mask.view(-1), flat, torch.zeros_like(flat))
