"""What crosses between the owner of embedding tables and the samples' rank, and what is left of it.

Forward, vectors travel from the tables' owner to the rank whose samples asked for them; backward, their
gradients travel back. Three layers, cheapest first, each one on its own or with the others:

1. *Lossless.* Each distinct row crosses once per message, in the order of the request that named it, so it
   needs no index of its own; gradients of equal rows are summed before they cross.
   (:mod:`~dct_plugin.embedding.tables` does that; the channel sees distinct rows.)
2. *Error-bounded.* ``|x - received| <= bound``: quantised, then entropy coded; bounds by table, found from
   the data, and by iteration (Feng et al., SC 2024, arXiv:2407.04272). Gradients pass straight through the
   rounding; theirs has a bound relative to their size.
3. *Threshold.* DCT-MP (Gupta et al., KDD 2021, section 4): entries below tau do not cross, and the gradient
   comes back at the others only, values without positions. No residual: the next batch holds other samples.

Thresholds, classes and the step counter are buffers: they belong to the model, its checkpoints and its
evaluation. A rank's own rows pass the same layers as those of its peers, so that the model does not depend on
where its tables are; only their gradients are left exact.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EmbeddingChannelConfig, KernelConfig
from ..kernels.embedding_format import IntArray
from ..kernels.reference import has_overflow
from ..metrics import Metrics, Record
from ..stream import as_flat, wire_dtype
from ..transport.exchange import Exchange
from .bounds import Limits, TableLimits
from .frames import Frames
from .messages import Block, Mask, VectorMessages
from .vector_frames import VectorFrames, coded_shape

__all__ = ["EmbeddingChannel", "Route"]


class Route(NamedTuple):
    """Which vectors cross between this rank and every rank of the group, in the order of the messages.

    Attributes:
        sent_tables, sent_rows: Per destination: the own tables (local numbers), and rows of each of them.
        received_rows: Per source: rows of each of its segments.
        samples: Samples of each rank.
        own_tables: Tables of each rank.
    """

    sent_tables: list[list[int]]
    sent_rows: list[list[int]]
    received_rows: list[list[int]]
    samples: list[int]
    own_tables: list[int]


class EmbeddingChannel(TableLimits):
    """The layers of one module's exchange, and what they remember.

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
        self.messages = VectorMessages(
            config, dim=dim, name=name, backend=self.backend, host=self.host_kernels
        )
        self._exchange: Exchange | None = None
        self._frames: dict[tuple[str, bool], Frames] = {}
        self._fingerprint = zlib.crc32(name.encode())

    def exchange(self, group: dist.ProcessGroup | None, device: torch.device) -> Exchange:
        """The transport to the ranks of ``group``."""
        if self._exchange is None or self._exchange.group is not group or self._exchange.device != device:
            self._exchange = Exchange(group, device)
            self._frames.clear()
        return self._exchange

    def frames(self, exchange: Exchange, direction: str, *, quantised: bool, masked: bool) -> Frames | None:
        """Those that a direction's messages travel in; None where the host writes messages, or has to know
        their sizes.
        """
        backend = self.backend(exchange.device)
        coded = not quantised or self.messages.codec(exchange.device) is not None
        if masked or not coded or not backend.writes_slots:
            return None
        key = direction, quantised
        if key not in self._frames:
            self._frames[key] = Frames(exchange, self._fingerprint + (direction == "backward"))
        return self._frames[key]

    def forward(self, vectors: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
        """Send ``vectors``, [rows, dim], those for rank 0 first; returns what all ranks sent here, in rank
        order.

        A collective, and so is its backward pass.

        Raises:
            PayloadError: a message is damaged or does not fit ``route``; names channel and rank.
            DesyncError: a rank failed, or is at another exchange.
        """
        limits = self.limits()
        if self.training:
            with torch.no_grad():
                blocks = vectors.detach().split([sum(rows) for rows in route.sent_rows])
                self.measure(limits, blocks, route.sent_tables, route.sent_rows)
        crossing = _Crossing(self, route, limits, self.exchange(group, vectors.device))
        received: Tensor = _Cross.apply(crossing, torch.is_grad_enabled(), vectors)
        return received


class _Crossing:
    """One forward pass of a channel, and the backward pass that answers it.

    What it keeps in between is where gradients come back, as found then: thresholds may move on.
    """

    def __init__(self, channel: EmbeddingChannel, route: Route, limits: Limits, exchange: Exchange) -> None:
        self.channel = channel
        self.route = route
        self.limits = limits
        self.exchange = exchange
        self.rank = exchange.rank
        self.peers = [r for r in range(exchange.world_size) if r != exchange.rank]
        self.sent_masks: list[Mask | None] = []
        self.received_masks: list[Mask | None] = []

    def forward(self, vectors: Tensor) -> Tensor:
        channel, route, rank = self.channel, self.route, self.rank
        blocks = vectors.split([sum(rows) for rows in route.sent_rows])
        report = _Report(self, "forward", [block.numel() for block in blocks], vectors.element_size())
        if not channel.config.enabled:
            return self._plain(report, vectors, route.sent_rows, route.received_rows)
        limits, dim = self.limits, channel.dim
        quantised = limits.bound is not None
        frames = channel.frames(self.exchange, "forward", quantised=quantised, masked=limits.threshold)
        if frames is not None and frames.known:
            crossing = self._framed(
                report, frames, blocks, route.sent_rows, route.received_rows, rounded=True
            )
            if quantised:
                bounds = channel.bounds(limits)
                received = crossing.bounded([bounds[tables] for tables in route.sent_tables])
            else:
                received = crossing.plain(wire_dtype(vectors.dtype, channel.config.value_dtype, dense=True))
            self.sent_masks = [None] * len(blocks)
            self.received_masks = [None] * len(blocks)
            self._report_forward(report, None)
            return received
        with self.exchange.preparing():
            sent, own = channel.messages.encode(self._layers(blocks), rank)
        report.lap()
        messages = self.exchange.all_to_all(
            [message.data for message in sent],
            channel._fingerprint if frames is None else frames.fingerprint,
            bounds=[_most_bytes(rows, dim) for rows in route.received_rows],
        )
        report.lap(messages)
        if frames is not None:
            self._learn(frames, route.sent_rows, [m.data for m in sent], route.received_rows, messages)
        received, self.received_masks = channel.messages.decode(messages, rank, own, route.received_rows)
        self.sent_masks = [message.mask for message in sent]
        self.received_masks[rank] = self.sent_masks[rank]
        self._report_forward(report, sum(sent[r].kept for r in self.peers) if limits.threshold else None)
        return received

    def _report_forward(self, report: _Report, kept: int | None) -> None:
        report.write(
            dense=sum(self.route.samples[r] for r in self.peers) * self.channel.tables * self.channel.dim,
            kept=kept,
            quantised=self.limits.bound is not None,
        )

    def backward(self, gradient: Tensor) -> Tensor:
        """Gradient of the vectors."""
        channel, route, rank = self.channel, self.route, self.rank
        parts = gradient.split([sum(rows) for rows in route.received_rows])
        report = _Report(self, "backward", [part.numel() for part in parts], gradient.element_size())
        if not channel.config.enabled:
            flat = self._plain(report, gradient, route.received_rows, route.sent_rows)
            return self._scaled(flat)
        quantised = self.limits.gradients
        # By what all ranks know: there may be no masks on one of them.
        masked = self.limits.threshold
        frames = channel.frames(self.exchange, "backward", quantised=quantised, masked=masked)
        if frames is not None and frames.known:
            crossing = self._framed(
                report, frames, parts, route.received_rows, route.sent_rows, rounded=False
            )
            if quantised:
                flat = crossing.bounded(None, channel.config.gradient_bound or 0.0)
            else:
                code = wire_dtype(gradient.dtype, channel.config.gradient_value_dtype, dense=True)
                flat = crossing.plain(code)
            kept = report.numel
        else:
            with self.exchange.preparing():
                answers, kept = channel.messages.encode_gradients(
                    parts, rank, route.received_rows, self.received_masks, quantised=self.limits.gradients
                )
            report.lap()
            messages = self.exchange.all_to_all(
                answers,
                channel._fingerprint + 1 if frames is None else frames.fingerprint,
                bounds=[_most_bytes(rows, channel.dim) for rows in route.sent_rows],
            )
            report.lap(messages)
            if frames is not None:
                self._learn(frames, route.received_rows, answers, route.sent_rows, messages)
            flat = channel.messages.decode_gradients(
                messages, rank, parts[rank], route.sent_rows, self.sent_masks
            )
        report.write(
            dense=route.samples[rank] * sum(route.own_tables[r] for r in self.peers) * channel.dim,
            kept=kept,
            quantised=quantised,
        )
        return self._scaled(flat)

    def _scaled(self, flat: Tensor) -> Tensor:
        scale = self.channel.gradient_scale
        return flat if scale == 1.0 else flat.mul_(scale)

    def _framed(
        self,
        report: _Report,
        frames: Frames,
        blocks: Sequence[Tensor],
        sent: Sequence[list[int]],
        got: Sequence[list[int]],
        *,
        rounded: bool,
    ) -> VectorFrames:
        lengths = ([_lengths(rows, self.channel.dim) for rows in each] for each in (sent, got))
        return VectorFrames(self.channel.messages, frames, blocks, *lengths, rounded=rounded, lap=report.lap)

    def _learn(
        self,
        frames: Frames,
        sent_rows: Sequence[list[int]],
        sent: Sequence[Tensor],
        got_rows: Sequence[list[int]],
        got: Sequence[Tensor],
    ) -> None:
        """What messages took that were exchanged with their sizes."""
        shapes = (
            [coded_shape(_lengths(rows, self.channel.dim)) for rows in each] for each in (sent_rows, got_rows)
        )
        frames.learn(next(shapes), sent, next(shapes), got)

    def _layers(self, blocks: Sequence[Tensor]) -> list[Block]:
        """Masks and bounds. What is not finite crosses as it is, and reaches the loss."""
        limits, channel = self.limits, self.channel
        bounds = None if limits.bound is None else channel.bounds(limits)
        layers = []
        for block, tables, rows in zip(blocks, self.route.sent_tables, self.route.sent_rows, strict=True):
            mask = None
            applied = bounds
            if limits.threshold:
                if has_overflow(as_flat(block)):
                    applied = None
                else:
                    mask = channel.mask(block, tables, rows)
            layers.append(Block(block, rows, mask, None if applied is None else applied[tables]))
        return layers

    def _plain(
        self, report: _Report, flat: Tensor, sent: Sequence[list[int]], received: Sequence[list[int]]
    ) -> Tensor:
        """Uncompressed all-to-all of rows."""
        counts = [sum(rows) for rows in received]
        out = flat.new_empty((sum(counts), *flat.shape[1:]))
        report.lap()
        dist.all_to_all_single(
            out,
            flat.contiguous(),
            output_split_sizes=counts,
            input_split_sizes=[sum(rows) for rows in sent],
            group=self.exchange.group,
        )
        report.lap()
        report.write(dense=report.numel, wire=report.numel * report.itemsize)
        return out


def _lengths(rows: Sequence[int], dim: int) -> IntArray:
    """Entries of segments of so many rows."""
    return np.array(rows, dtype=np.int64) * dim


def _most_bytes(rows: Sequence[int], dim: int) -> int:
    """More than any message of these rows: positions and values of all entries, something for each table."""
    return 8 * sum(rows) * dim + 16 * len(rows) + 4096


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crossing: _Crossing, tracked: bool, vectors: Tensor) -> Tensor:
        ctx.crossing = crossing if tracked else None
        return crossing.forward(vectors.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.crossing.backward(gradients[0].contiguous())


@dataclass
class _Report:
    """Counts one direction of a crossing for the metrics.

    ``sizes`` are the entries of each rank's block, ``itemsize`` their bytes.
    """

    crossing: _Crossing
    direction: str
    sizes: list[int]
    itemsize: int

    def __post_init__(self) -> None:
        self.numel = sum(self.sizes[r] for r in self.crossing.peers)
        self._before = self.crossing.exchange.sent_bytes
        self._waited = self.crossing.exchange.waited_ms
        self._times = [time.perf_counter()]

    def lap(self, received: Sequence[Tensor] = ()) -> None:
        """One of encode, exchange, decode is over; ``received`` are the messages of an exchange."""
        self._times.append(time.perf_counter())
        if received:
            sent = self.crossing.exchange.sent_bytes - self._before
            most = max(sent, sum(received[r].numel() for r in self.crossing.peers))
            self.crossing.channel.messages.observe(most, self._times[-1] - self._times[-2])

    def write(
        self, *, dense: int, kept: int | None = None, quantised: bool = False, wire: int | None = None
    ) -> None:
        """Record the crossing.

        Args:
            dense: Entries that cross to peers without the channel.
            kept: Of ``numel``, those that do; None: all.
            quantised: Whether an error bound applies.
            wire: Bytes; None: what the exchange has sent.
        """
        self.lap()
        channel = self.crossing.channel
        if channel.metrics is None or not dense:
            return
        nnz = self.numel if kept is None else kept
        if wire is None:
            wire = self.crossing.exchange.sent_bytes - self._before
        cls = f"embedding_{self.direction}"
        masked = nnz < self.numel
        common: dict[str, Any] = {
            "numel": self.numel,
            "nnz": nnz,
            "target_density": 1.0 - channel.config.sparsity if masked else 1.0,
            "tau": float(channel.known("tau").mean()) if channel.tau.numel() else 0.0,
        }
        encode_ms, exchange_ms, decode_ms = (
            1e3 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)
        )
        channel.metrics.record(
            Record(
                cls,
                dense_bytes=dense * self.itemsize,
                sent_bytes=wire,
                encode_ms=encode_ms,
                exchange_ms=exchange_ms,
                decode_ms=decode_ms,
                waited_ms=self.crossing.exchange.waited_ms - self._waited,
                **common,
            )
        )
        layers = [("lossless", self.numel * self.itemsize)] if channel.config.deduplicate else []
        layers += [("threshold", nnz * self.itemsize)] if masked else []
        layers += [("bounded", 0)] if quantised else []
        before = dense * self.itemsize
        for number, (layer, after) in enumerate(layers):
            # What the last layer leaves is what crosses, positions, headers and all.
            after = wire if number == len(layers) - 1 else after
            channel.metrics.record(Record(f"{cls}/{layer}", dense_bytes=before, sent_bytes=after, **common))
            before = after
