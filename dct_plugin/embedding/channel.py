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

import math
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..codecs.payload import OVERFLOW_MAGNITUDE, payload_bound
from ..codecs.values import ValueDtype
from ..collectives.exchange import Exchange
from ..config import EmbeddingChannelConfig
from ..errors import PayloadError
from ..kernels import Backend, get_backend
from ..kernels.backend import SMALLEST_TAU
from ..metrics import Metrics, Record
from .error_bounded import decode_bounded, encode_bounded, quantise

__all__ = ["EmbeddingChannel", "Route"]

_FLOATS = {torch.float32: ValueDtype.FP32, torch.bfloat16: ValueDtype.BF16, torch.float16: ValueDtype.FP16}
# Last byte of a message.
_BOUNDED = 1
_MASKED = 2

#: Steps between two looks at how quantising merges a table's rows.
_CLASS_INTERVAL = 100
#: A table is of the small class when quantising merges at least this share of its rows, of the large class
#: below the second.
_HOMOGENISED = (0.5, 0.1)
_DECAY_STAGES = 10


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


class _Block(NamedTuple):
    """One direction of one peer: what is decoded, where gradients are wanted, and what the layers left."""

    message: Tensor
    decoded: Tensor
    mask: Tensor | None
    kept: int


class EmbeddingChannel(nn.Module):
    """The layers of one module's exchange, and what they remember.

    Args:
        config: ``dct.embedding``.
        tables: Tables of this rank.
        dim: Width of the vectors.
        name: Name in errors, part of the fingerprint by which ranks out of step are found.
        metrics: Records ``embedding_forward`` and ``embedding_backward``, and the share of every layer as
            ``embedding_forward/lossless``, ``/threshold``, ``/bounded``.
        kernels: Backend, or None for the best one of the tensors' device.
        gradient_scale: Factor on the gradients that reach the tables.

    Attributes:
        tau: fp32 [tables] ([1] for granularity ``tensor``, [0] for those that are not kept), 0: no threshold
            yet.
        bound_class: int64 [tables], index of the factor in ``bound_classes``.
        steps: int64 scalar, forward passes in training so far.
    """

    def __init__(
        self,
        config: EmbeddingChannelConfig,
        *,
        tables: int,
        dim: int,
        name: str = "embedding",
        metrics: Metrics | None = None,
        kernels: Backend | None = None,
        gradient_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.config = config
        self.tables = tables
        self.dim = dim
        self.name = name
        self.metrics = metrics
        self.gradient_scale = gradient_scale
        self._kernels = kernels
        self._exchange: Exchange | None = None
        self._fingerprint = zlib.crc32(name.encode())
        self.tau: Tensor
        self.bound_class: Tensor
        self.steps: Tensor
        kept = {"table": tables, "tensor": 1, "vector": 0, "sample": 0}[config.granularity]
        self.register_buffer("tau", torch.zeros(kept))
        self.register_buffer("bound_class", torch.ones(tables, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    # -- what applies now ---

    @property
    def lossy(self) -> bool:
        """Whether threshold or bounds apply to the coming forward pass."""
        if not self.config.enabled or not (self.training or self.config.evaluation):
            return False
        warm = int(self.steps) >= self.config.warmup_steps
        return warm and (self.config.sparsity > 0 or self.config.error_bound is not None)

    @property
    def thresholded(self) -> bool:
        """Whether a threshold applies to the coming forward pass."""
        return self.config.sparsity > 0 and self.lossy

    def bound(self) -> float | None:
        """Error bound of the medium class in the coming forward pass, None when nothing is quantised."""
        if self.config.error_bound is None or not self.lossy:
            return None
        factor = 1.0
        if self.config.bound_decay_steps:
            progress = (int(self.steps) - self.config.warmup_steps) / self.config.bound_decay_steps
            stage = min(math.floor(max(progress, 0.0) * _DECAY_STAGES), _DECAY_STAGES)
            factor = self.config.bound_start ** (1.0 - stage / _DECAY_STAGES)
        return self.config.error_bound * factor

    def bounds(self, tables: Tensor) -> Tensor:
        """Absolute error bounds of own tables (int64 [n]) in the coming forward pass, float64 [n].

        Under a threshold a table's bound is at most tau: what is kept is never rounded to zero, so that zeros
        are the mask. (Thresholds that differ from row to row cannot do that: there, what rounds to zero gets
        no gradient.)
        """
        base = self.bound()
        factors = torch.tensor(self.config.bound_classes, dtype=torch.float64, device=tables.device)
        bounds = factors[self.bound_class[tables]] * (0.0 if base is None else base)
        if self.thresholded and self.tau.numel():
            tau = (self.tau[tables] if self.config.granularity == "table" else self.tau).to(torch.float64)
            bounds = torch.where(tau > 0, torch.minimum(bounds, tau), bounds)
        return bounds

    # -- the crossing ---

    def forward(self, blocks: Sequence[Tensor], route: Route, group: dist.ProcessGroup | None) -> Tensor:
        """Send ``blocks[r]``, [rows, dim], to rank ``r``; returns what all ranks sent here, in rank order.

        A collective, and so is its backward pass.
        """
        if self.training:
            with torch.no_grad():
                self._measure([block.detach() for block in blocks], route)
        received = _Cross.apply(self, route, group, torch.is_grad_enabled(), *blocks)
        if self.training:
            self.steps += 1
        return received

    def reproduce(
        self, x: Tensor, tables: Sequence[int], rows: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """What receivers see of own rows, without any exchange; for serving, and as an oracle.

        Args:
            x: [sum of rows, dim], the rows of the tables one after the other.
            tables: Own tables, local numbers.
            rows: Rows of each.

        Returns:
            the received rows, and bool [rows, dim] where gradients come back (None: everywhere).
        """
        block = self._encode(x.detach(), tables, rows, own=True)
        return block.decoded, block.mask

    def _measure(self, blocks: list[Tensor], route: Route) -> None:
        """Follow thresholds and classes by the vectors of this step."""
        step = int(self.steps)
        due = self.config.sparsity > 0 and (
            step % self.config.threshold_lifespan == 0 or not bool(self.tau.all())
        )
        base = self.bound()
        factors = self.config.bound_classes
        classes = base is not None and len(set(factors)) > 1 and step % _CLASS_INTERVAL == 0
        due = due and self.tau.numel() > 0
        if not self.config.enabled or not (due or classes):
            return
        by_table: list[list[Tensor]] = [[] for _ in range(self.tables)]
        for block, tables, rows in zip(blocks, route.sent_tables, route.sent_rows, strict=True):
            for table, part in zip(tables, block.split(rows), strict=True):
                if part.numel():
                    by_table[table].append(part)
        if due:
            groups = by_table if self.config.granularity == "table" else [[p for ps in by_table for p in ps]]
            for number, parts in enumerate(groups[: self.tau.numel()]):
                if parts:
                    self._follow(number, torch.cat([part.reshape(-1) for part in parts]))
        if classes and base is not None:
            for table, parts in enumerate(by_table):
                if parts:
                    self.bound_class[table] = _bound_class(torch.cat(parts).to(torch.float32), base)

    def _follow(self, number: int, flat: Tensor) -> None:
        keep = max(1, round((1.0 - self.config.sparsity) * flat.numel()))
        measured = self._backend(flat.device).exact_threshold(_as_flat(flat), None, keep)
        if not math.isfinite(measured):
            return
        old = float(self.tau[number])
        weight = self.config.threshold_smoothing if old > 0 else 0.0
        self.tau[number] = max(weight * old + (1.0 - weight) * measured, SMALLEST_TAU)

    # -- layers ---

    def _mask(self, x: Tensor, tables: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Entries that reach the threshold, bool [rows, dim]."""
        magnitude = x.abs().to(torch.float32)
        kind = self.config.granularity
        density = 1.0 - self.config.sparsity
        if kind == "vector":
            keep = max(1, round(density * x.shape[1]))
            tau = magnitude.topk(keep, dim=1).values[:, -1:] if len(x) else magnitude[:, :1]
        elif kind == "sample":
            if len(set(rows)) > 1:
                raise ValueError(f"{self.name}: granularity 'sample' needs one vector per table and sample")
            samples = magnitude.view(len(rows), -1, x.shape[1]).transpose(0, 1).flatten(1)
            if not samples.numel():
                return magnitude > 0
            keep = max(1, round(density * samples.shape[1]))
            per_sample = samples.topk(keep, dim=1).values[:, -1]
            tau = per_sample.repeat(len(rows)).unsqueeze(1)
        elif kind == "tensor":
            tau = self.tau[0]
        else:
            at = torch.tensor(tables, dtype=torch.int64, device=x.device)
            counts = torch.tensor(rows, dtype=torch.int64, device=x.device)
            tau = self.tau[at].repeat_interleave(counts).unsqueeze(1)
        return magnitude >= tau.clamp(min=SMALLEST_TAU)

    def _encode(self, x: Tensor, tables: Sequence[int], rows: Sequence[int], *, own: bool) -> _Block:
        """Forward message of ``x``, [rows, dim]; of what stays here (``own``), only what a peer would see."""
        if not x.numel():
            return _Block(torch.empty(0, dtype=torch.uint8, device=x.device), x, None, 0)
        flat = _as_flat(x)
        lossy = self.lossy and _is_finite(flat)
        mask = self._mask(x, tables, rows) if lossy and self.thresholded else None
        if mask is not None:
            flat = torch.where(mask.view(-1), flat, torch.zeros_like(flat))
        if lossy and self.bound() is not None:
            lengths = self._lengths(rows, x.device)
            at = torch.tensor(tables, dtype=torch.int64, device=x.device)
            codes = quantise(flat.to(torch.float32), lengths, self.bounds(at))
            message = flat if own else self._bounded(codes, lengths.tolist(), x.device)
            decoded = codes.decoded
            if mask is not None:
                mask = (decoded != 0).view(x.shape)
            kind = _BOUNDED
        else:
            code = self._value_dtype(x.dtype, masked=mask is not None, gradient=False)
            tau = 0.0 if mask is None else SMALLEST_TAU
            room = torch.empty(payload_bound(flat.numel(), None, code), dtype=torch.uint8, device=x.device)
            stats = self._backend(x.device).compress(flat, None, tau, room, value_dtype=code)
            message = room[: stats.nbytes]
            decoded = flat
            if own and code is not _FLOATS.get(flat.dtype):
                decoded = torch.zeros(flat.numel(), dtype=torch.float32, device=x.device)
                self._backend(x.device).decode_add(message, decoded)
            kind = 0
        kept = x.numel() if mask is None else int(mask.sum())
        if self.config.dense_gradient:
            mask = None
        if not own:
            message = _closed(message, kind | (_MASKED if mask is not None else 0))
        return _Block(message, decoded.view(x.shape).to(x.dtype), mask, kept)

    def _decode(
        self, message: Tensor, like: Tensor, rows: Sequence[int], source: int
    ) -> tuple[Tensor, Tensor | None]:
        """Rows and mask of a forward message; ``like`` gives dtype and device."""
        count = sum(rows)
        shape = (count, self.dim)
        if not count:
            return like.new_zeros(shape), None
        payload, kind = self._opened(message, source)
        try:
            if kind & _BOUNDED:
                lengths = [r * self.dim for r in rows]
                decoded, q = decode_bounded(payload, lengths, get_backend("cpu"))
                mask = (q != 0).view(shape).to(like.device) if kind & _MASKED else None
                return decoded.view(shape).to(device=like.device, dtype=like.dtype), mask
            out = torch.zeros(count * self.dim, dtype=torch.float32, device=like.device)
            kernels = self._backend(like.device)
            kernels.decode_add(payload, out)
            mask = kernels.decode_mask(payload, out.numel()).view(shape) if kind & _MASKED else None
            return out.view(shape).to(like.dtype), mask
        except PayloadError as error:
            raise PayloadError(f"{self.name}: message from rank {source} of the group: {error}") from error

    def _encode_gradient(
        self, gradient: Tensor, rows: Sequence[int], mask: Tensor | None
    ) -> tuple[Tensor, int]:
        """Backward message, and the entries in it."""
        if not gradient.numel():
            return torch.empty(0, dtype=torch.uint8, device=gradient.device), 0
        values = _as_flat(gradient if mask is None else gradient[mask])
        finite = _is_finite(values)
        if self.config.gradient_bound is not None and self._quantises_gradients and finite:
            lengths = self._gradient_lengths(rows, mask, gradient.device)
            values = values.to(torch.float32)
            square = torch.segment_reduce(values.square(), "mean", lengths=lengths, initial=0.0)
            bounds = self.config.gradient_bound * square.to(torch.float64).nan_to_num(0.0).sqrt()
            payload = self._bounded(quantise(values, lengths, bounds), lengths.tolist(), gradient.device)
            return _closed(payload, _BOUNDED), values.numel()
        code = self._value_dtype(gradient.dtype, masked=mask is not None, gradient=True)
        return self._dense(values, code), values.numel()

    def _decode_gradient(
        self, message: Tensor, like: Tensor, rows: Sequence[int], mask: Tensor | None, source: int
    ) -> Tensor:
        shape = (sum(rows), self.dim)
        if not shape[0]:
            return like.new_zeros(shape)
        payload, kind = self._opened(message, source)
        count = shape[0] * self.dim if mask is None else int(mask.sum())
        try:
            if kind & _BOUNDED:
                lengths = self._gradient_lengths(rows, mask, like.device).tolist()
                values = decode_bounded(payload, lengths, get_backend("cpu"))[0].to(like.device)
            else:
                values = torch.zeros(count, dtype=torch.float32, device=like.device)
                self._backend(like.device).decode_add(payload, values)
        except PayloadError as error:
            raise PayloadError(f"{self.name}: gradient from rank {source} of the group: {error}") from error
        values = values.to(like.dtype)
        if mask is None:
            return values.view(shape)
        return like.new_zeros(shape).masked_scatter_(mask, values)

    # -- inside ---

    @property
    def _quantises_gradients(self) -> bool:
        # The step counter has moved on since the forward pass that this gradient belongs to.
        return self.config.enabled and int(self.steps) > self.config.warmup_steps

    def _backend(self, device: torch.device) -> Backend:
        if self._kernels is None:
            self._kernels = get_backend(device)
        return self._kernels

    def _exchange_of(self, group: dist.ProcessGroup | None, device: torch.device) -> Exchange:
        if self._exchange is None or self._exchange.group is not group or self._exchange.device != device:
            self._exchange = Exchange(group, device)
        return self._exchange

    def _value_dtype(self, dtype: torch.dtype, *, masked: bool, gradient: bool) -> ValueDtype:
        choice = self.config.gradient_value_dtype if gradient else self.config.value_dtype
        own = _FLOATS.get(dtype, ValueDtype.FP32)
        if choice != "auto":
            return ValueDtype.parse(choice)
        if masked and own is ValueDtype.FP32:
            return ValueDtype.BF16
        return own

    def _lengths(self, rows: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device) * self.dim

    def _gradient_lengths(self, rows: Sequence[int], mask: Tensor | None, device: torch.device) -> Tensor:
        """Entries of each segment of a gradient message."""
        if mask is None:
            return self._lengths(rows, device)
        counts = torch.tensor(rows, dtype=torch.int64, device=device)
        per_row = mask.sum(dim=1).to(torch.float64)
        return torch.segment_reduce(per_row, "sum", lengths=counts, initial=0.0).to(torch.int64)

    def _dense(self, flat: Tensor, code: ValueDtype) -> Tensor:
        room = torch.empty(payload_bound(flat.numel(), None, code), dtype=torch.uint8, device=flat.device)
        stats = self._backend(flat.device).compress(flat, None, 0.0, room, value_dtype=code)
        return _closed(room[: stats.nbytes], 0)

    def _bounded(self, codes: Any, lengths: list[int], device: torch.device) -> Tensor:
        payload = encode_bounded(
            codes,
            lengths,
            get_backend("cpu"),
            entropy=self.config.entropy,
            repeats=not self.config.deduplicate,
        )
        return payload.to(device)

    def _opened(self, message: Tensor, source: int) -> tuple[Tensor, int]:
        kind = int(message[-1]) if message.numel() else -1
        if not 0 <= kind <= _BOUNDED | _MASKED:
            what = "no message" if kind < 0 else f"a message of unknown kind {kind}"
            raise PayloadError(f"{self.name}: {what} from rank {source} of the group")
        return message[:-1], kind

    def _record(
        self, direction: str, sizes: dict[str, int], *, quantised: bool, times: tuple[float, float, float]
    ) -> None:
        """Report one exchange; ``sizes`` in bytes: dense, lossless, kept, wire; in entries: numel, nnz."""
        if self.metrics is None or not sizes["dense"]:
            return
        cls = f"embedding_{direction}"
        masked = sizes["nnz"] < sizes["numel"]
        tau = float(self.tau.mean()) if self.tau.numel() else 0.0
        target = 1.0 - self.config.sparsity if masked else 1.0
        encode_ms, exchange_ms, decode_ms = times
        self.metrics.record(
            Record(
                cls,
                dense_bytes=sizes["dense"],
                sent_bytes=sizes["wire"],
                numel=sizes["numel"],
                nnz=sizes["nnz"],
                encode_ms=encode_ms,
                exchange_ms=exchange_ms,
                decode_ms=decode_ms,
                target_density=target,
                tau=tau,
            )
        )
        layers = [("lossless", sizes["lossless"])] if self.config.deduplicate else []
        layers += [("threshold", sizes["kept"])] if masked else []
        layers += [("bounded", 0)] if quantised else []
        before = sizes["dense"]
        for number, (layer, after) in enumerate(layers):
            # What the last layer leaves is what crosses, positions, headers and all.
            after = sizes["wire"] if number == len(layers) - 1 else after
            self.metrics.record(
                Record(
                    f"{cls}/{layer}",
                    dense_bytes=before,
                    sent_bytes=after,
                    numel=sizes["numel"],
                    nnz=sizes["nnz"],
                    target_density=target,
                    tau=tau,
                )
            )
            before = after


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        channel: EmbeddingChannel,
        route: Route,
        group: dist.ProcessGroup | None,
        tracked: bool,
        *blocks: Tensor,
    ) -> Tensor:
        ctx.channel, ctx.route, ctx.group = channel, route, group
        ctx.like = blocks[0].new_empty(0)
        exchange = channel._exchange_of(group, blocks[0].device)
        rank = exchange.rank
        before = exchange.sent_bytes
        started = time.perf_counter()
        if not channel.config.enabled:
            received = _plain(
                torch.cat(blocks), route.sent_rows, [sum(rows) for rows in route.received_rows], exchange
            )
            times = (0.0, 1e3 * (time.perf_counter() - started), 0.0)
            wire = _bytes_to_peers([b.numel() * b.element_size() for b in blocks], rank)
            sizes = {"dense": wire, "lossless": wire, "kept": wire, "wire": wire}
            numel = wire // blocks[0].element_size()
            channel._record("forward", {**sizes, "numel": numel, "nnz": numel}, quantised=False, times=times)
            ctx.masks = None
            return received
        quantised = channel.bound() is not None
        try:
            sent = [
                channel._encode(block.detach(), tables, rows, own=r == rank)
                for r, (block, tables, rows) in enumerate(
                    zip(blocks, route.sent_tables, route.sent_rows, strict=True)
                )
            ]
        except Exception:
            exchange.abort()
            raise
        encoded = time.perf_counter()
        messages = exchange.all_to_all(
            [block.message if r != rank else block.message[:0] for r, block in enumerate(sent)],
            channel._fingerprint,
        )
        exchanged = time.perf_counter()
        parts, masks = [], []
        for source, (message, rows) in enumerate(zip(messages, route.received_rows, strict=True)):
            if source == rank:
                part, mask = sent[rank].decoded, sent[rank].mask
            else:
                part, mask = channel._decode(message, ctx.like, rows, source)
            parts.append(part)
            masks.append(mask)
        itemsize = ctx.like.element_size()
        peers = [r for r in range(len(blocks)) if r != rank]
        numel = sum(blocks[r].numel() for r in peers)
        nnz = sum(sent[r].kept for r in peers) if channel.thresholded else numel
        sizes = {
            "dense": sum(route.samples[r] for r in peers) * channel.tables * channel.dim * itemsize,
            "lossless": numel * itemsize,
            "kept": nnz * itemsize,
            "wire": exchange.sent_bytes - before,
            "numel": numel,
            "nnz": nnz,
        }
        done = time.perf_counter()
        times = (1e3 * (encoded - started), 1e3 * (exchanged - encoded), 1e3 * (done - exchanged))
        channel._record("forward", sizes, quantised=quantised, times=times)
        ctx.masks = ([block.mask for block in sent], masks) if tracked else None
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        channel, route, group = ctx.channel, ctx.route, ctx.group
        gradient = gradients[0].contiguous()
        exchange = channel._exchange_of(group, gradient.device)
        rank = exchange.rank
        before = exchange.sent_bytes
        counts = [sum(rows) for rows in route.received_rows]
        scale = channel.gradient_scale
        started = time.perf_counter()
        if not channel.config.enabled:
            out = _plain(gradient, route.received_rows, [sum(rows) for rows in route.sent_rows], exchange)
            times = (0.0, 1e3 * (time.perf_counter() - started), 0.0)
            out = out if scale == 1.0 else out * scale
            wire = _bytes_to_peers([c * channel.dim * gradient.element_size() for c in counts], rank)
            sizes = {"dense": wire, "lossless": wire, "kept": wire, "wire": wire}
            numel = wire // gradient.element_size()
            channel._record("backward", {**sizes, "numel": numel, "nnz": numel}, quantised=False, times=times)
            return (None, None, None, None, *out.split([sum(rows) for rows in route.sent_rows]))
        sent_masks, received_masks = ctx.masks
        parts = gradient.split(counts)
        empty = torch.empty(0, dtype=torch.uint8, device=gradient.device)
        try:
            answers = [
                channel._encode_gradient(part, rows, mask) if source != rank else (empty, 0)
                for source, (part, rows, mask) in enumerate(
                    zip(parts, route.received_rows, received_masks, strict=True)
                )
            ]
        except Exception:
            exchange.abort()
            raise
        encoded = time.perf_counter()
        messages = exchange.all_to_all([message for message, _ in answers], channel._fingerprint + 1)
        exchanged = time.perf_counter()
        tables = []
        for source, (message, rows, mask) in enumerate(
            zip(messages, route.sent_rows, sent_masks, strict=True)
        ):
            if source == rank:
                part = parts[rank] if mask is None else parts[rank] * mask
            else:
                part = channel._decode_gradient(message, gradient, rows, mask, source)
            tables.append(part if scale == 1.0 else part * scale)
        peers = [r for r in range(len(parts)) if r != rank]
        itemsize = gradient.element_size()
        numel = sum(parts[r].numel() for r in peers)
        nnz = sum(answers[r][1] for r in peers)
        sizes = {
            "dense": route.samples[rank] * sum(route.own_tables[r] for r in peers) * channel.dim * itemsize,
            "lossless": numel * itemsize,
            "kept": nnz * itemsize,
            "wire": exchange.sent_bytes - before,
            "numel": numel,
            "nnz": nnz,
        }
        quantised = channel.config.gradient_bound is not None and channel._quantises_gradients
        done = time.perf_counter()
        times = (1e3 * (encoded - started), 1e3 * (exchanged - encoded), 1e3 * (done - exchanged))
        channel._record("backward", sizes, quantised=quantised, times=times)
        return (None, None, None, None, *tables)


def _plain(flat: Tensor, sent: list[list[int]], received: list[int], exchange: Exchange) -> Tensor:
    """Uncompressed all-to-all of rows."""
    out = flat.new_empty((sum(received), *flat.shape[1:]))
    dist.all_to_all_single(
        out,
        flat.contiguous(),
        output_split_sizes=received,
        input_split_sizes=[sum(rows) for rows in sent],
        group=exchange.group,
    )
    return out


def _bytes_to_peers(sizes: Sequence[int], rank: int) -> int:
    return sum(size for r, size in enumerate(sizes) if r != rank)


def _as_flat(tensor: Tensor) -> Tensor:
    """1-D and contiguous, in a type the kernels read (fp64 is rounded)."""
    flat = tensor.reshape(-1)
    return flat if flat.dtype in _FLOATS else flat.to(torch.float32)


def _is_finite(flat: Tensor) -> bool:
    if not flat.numel():
        return True
    low, high = torch.aminmax(flat)
    return float(high) < OVERFLOW_MAGNITUDE and float(low) > -OVERFLOW_MAGNITUDE


def _closed(payload: Tensor, kind: int) -> Tensor:
    """A message: the payload, then one byte that says how to read it."""
    return torch.cat([payload, torch.tensor([kind], dtype=torch.uint8, device=payload.device)])


def _bound_class(rows: Tensor, bound: float) -> int:
    """0, 1, 2 (small, medium, large bound) by the share of distinct rows that quantising merges."""
    lengths = torch.tensor([rows.numel()], device=rows.device)
    codes = quantise(
        rows.reshape(-1), lengths, torch.tensor([bound], dtype=torch.float64, device=rows.device)
    )
    distinct = len(torch.unique(rows, dim=0))
    merged = 1.0 - len(torch.unique(codes.decoded.view_as(rows), dim=0)) / distinct
    return 0 if merged >= _HOMOGENISED[0] else 2 if merged < _HOMOGENISED[1] else 1
