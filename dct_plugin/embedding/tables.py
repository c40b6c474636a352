"""Embedding tables sharded over ranks, and the all-to-all that brings their vectors to the samples.

Every rank holds whole tables (*table-wise* sharding) and its own part of the batch. Forward: each rank asks
the owners for the rows its samples need (:mod:`~dct_plugin.embedding.requests`), the owners look them up and
send them through the :class:`~dct_plugin.embedding.channel.EmbeddingChannel`; backward, the gradients go the
same way back and stay with the owner. Gradients of equal rows are summed on the samples' rank, by autograd.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from ..codecs.copies import to_device
from ..config import EmbeddingChannelConfig, KernelConfig
from ..kernels.embedding import get_device_requests
from ..metrics import Metrics, Record
from ..transport.exchange import Exchange
from .channel import EmbeddingChannel, Route
from .device_requests import REQUEST, DeviceRequests
from .frames import Frames, Leg
from .lookup import take_rows
from .placement import Table, check_placement
from .request_message import MOST_BYTES, Answer, Bags
from .requests import Request, Requests

__all__ = ["ShardedTables", "TableShard", "load_tables"]

Pooling = Literal["sum", "mean"]

logger = logging.getLogger("dct_plugin")

_HOST = torch.device("cpu")


class TableShard(nn.Module):
    """The tables of one rank, below each other in one matrix, with the channel's state beside them.

    A rank without tables holds one row that nothing uses: frameworks that flatten parameters want one.
    """

    def __init__(self, rows: Sequence[int], dim: int, channel: EmbeddingChannel) -> None:
        super().__init__()
        self.rows = list(rows)
        self.weight = nn.Parameter(torch.zeros(max(sum(rows), 1), dim))
        self.channel = channel

    def tables(self) -> list[Tensor]:
        """Views of the tables, [rows, dim] each."""
        return list(self.weight.detach()[: sum(self.rows)].split(self.rows)) if self.rows else []


class ShardedTables(nn.Module):
    """Embedding tables of equal width, each on one rank of a group.

    Every rank constructs it alike and calls it at the same time (forward and backward are collectives), each
    with samples of its own; their number may differ.

    Args:
        cardinalities: Rows of each table.
        dim: Width.
        group: Process group, None for the default one; it has to exist already.
        config: ``dct.embedding``; defaults to a channel that de-duplicates rows and is exact.
        pooling: How the rows of a sample are combined, ``sum`` or ``mean``.
        rows_per_sample: Average rows per sample of each table, for the placement.
        placement: Tables of each rank; balanced by :func:`place_tables` by default.
        sparse: Sparse gradients, for optimizers that take them.
        average_gradients: Divide gradients by the number of ranks, so that they are those of the mean over
            the global batch, as data-parallel gradients are. False where the host framework does that.
        name: Name in errors and metrics.
        metrics: Records what crosses; see the channel. Requests are ``embedding_ids``.
        kernels: ``dct.kernels``; the defaults when None.

    Initial rows are uniform in ``+-1/sqrt(rows)``, drawn from the global generator table by table: every rank
    draws all tables and keeps its own, so the model does not depend on the number of ranks.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        dim: int,
        *,
        group: dist.ProcessGroup | None = None,
        config: EmbeddingChannelConfig | None = None,
        pooling: Pooling = "sum",
        rows_per_sample: Sequence[float] | None = None,
        placement: Sequence[Sequence[int]] | None = None,
        sparse: bool = False,
        average_gradients: bool = True,
        name: str = "tables",
        metrics: Metrics | None = None,
        kernels: KernelConfig | None = None,
    ) -> None:
        super().__init__()
        if pooling not in ("sum", "mean"):
            raise ValueError(f"pooling is {pooling!r}; allowed: 'sum', 'mean'")
        self.cardinalities = [int(rows) for rows in cardinalities]
        if max(self.cardinalities, default=0) >= 2**31:
            raise ValueError(f"a table has {max(self.cardinalities)} rows; at most 2**31 - 1 are supported")
        self.dim = dim
        self.pooling = pooling
        self.sparse = sparse
        self.name = name
        self.metrics = metrics
        self.config = config if config is not None else EmbeddingChannelConfig()
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        hot = rows_per_sample if rows_per_sample is not None else [1.0] * len(self.cardinalities)
        described = [Table(rows, dim, p) for rows, p in zip(self.cardinalities, hot, strict=True)]
        self.placement = check_placement(placement, described, self.world_size)
        own = self.placement[self.rank]
        channel = EmbeddingChannel(
            self.config,
            tables=len(own),
            dim=dim,
            name=name,
            metrics=metrics,
            kernels=kernels,
            gradient_scale=1.0 / self.world_size if average_gradients else 1.0,
        )
        # Host frameworks' checkpoints look for the shard by its type.
        self.shard = TableShard([self.cardinalities[t] for t in own], dim, channel)
        self._requests = Requests(
            self.cardinalities, self.placement, rank=self.rank, config=self.config, name=name
        )
        self._fingerprint = zlib.crc32(f"{name}/ids".encode())
        self._frames: Frames | None = None
        self._device_requests: dict[torch.device, DeviceRequests | None] = {}
        self._said = False
        self._initialise()

    @property
    def channel(self) -> EmbeddingChannel:
        """The channel with its thresholds and counters."""
        return self.shard.channel

    def follow(self, optimizer: Any) -> RemovableHandle:
        """Count the steps of ``optimizer``, for warm-up, decay and life-span; call it once.

        See :meth:`EmbeddingChannel.follow() <dct_plugin.embedding.bounds.TableLimits.follow>`.
        """
        return self.channel.follow(optimizer)

    def end_step(self) -> None:
        """An optimizer step is over; for those who do not :meth:`follow` the optimizer."""
        self.channel.end_step()

    def _initialise(self) -> None:
        own = dict(zip(self.placement[self.rank], self.shard.tables(), strict=True))
        for number, rows in enumerate(self.cardinalities):
            limit = 1.0 / math.sqrt(rows)
            drawn = torch.empty(rows, self.dim).uniform_(-limit, limit)
            if number in own:
                own[number].copy_(drawn)

    # -- forward ---

    def forward(self, categorical: Tensor | Sequence[Bags]) -> Tensor:
        """Look up this rank's samples.

        Args:
            categorical: int [B, F]; or int [B, F, L], L rows per sample, pooled; or one :class:`Bags` per
                table.

        Returns:
            [B, F, dim] in the tables' dtype.

        Raises:
            IndexError: an id outside its table; named with table and rank.
        """
        weight = self.shard.weight
        exchange = self.channel.exchange(self.group, weight.device)
        request, answers = self._asked(categorical, exchange)
        route = Route(
            sent_tables=[[t for t, _ in answer.segments] for answer in answers],
            sent_rows=[[n for _, n in answer.segments] for answer in answers],
            received_rows=request.rows,
            samples=[answer.samples for answer in answers],
            own_tables=[len(tables) for tables in self.placement],
        )
        received = self.channel(self._look_up(answers), route, self.group)
        return self._assemble(received, request).to(weight.dtype)

    def _asked(
        self, categorical: Tensor | Sequence[Bags], exchange: Exchange
    ) -> tuple[Request, list[Answer]]:
        """This rank's request, and what every rank asks for."""
        before, waited = exchange.sent_bytes, exchange.waited_ms
        leg, backend = self._leg(exchange), self.channel.backend(_HOST)
        stays = self._requests.stays(categorical, exchange.device)
        on_device = self._on_device(exchange.device) if stays and self.world_size > 1 else None
        if leg is not None and on_device is not None:
            assert isinstance(categorical, Tensor)
            request, answers, (exchange_ms, decode_ms) = on_device.cross(categorical, leg, backend)
        else:
            if self._frames is not None and not stays and not self._said:
                self._said = True
                logger.info(
                    "dct: %s: requests for ids that come from the host, or are several per sample, are "
                    "written and read there; the device is waited for once per forward pass",
                    self.name,
                )
            # Peers learn of an error in the exchange they are waiting in.
            with exchange.preparing() if leg is None else leg.frames.telling(leg):
                kernels = self.channel.host_kernels()
                request = self._requests.write(categorical, exchange.device, backend, kernels)
            began = time.perf_counter()
            received = self._cross(request, exchange, leg)
            crossed = time.perf_counter()
            answers = [
                request.own if source == self.rank else self._requests.read(message, source, backend)
                for source, message in enumerate(received)
            ]
            exchange_ms, decode_ms = 1e3 * (crossed - began), 1e3 * (time.perf_counter() - crossed)
        if self.metrics is not None and self.world_size > 1:
            ids = self._requests.ids_to_peers(request)
            self.metrics.record(
                Record(
                    "embedding_ids",
                    dense_bytes=4 * ids,
                    sent_bytes=exchange.sent_bytes - before,
                    numel=ids,
                    nnz=ids,
                    select_ms=request.distinct_ms,
                    encode_ms=request.encode_ms,
                    exchange_ms=exchange_ms,
                    waited_ms=exchange.waited_ms - waited,
                    decode_ms=decode_ms,
                )
            )
        return request, answers

    def _leg(self, exchange: Exchange) -> Leg | None:
        """Frames for requests, where sizes wait for a device; None: they are exchanged with their sizes."""
        if not self.channel.backend(exchange.device).writes_slots:
            return None
        if self._frames is None or self._frames.exchange is not exchange:
            self._frames = Frames(exchange, self._fingerprint)
        shapes = [REQUEST] * self.world_size
        return self._frames.leg(shapes, shapes, exchange.device) if self._frames.known else None

    def _on_device(self, device: torch.device) -> DeviceRequests | None:
        """The way of requests whose ids are on the device; None: the host writes and reads them."""
        if device not in self._device_requests:
            limits = [first_rows[-1] for first_rows in self._requests.first_rows]
            tables = [len(each) for each in self.placement]
            backend = self.channel.backend(device)
            codec = get_device_requests(backend, tables, limits, self.rank, device)
            way = None if codec is None else DeviceRequests(self._requests, codec, device)
            self._device_requests[device] = way
        return self._device_requests[device]

    def _cross(self, request: Request, exchange: Exchange, leg: Leg | None) -> list[Tensor]:
        """What every rank says, on the host; what this one has to say is there, too."""
        if leg is not None:
            return leg.frames.cross(leg, request.messages, REQUEST)
        frames = self._frames
        messages = [to_device(message, exchange.device) for message in request.messages]
        bounds = [MOST_BYTES] * self.world_size
        fingerprint = self._fingerprint if frames is None else frames.fingerprint
        received = exchange.all_to_all(messages, fingerprint, bounds=bounds)
        if frames is not None:
            shapes = [REQUEST] * self.world_size
            frames.learn(shapes, messages, shapes, received)
        return received

    def _look_up(self, answers: Sequence[Answer]) -> Tensor:
        """The vectors for every rank, [rows, dim], in rank order; one gather for all of them."""
        weight = self.shard.weight
        device = weight.device
        kernels = self.channel.host_kernels()
        if all(answer.rows.device.type == "cpu" for answer in answers):  # one copy
            rows = to_device(torch.cat([answer.rows for answer in answers]), device)
        else:
            rows = torch.cat([to_device(answer.rows, device) for answer in answers])
        single_counts = [len(answer.rows) for answer in answers]
        bag_counts = [len(answer.bags.lengths) for answer in answers]
        if not sum(bag_counts):
            return take_rows(weight, rows, kernels, sparse=self.sparse)
        ids = to_device(torch.cat([answer.bags.ids for answer in answers]), device)
        lengths = torch.cat([answer.bags.lengths for answer in answers])
        if bool((lengths == 1).all()):
            bags = take_rows(weight, ids, kernels, sparse=self.sparse)
        else:
            bags = _pool(ids, to_device(lengths, device), weight, self.pooling, sparse=self.sparse)
        if not sum(single_counts):
            return bags
        singles = take_rows(weight, rows, kernels, sparse=self.sparse)
        pairs = zip(singles.split(single_counts), bags.split(bag_counts), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def _assemble(self, received: Tensor, request: Request) -> Tensor:
        """[B, F, dim] from the rows that arrived."""
        kernels = self.channel.host_kernels()
        if isinstance(request.positions, Tensor):
            return take_rows(received, request.positions, kernels)
        vectors = []
        for table, where in enumerate(request.positions):
            if where is not None:
                vectors.append(take_rows(received, where, kernels))
            else:
                ids, lengths = request.pooled[table]
                vectors.append(_pool(ids, lengths, received, self.pooling))
        return torch.stack(vectors, dim=1)

    # -- state of the whole ---

    def gather_tables(self) -> dict[str, Any] | None:
        """All tables on rank 0 (None elsewhere), for export and for another number of ranks. A collective.

        Returns:
            ``tables``: fp [rows, dim] per table; ``tau`` and ``bound_class`` per table where they exist;
            ``steps``.
        """
        channel = self.channel
        own = {
            "tables": [t.cpu().clone() for t in self.shard.tables()],
            "tau": channel.tau.cpu().clone(),
            "bound_class": channel.bound_class.cpu().clone(),
            "steps": int(channel.steps),
        }
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, own, group=self.group)
        if self.rank:
            return None
        whole: dict[str, Any] = {"steps": own["steps"], "tables": [None] * len(self.cardinalities)}
        per_table = self.config.granularity == "table"
        whole["bound_class"] = torch.ones(len(self.cardinalities), dtype=torch.int64)
        whole["tau"] = torch.zeros(len(self.cardinalities))
        for tables, part in zip(self.placement, everyones, strict=True):
            for at, table in enumerate(tables):
                whole["tables"][table] = part["tables"][at]
                whole["bound_class"][table] = part["bound_class"][at]
                if per_table:
                    whole["tau"][table] = part["tau"][at]
                elif part["tau"].numel():
                    whole["tau"][table] = part["tau"][0]
        return whole


