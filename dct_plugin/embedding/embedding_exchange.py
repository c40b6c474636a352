"""The exchange of vectors and gradients between the owners of embedding tables and the ranks with samples.

Forward, vectors travel from the tables' owner to the rank whose samples asked for them; backward, their
gradients travel back. Three layers, cheapest first, each one on its own or with the others:

1. *Lossless.* Each distinct row crosses once per message, in the order of the request that named it, so it
   needs no index of its own; gradients of equal rows are summed before they cross.
   (:mod:`~dct_plugin.embedding.tables` does that; the exchange sees distinct rows.)
2. *Error-bounded.* ``|x - received| <= bound``: quantised, then entropy coded (Feng et al., SC 2024,
   arXiv:2407.04272). Gradients pass straight through the
   rounding; theirs has a bound relative to their size.
3. *Threshold.* DCT-MP (Gupta et al., KDD 2021, section 4): entries below tau do not cross, and the gradient
   comes back at the others only, values without positions. No residual: the next batch holds other samples.

Thresholds and the step counter are buffers: they belong to the model, its checkpoints and its
evaluation. A rank's own rows pass the same layers as those of its peers, so that the model does not depend on
where its tables are; only their gradients are left exact.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import with_gradient
from ..compression.stream import as_flat
from ..config import EmbeddingChannelConfig, KernelConfig
from ..host_traffic import own_traffic
from ..kernels.reference import overflow_flags
from ..metrics import Metrics, Record
from ..transport.exchange import Exchange
from .bounds import Limits, TableLimits
from .messages import VectorBlock, VectorMessages
from .vector_codec import VectorCodec


class Route(NamedTuple):
    """Counts of the vectors that this rank sends to and receives from every rank, in the order of the
    messages.

    Attributes:
        sent_tables: The own tables (local numbers) of each destination.
        sent_rows: Rows of each of these tables.
        received_rows: Per source: rows of each of its segments.
        samples: Samples of each rank.
        own_tables: Tables of each rank.
    """

    sent_tables: list[list[int]]
    sent_rows: list[list[int]]
    received_rows: list[list[int]]
    samples: list[int]
    own_tables: list[int]


class EmbeddingExchange(TableLimits):
    """Compressed exchange of the vectors of one module's tables.

    Args:
        config: ``dct.embedding``.
        tables: Tables of this rank.
        dim: Width of the vectors.
        name: Name in errors, part of the fingerprint by which ranks out of step are found.
        metrics: Records ``embedding_forward`` and ``embedding_backward``, and the share of every layer as
            ``embedding_forward/lossless``, ``/threshold``, ``/bounded``.
        kernels: ``dct.kernels``; the defaults when None.
        gradient_scale: Factor on the gradients that reach the tables.

    Its buffers, and how steps are counted (:meth:`follow`, :meth:`end_step`), are those of
    :class:`~dct_plugin.embedding.bounds.TableLimits`.
    """

    def __init__(
        self,
        config: EmbeddingChannelConfig,
        *,
        tables: int,
        dim: int,
        name: str = "embedding",
        metrics: Metrics | None = None,
        kernels: KernelConfig | None = None,
        gradient_scale: float = 1.0,
    ) -> None:
        super().__init__(config, tables=tables, name=name, kernels=kernels)
        self.dim = dim
        self.metrics = metrics
        self.gradient_scale = gradient_scale
        codec = VectorCodec(config, name=name, backend=self.backend)
        self.messages = VectorMessages(codec, dim)
        self._transport: Exchange | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have a transport of their own, and record nothing."""
        return {**self.__dict__, "_transport": None, "metrics": None}

    def transport(self, group: dist.ProcessGroup | None, device: torch.device) -> Exchange:
        """Return the transport to the ranks of ``group``."""
        known = self._transport
        if known is None or known.peers.group is not group or known.device != device:
            self._transport = known = Exchange(group, device)
        return known

    def forward(self, vectors: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
        """Send ``vectors``, [rows, dim], ordered by destination rank; return the received vectors, ordered by
        source rank.

        A collective, and so is its backward pass.

        Raises:
            PayloadError: A message is damaged or does not fit ``route``; names exchange and rank.
            DesyncError: A rank failed, or is at another exchange.
        """
        limits = self.limits()
        if self.training:
            with torch.no_grad():
                blocks = vectors.detach().split([sum(rows) for rows in route.sent_rows])
                self.measure(blocks, route.sent_tables, route.sent_rows)
        trip = _RoundTrip(self, route, limits, self.transport(group, vectors.device))
        return with_gradient(vectors, trip.forward, lambda gradient: trip.backward(gradient.contiguous()))


class _RoundTrip:
    """One forward pass of an exchange, and the backward pass that answers it.

    It keeps the masks in between: the thresholds may change before the gradients come back.
    """

    def __init__(self, owner: EmbeddingExchange, route: Route, limits: Limits, transport: Exchange) -> None:
        self._owner = owner
        self._route = route
        self._limits = limits
        self._transport = transport
        self._rank = transport.rank
        self._peers = [r for r in range(transport.world_size) if r != transport.rank]
        self._sent_masks: list[Tensor | None] = [None] * transport.world_size
        self._received_masks: list[Tensor | None] = [None] * transport.world_size

    def forward(self, vectors: Tensor) -> Tensor:
        """Send ``vectors``, [rows, dim]; return those that arrived."""
        owner, route, limits = self._owner, self._route, self._limits
        record = Record("embedding_forward")
        way = _Direction(record, route.sent_rows, route.received_rows, limits.bound is not None)
        blocks = vectors.split([sum(rows) for rows in way.sent_rows])
        dense = sum(route.samples[r] for r in self._peers) * owner.tables * owner.dim
        if not owner.config.enabled:
            return self._send_uncompressed(way, vectors, blocks)
        with record.timed("encode"), self._transport.preparing():
            sent = owner.messages.encode(self._vector_blocks(blocks), self._rank)
        arrived = self._exchange(way, sent.data)
        with record.timed("decode"):
            received, masks = owner.messages.decode(arrived, self._rank, sent.own, way.received_rows)
        masks[self._rank] = sent.masks[self._rank]
        self._sent_masks, self._received_masks = sent.masks, masks
        self._record(way, blocks, dense=dense, kept=sent.kept if limits.threshold else None)
        return received.view(-1, owner.dim)

    def backward(self, gradient: Tensor) -> Tensor:
        """Send the gradient of what arrived; return that of the vectors, [rows, dim]."""
        owner, route = self._owner, self._route
        record = Record("embedding_backward")
        way = _Direction(record, route.received_rows, route.sent_rows, self._limits.gradients)
        blocks = gradient.split([sum(rows) for rows in way.sent_rows])
        dense = route.samples[self._rank] * sum(route.own_tables[r] for r in self._peers) * owner.dim
        if not owner.config.enabled:
            return self._scaled(self._send_uncompressed(way, gradient, blocks))
        with record.timed("encode"), self._transport.preparing():
            sent = owner.messages.encode_gradients(
                blocks, self._rank, way.sent_rows, self._received_masks, quantised=way.bounded
            )
        arrived = self._exchange(way, sent.data)
        with record.timed("decode"):
            own, rows = sent.own, way.received_rows
            received, _ = owner.messages.decode(arrived, self._rank, own, rows, self._sent_masks)
        self._record(way, blocks, dense=dense, kept=sent.kept)
        return self._scaled(received.view(-1, owner.dim))

    def _scaled(self, gradient: Tensor) -> Tensor:
        scale = self._owner.gradient_scale
        return gradient if scale == 1.0 else gradient.mul_(scale)

    def _vector_blocks(self, blocks: Sequence[Tensor]) -> list[VectorBlock]:
        """Find masks and bounds. What is not finite crosses as it is, and reaches the loss."""
        limits, owner = self._limits, self._owner
        bounds = None if limits.bound is None else owner.bounds(limits)
        found, overflowed = [], [False] * len(blocks)
        if limits.threshold:  # the device is read once for all
            overflowed = overflow_flags([as_flat(block) for block in blocks]).tolist()
        sent = zip(blocks, self._route.sent_tables, self._route.sent_rows, overflowed, strict=True)
        for block, tables, rows, overflows in sent:
            mask = owner.mask(block, tables, rows) if limits.threshold and not overflows else None
            applied = None if overflows or bounds is None else bounds[tables]
            found.append(VectorBlock(block, rows, mask, applied))
        return found

    def _exchange(self, way: _Direction, messages: Sequence[Tensor]) -> list[Tensor]:
        """Exchange messages with their sizes."""
        owner, record = self._owner, way.record
        # More than any message: positions and values of all entries, and headers.
        bounds = [8 * sum(rows) * owner.dim + 16 * len(rows) + 4096 for rows in way.received_rows]
        fingerprint = zlib.crc32(f"{owner.name}/{record.cls}".encode())
        with record.timed("exchange"), self._transport.recorded(record):
            received = self._transport.all_to_all(messages, fingerprint, bounds=bounds)
        most = max(record.sent_bytes, sum(received[r].numel() for r in self._peers))
        owner.messages.codec.observe(most, record.exchange_ms / 1e3)
        return received

    @own_traffic()
    def _send_uncompressed(self, way: _Direction, x: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """Exchange rows as they are; ``blocks`` are those of ``x`` for each rank."""
        counts = [sum(rows) for rows in way.received_rows]
        received = x.new_empty((sum(counts), *x.shape[1:]))
        leaving, group = [len(block) for block in blocks], self._transport.peers.group
        with way.record.timed("exchange"):
            dist.all_to_all_single(received, x.contiguous(), counts, leaving, group=group)
        numel = sum(blocks[r].numel() for r in self._peers)
        way.record.sent_bytes = numel * received.element_size()
        self._record(way, blocks, dense=numel)
        return received

    def _record(
        self, way: _Direction, blocks: Sequence[Tensor], *, dense: int, kept: int | None = None
    ) -> None:
        """Record one direction.

        Args:
            dense: Entries that cross to peers without the plugin.
            kept: Entries of ``blocks`` that cross; None: all.
        """
        owner, record = self._owner, way.record
        if owner.metrics is None or not dense:
            return
        itemsize = blocks[0].element_size()
        numel = sum(blocks[r].numel() for r in self._peers)
        nnz = numel if kept is None else kept
        masked = nnz < numel
        target = 1.0 - owner.config.sparsity if masked else 1.0
        tau = float(owner.known_tau().mean()) if owner.tau.numel() else 0.0
        common: dict[str, Any] = {"numel": numel, "nnz": nnz, "target_density": target, "tau": tau}
        owner.metrics.record(replace(record, dense_bytes=dense * itemsize, **common))
        layers = {"lossless": numel * itemsize} if owner.config.deduplicate else {}
        layers |= {"threshold": nnz * itemsize} if masked else {}
        layers |= {"bounded": 0} if way.bounded else {}
        # What the last layer leaves is what crosses, positions, headers and all.
        sizes = [dense * itemsize, *[*layers.values()][:-1], record.sent_bytes]
        for layer, (before, after) in zip(layers, itertools.pairwise(sizes), strict=False):
            owner.metrics.record(Record(f"{record.cls}/{layer}", before, after, **common))


class _Direction(NamedTuple):
    """One direction of a round trip.

    Attributes:
        record: Its record in the metrics.
        sent_rows, received_rows: Per rank, rows of each segment that goes there, and comes from there.
        bounded: Whether an error bound applies.
    """

    record: Record
    sent_rows: list[list[int]]
    received_rows: list[list[int]]
    bounded: bool
