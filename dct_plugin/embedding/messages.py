"""What vectors and their gradients are on the wire.

A message is a payload and one byte that says how to read it: error-bounded codes
(:mod:`~dct_plugin.embedding.error_bounded`), which are written and read for all ranks in one call, or values
of one floating type, with or without a mask. Rows are in the order of the request that named them; gradients
at the positions of a thresholded message are values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.values import ValueDtype
from ..config import EmbeddingChannelConfig
from ..errors import PayloadError
from ..kernels import Backend
from ..kernels.embedding import get_device_codec, say_once
from ..kernels.embedding_format import EmbeddingKernels, Encoded, FloatArray, IntArray, Outgoing
from ..stream import as_flat, encode_all, encode_at, wire_dtype
from .error_bounded import decode_bounded, encode_bounded

if TYPE_CHECKING:
    from ..kernels.triton.embedding import TritonEmbeddingKernels

__all__ = ["Block", "Mask", "Message", "VectorMessages"]

# Last byte of a message.
BOUNDED = 1
_MASKED = 2
#: Picoseconds per bit at 1 Mbit/s: any code's work is worth its bits.
_SLOWEST = 1_000_000


class Mask(NamedTuple):
    """Where gradients come back: ``entries``, bool [rows, dim], or the positions of a payload, uint8."""

    entries: Tensor | None = None
    payload: Tensor | None = None


class Block(NamedTuple):
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


class Message(NamedTuple):
    """A message for a peer.

    Attributes:
        data: uint8.
        mask: Where gradients come back; None: everywhere.
        kept: Entries that cross.
    """

    data: Tensor
    mask: Mask | None
    kept: int


class VectorMessages:
    """Writes and reads the messages of one channel.

    Args:
        config: ``dct.embedding``.
        dim: Width of the vectors.
        name: Name in errors.
        backend: Gives the kernels for tensors on a device.
        host: The codec's kernels.

    Attributes:
        bit_cost: Picoseconds that a bit takes on the wire (:meth:`observe`): what ``entropy = auto`` weighs
            its work against.
    """

    def __init__(
        self,
        config: EmbeddingChannelConfig,
        *,
        dim: int,
        name: str,
        backend: Callable[[torch.device], Backend],
        host: Callable[[], EmbeddingKernels],
    ) -> None:
        self.config = config
        self.dim = dim
        self.name = name
        self.bit_cost = _SLOWEST
        self.backend = backend
        self._host = host
        self._codecs: dict[torch.device, TritonEmbeddingKernels | None] = {}

    def observe(self, nbytes: int, seconds: float) -> None:
        """An exchange of so many bytes took so long; the fastest of the last ones tells of the link."""
        if nbytes:
            measured = int(1e12 * seconds / (8 * nbytes))
            self.bit_cost = min(measured, self.bit_cost + self.bit_cost // 16 + 1, _SLOWEST)

    # -- vectors ---

    def encode(self, blocks: Sequence[Block], own: int) -> tuple[list[Message], Tensor]:
        """Messages of the blocks of all ranks, and the vectors of rank ``own``.

        Those stay here, and are what a peer would decode: rows of this rank pass the same layers.
        """
        flats = [_masked(block) for block in blocks]
        bounded = [r for r, block in enumerate(blocks) if block.bounds is not None and block.x.numel()]
        parts = []
        for r in bounded:
            bounds = blocks[r].bounds
            assert bounds is not None
            kind = BOUNDED | (_MASKED if self._returned(blocks[r]) else 0)
            lengths = np.array(blocks[r].rows, dtype=np.int64) * self.dim
            parts.append(Outgoing(self._to_code(flats[r]), lengths, bounds, send=r != own, kind=kind))
        decoded = any(blocks[r].mask is not None for r in bounded)
        coded = dict(zip(bounded, self._bounded(parts, decoded), strict=True))
        messages = []
        vectors = blocks[own].x
        for r, block in enumerate(blocks):
            if r == own:
                vectors, message = self._own(block, flats[r], coded.get(r))
            elif not block.x.numel():
                message = Message(_nothing(block.x.device), None, 0)
            elif r in coded:
                message = self._coded(block, coded[r])
            else:
                message = self._plain(block, flats[r])
            messages.append(message)
        return messages, vectors

    def decode(
        self, messages: Sequence[Tensor], own: int, vectors: Tensor, rows: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[Mask | None]]:
        """Vectors [sum of rows, dim] of all ranks in rank order, and the masks of their messages.

        Args:
            messages: Of all ranks; that of rank ``own`` is not read.
            vectors: Those of rank ``own``; they give dtype and device.
            rows: Per rank, rows of each of its segments.

        Raises:
            PayloadError: a message is damaged, or not of these rows; names the rank.
        """
        counts = [sum(each) * self.dim for each in rows]
        out = torch.empty(sum(counts), dtype=torch.float32, device=vectors.device)
        slices = list(out.split(counts))
        masks: list[Mask | None] = [None] * len(rows)
        coded: list[int] = []
        lengths, kinds = [], _kinds(messages)
        for source, (message, part) in enumerate(zip(messages, slices, strict=True)):
            if source == own:
                part.copy_(vectors.view(-1))
            elif part.numel():
                payload, kind = self._opened(message, kinds[source], source)
                if kind & BOUNDED:
                    coded.append(source)
                    lengths.append(np.array(rows[source], dtype=np.int64) * self.dim)
                else:
                    with self.blame("message", source):
                        self.backend(out.device).decode_add(payload, part.zero_())
                if kind & _MASKED:
                    masks[source] = Mask(payload=payload)
        self.read_coded("message", {s: messages[s][:-1] for s in coded}, lengths, [slices[s] for s in coded])
        for source in coded:
            if masks[source] is not None:
                masks[source] = Mask(entries=(slices[source] != 0).view(-1, self.dim))
        return out.view(-1, self.dim).to(vectors.dtype), masks

    # -- gradients ---

    def encode_gradients(
        self,
        parts: Sequence[Tensor],
        own: int,
        rows: Sequence[Sequence[int]],
        masks: Sequence[Mask | None],
        *,
        quantised: bool,
    ) -> tuple[list[Tensor], int]:
        """Messages of the gradients [rows, dim] of vectors that came from all ranks, and the entries in them.

        ``quantised`` applies ``gradient_bound``, relative to the root mean square of each table's gradient.
        """
        messages = [_nothing(part.device) for part in parts]
        kept = 0
        bounded: list[int] = []
        outgoing: list[Outgoing] = []
        for source, (part, mask) in enumerate(zip(parts, masks, strict=True)):
            if source == own or not part.numel():
                continue
            flat = as_flat(part)
            if quantised:
                entries = self.entries(mask, part.shape, part.device)
                x = self._to_code(flat if entries is None else flat[entries.view(-1)])
                lengths = self._gradient_lengths(rows[source], entries)
                outgoing.append(Outgoing(x, lengths, np.zeros(len(lengths)), kind=BOUNDED))
                bounded.append(source)
                kept += x.numel()
            else:
                messages[source], nnz = self._plain_gradient(flat, part.shape, mask)
                kept += nnz
        if outgoing:
            for source, encoded in zip(bounded, self._bounded_gradients(outgoing), strict=True):
                assert encoded.message is not None
                messages[source] = encoded.message.to(parts[source].device)
        return messages, kept

    def decode_gradients(
        self,
        messages: Sequence[Tensor],
        own: int,
        gradient: Tensor,
        rows: Sequence[Sequence[int]],
        masks: Sequence[Mask | None],
    ) -> Tensor:
        """Gradients [sum of rows, dim] from all ranks in rank order, zero outside the masks.

        Args:
            messages: Of :meth:`encode_gradients`; that of rank ``own`` is not read.
            gradient: Of the vectors that did not leave, [rows, dim]; gives dtype and device.
            rows, masks: Per rank, of the vectors that were sent there.

        Raises:
            PayloadError: as for :meth:`decode`.
        """
        counts = [sum(each) * self.dim for each in rows]
        out = torch.empty(sum(counts), dtype=torch.float32, device=gradient.device)
        slices = list(out.split(counts))
        coded: list[int] = []
        lengths, targets, entries_of = [], [], []
        kinds = _kinds(messages)
        for source, (message, part, mask) in enumerate(zip(messages, slices, masks, strict=True)):
            shape = torch.Size((len(part) // self.dim, self.dim))
            if source == own:
                entries = self.entries(mask, shape, out.device)
                part.copy_((gradient if entries is None else gradient * entries).reshape(-1))
                continue
            if not part.numel():
                continue
            payload, kind = self._opened(message, kinds[source], source)
            if kind & BOUNDED:
                entries = self.entries(mask, shape, out.device)
                coded.append(source)
                entries_of.append(entries)
                lengths.append(self._gradient_lengths(rows[source], entries))
                targets.append(part if entries is None else part.new_empty(int(lengths[-1].sum())))
                continue
            with self.blame("gradient", source):
                self._read_plain_gradient(payload, part.zero_(), mask)
        self.read_coded("gradient", {s: messages[s][:-1] for s in coded}, lengths, targets)
        for source, target, entries in zip(coded, targets, entries_of, strict=True):
            if entries is not None:
                slices[source].zero_().masked_scatter_(entries.view(-1), target)
        return out.view(-1, self.dim).to(gradient.dtype)

    def entries(self, mask: Mask | None, shape: torch.Size, device: torch.device) -> Tensor | None:
        """A mask as bool [rows, dim]."""
        if mask is None or mask.payload is None:
            return None if mask is None else mask.entries
        return self.backend(device).decode_mask(mask.payload, shape.numel()).view(shape)

    # -- error-bounded codes, all ranks at once ---

    def _bounded(self, parts: Sequence[Outgoing], decoded: bool) -> list[Encoded]:
        if not parts:
            return []
        codec = self.codec(parts[0].x.device)
        if codec is not None:
            return codec.encode(parts, decoded=decoded)
        kernels = self._host()
        return encode_bounded(
            parts,
            kernels,
            entropy=self.config.entropy,
            # Plain Python reads packed codes all at once, and Rice codes one by one.
            bit_cost=0 if kernels.name == "reference" else self.bit_cost,
            decoded=decoded,
            repeats=not self.config.deduplicate,
        )

    def _bounded_gradients(self, parts: Sequence[Outgoing]) -> list[Encoded]:
        """With bounds relative to the root mean square of every segment."""
        relative = self.config.gradient_bound or 0.0
        codec = self.codec(parts[0].x.device)
        if codec is not None:
            squares = codec.mean_squares(parts)
            return codec.encode(parts, bounds=[relative * square.sqrt() for square in squares])
        with np.errstate(over="ignore", invalid="ignore"):
            bounds = [relative * np.sqrt(square) for square in self._host().mean_squares(parts)]
        return self._bounded(
            [part._replace(bounds=each) for part, each in zip(parts, bounds, strict=True)], False
        )

    def codec(self, device: torch.device) -> TritonEmbeddingKernels | None:
        """What codes tensors where they are; None: the host does."""
        if device not in self._codecs:
            self._codecs[device] = get_device_codec(self.backend(device), self.config.entropy)
        return self._codecs[device]

    def _to_code(self, flat: Tensor) -> Tensor:
        """fp32, where it is coded."""
        return flat.to(torch.float32) if self.codec(flat.device) is not None else _on_host(flat)

    def read_coded(
        self, what: str, payloads: dict[int, Tensor], lengths: Sequence[IntArray], outs: Sequence[Tensor]
    ) -> None:
        """Decode payloads, by rank, into ``outs``, fp32 on any device."""
        if not payloads:
            return
        codec = self.codec(outs[0].device)
        if codec is not None:
            found = codec.decode(list(payloads.values()), lengths, outs)
            for source, opened in zip(payloads, found, strict=True):
                if opened is not None and opened.fault is not None:
                    with self.blame(what, source):
                        raise PayloadError(opened.fault)
            left = [at for at, opened in enumerate(found) if opened is None]
            if not left:
                return
            say_once("a rank sends Rice codes or deflated ones, which the host reads")
            sources = list(payloads)
            payloads = {sources[at]: payloads[sources[at]] for at in left}
            lengths, outs = [lengths[at] for at in left], [outs[at] for at in left]
        hosts = [out if out.device.type == "cpu" else torch.empty(len(out)) for out in outs]
        faults = decode_bounded([p.cpu() for p in payloads.values()], lengths, hosts, self._host())
        for source, fault in zip(payloads, faults, strict=True):
            if fault is not None:
                with self.blame(what, source):
                    raise PayloadError(fault)
        for out, host in zip(outs, hosts, strict=True):
            if host is not out:
                out.copy_(host)

    # -- one rank at a time ---

    def _own(self, block: Block, flat: Tensor, coded: Encoded | None) -> tuple[Tensor, Message]:
        x, mask = block.x, block.mask
        if coded is not None:
            if coded.decoded is not None:  # else: not finite, and nobody rounds that
                flat = coded.decoded.to(x.device)
            mask = None if mask is None else (flat != 0).view(x.shape)
        elif x.numel():
            code = wire_dtype(flat.dtype, self.config.value_dtype, dense=mask is None)
            if code is not ValueDtype.lossless(flat.dtype):
                data, _ = self._values(flat, code, 0, zeros=mask is None)
                flat = torch.zeros(flat.numel(), dtype=torch.float32, device=x.device)
                self.backend(x.device).decode_add(data[:-1], flat)
        answered = None if mask is None or self.config.dense_gradient else Mask(entries=mask)
        return flat.view(x.shape).to(x.dtype), Message(_nothing(x.device), answered, 0)

    def _coded(self, block: Block, encoded: Encoded) -> Message:
        assert encoded.message is not None
        data = encoded.message.to(block.x.device)
        if block.mask is None:
            return Message(data, None, block.x.numel())
        assert encoded.decoded is not None  # a threshold is not applied to what is not finite
        entries = (encoded.decoded != 0).view(block.x.shape).to(block.x.device)
        return Message(data, Mask(entries=entries) if self._returned(block) else None, int(entries.sum()))

    def _plain(self, block: Block, flat: Tensor) -> Message:
        """Values of one floating type."""
        returned = self._returned(block)
        code = wire_dtype(flat.dtype, self.config.value_dtype, dense=block.mask is None)
        data, kept = self._values(flat, code, _MASKED if returned else 0, zeros=block.mask is None)
        return Message(data, Mask(payload=data[:-1]) if returned else None, kept)

    def _plain_gradient(self, flat: Tensor, shape: torch.Size, mask: Mask | None) -> tuple[Tensor, int]:
        """Message of a gradient that is not quantised, and the entries in it."""
        code = wire_dtype(flat.dtype, self.config.gradient_value_dtype, dense=mask is None)
        if mask is not None and mask.payload is not None:
            payload, stats = encode_at(self.backend(flat.device), flat, mask.payload, code)
            return _closed(payload[: stats.nbytes], 0), stats.nnz
        entries = self.entries(mask, shape, flat.device)
        return self._values(flat if entries is None else flat[entries.view(-1)], code, 0)

    def _read_plain_gradient(self, payload: Tensor, out: Tensor, mask: Mask | None) -> None:
        """Add to ``out``, fp32 zeros [rows * dim], what :meth:`_plain_gradient` has written."""
        kernels = self.backend(out.device)
        entries = mask.entries if mask is not None else None
        if mask is not None and mask.payload is not None:
            kernels.decode_add(payload, out, mask.payload)
        elif entries is None:
            kernels.decode_add(payload, out)
        else:
            values = out.new_zeros(int(entries.sum()))
            kernels.decode_add(payload, values)
            out.masked_scatter_(entries.view(-1), values)

    # -- inside ---

    def _returned(self, block: Block) -> bool:
        """Whether gradients come back at the entries that crossed only."""
        return block.mask is not None and not self.config.dense_gradient

    def _values(self, flat: Tensor, code: ValueDtype, kind: int, *, zeros: bool = True) -> tuple[Tensor, int]:
        """Message of every entry (or every one but zeros), and their number."""
        writer = MessageWriter(flat.device)
        encoded = encode_all(self.backend(flat.device), flat, writer, code, zeros=zeros)
        writer.reserve(1).fill_(kind)
        writer.advance(1)
        return writer.message, encoded.totals().nnz

    def _gradient_lengths(self, rows: Sequence[int], entries: Tensor | None) -> IntArray:
        """Entries of each segment of a gradient message."""
        counts = np.array(rows, dtype=np.int64)
        if entries is None:
            return counts * self.dim
        ends = np.cumsum(counts)
        kept = np.concatenate([[0], np.cumsum(entries.sum(dim=1).cpu().numpy())])
        return np.asarray(kept[ends] - kept[ends - counts], dtype=np.int64)

    def _opened(self, message: Tensor, kind: int, source: int) -> tuple[Tensor, int]:
        if not 0 <= kind <= BOUNDED | _MASKED:
            what = "no message" if kind < 0 else f"a message of unknown kind {kind}"
            raise PayloadError(f"{self.name}: {what} from rank {source} of the group")
        return message[:-1], kind

    @contextmanager
    def blame(self, what: str, source: int) -> Iterator[None]:
        try:
            yield
        except PayloadError as error:
            raise PayloadError(f"{self.name}: {what} from rank {source} of the group: {error}") from error


def _kinds(messages: Sequence[Tensor]) -> list[int]:
    """The last bytes of messages, read at once; -1 where there is none."""
    last = [message[-1:] for message in messages if message.numel()]
    read = iter(torch.cat(last).tolist() if last else ())
    return [next(read) if message.numel() else -1 for message in messages]


def _masked(block: Block) -> Tensor:
    """The entries that reach the threshold, 1-D, zeros at the others."""
    flat = as_flat(block.x)
    return flat if block.mask is None else torch.where(block.mask.view(-1), flat, torch.zeros_like(flat))


def _on_host(flat: Tensor) -> Tensor:
    return flat.to("cpu", torch.float32)


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _closed(payload: Tensor, kind: int) -> Tensor:
    """A message: the payload, then one byte that says how to read it."""
    return torch.cat([payload, torch.tensor([kind], dtype=torch.uint8, device=payload.device)])