def load_tables(module: ShardedTables, whole: Mapping[str, Any]) -> None:
    """Take this rank's part of :meth:`ShardedTables.gather_tables`, whatever the number of ranks was.

    Raises:
        ValueError: another number of tables, or a table of another shape.
    """
    tables = whole["tables"]
    shapes = [tuple(t.shape) for t in tables]
    expected = [(rows, module.dim) for rows in module.cardinalities]
    if shapes != expected:
        raise ValueError(f"{module.name}: the saved tables have shapes {shapes}, expected {expected}")
    own = module.placement[module.rank]
    channel = module.channel
    with torch.no_grad():
        for view, table in zip(module.shard.tables(), own, strict=True):
            view.copy_(tables[table])
        channel.steps.fill_(whole["steps"])
        channel.restart_step()
        if own:
            channel.bound_class.copy_(whole["bound_class"][own])
            tau = whole["tau"][own]
            if channel.tau.numel():
                channel.tau.copy_(tau if channel.tau.numel() == len(own) else tau[:1])


def _pool(ids: Tensor, lengths: Tensor, weight: Tensor, pooling: Pooling, *, sparse: bool = False) -> Tensor:
    offsets = torch.cumsum(lengths, 0) - lengths
    return functional.embedding_bag(ids, weight, offsets, mode=pooling, sparse=sparse)
