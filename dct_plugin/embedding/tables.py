"""Embedding tables sharded over ranks, and the all-to-all that brings their vectors to the samples.

Every rank holds whole tables (*table-wise* sharding) and its own part of the batch. Forward: each rank asks
the owners for the rows its samples need (:mod:`~dct_plugin.embedding.requests`), the owners look them up and
send them through the :class:`~dct_plugin.embedding.embedding_exchange.EmbeddingExchange`. Backward, the
gradients go back the same way and stay with the owner. Gradients of equal rows are summed on the samples'
rank, by autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..autograd import with_gradient
from ..codecs.copies import to_device
from ..config import EmbeddingChannelConfig, KernelConfig
from ..errors import DCTError, DesyncError
from ..kernels.embedding import add_rows
from ..metrics import Metrics, Record
from .embedding_exchange import EmbeddingExchange, Route
from .placement import Table, check_memory, check_placement, draw_table, seed_of_tables
from .request_message import Bags, RowRequest
from .requests import RequestExchange

Pooling = Literal["sum", "mean"]
_ALONE = "a look-up is a collective, in evaluation too: all ranks make it, with gradients or without"


class TableShard(nn.Module):
    """The tables of one rank, concatenated by rows in one matrix.

    A rank without tables holds one unused row, because frameworks that flatten parameters need one.
    """

    def __init__(self, rows: Sequence[int], dim: int, exchange: EmbeddingExchange) -> None:
        super().__init__()
        self.rows = list(rows)
        self.weight = nn.Parameter(torch.zeros(max(sum(rows), 1), dim))
        self.embedding_exchange = exchange

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, DTensor):
            raise DCTError(
                f"{self.embedding_exchange.name}: rank {dist.get_rank()}: fully_shard (FSDP2) would mix the "
                "tables of different ranks; shard the rest of the model alone, as docs/embeddings.md shows "
                "for DistributedDataParallel"
            )
        super().__setattr__(name, value)

    def tables(self) -> list[Tensor]:
        """Views of the tables, [rows, dim] each."""
        return list(self.weight.detach()[: sum(self.rows)].split(self.rows)) if self.rows else []


class ShardedTables(nn.Module):
    """Embedding tables of equal width, each of which one rank of a group owns.

    Every rank constructs it alike and calls it at the same time (forward and backward are collectives), each
    with samples of its own; their number may differ.

    Args:
        cardinalities: Rows of each table.
        dim: Width.
        group: Process group, None for the default one; it has to exist already.
        config: ``dct.embedding``; by default rows are de-duplicated and exact.
        pooling: Reduction of the rows of a sample, ``sum`` or ``mean``.
        placement: Numbers of the tables of each rank, ``[[5, 0], [1, 2, 3, 4]]``; by default
            :func:`place_tables` balances them by rows. For multi-hot tables pass its result for
            :class:`Table` objects with ``pooling``.
        sparse: Sparse gradients, for optimizers that take them.
        average_gradients: Divide gradients by the number of ranks, so that they are those of the mean over
            the global batch, as data-parallel gradients are. False where the host framework does that.
        name: Name in errors and metrics.
        metrics: Records bytes and times; see :class:`EmbeddingExchange`. Requests are ``embedding_ids``.
        kernels: ``dct.kernels``; the defaults when None.

    Raises:
        ValueError: A table has no rows or too many, the placement is wrong, or the tables of a rank cannot
            fit into memory.

    Every rank draws its own tables alone, and the model does not depend on the number of ranks
    (:func:`~dct_plugin.embedding.placement.draw_table`).
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        dim: int,
        *,
        group: dist.ProcessGroup | None = None,
        config: EmbeddingChannelConfig | None = None,
        pooling: Pooling = "sum",
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
        for number, rows in enumerate(self.cardinalities):
            if not 0 < rows < 2**31:
                raise ValueError(f"{name}: table {number} has {rows} rows; allowed: 1 to 2**31 - 1")
        self.dim = dim
        self.pooling = pooling
        self.sparse = sparse
        self.name = name
        self.config = config if config is not None else EmbeddingChannelConfig()
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        described = [Table(rows, dim) for rows in self.cardinalities]
        self.placement = check_placement(placement, described, self.world_size)
        check_memory(self.placement, described, name)
        own = self.placement[self.rank]
        exchange = EmbeddingExchange(
            self.config,
            tables=len(own),
            dim=dim,
            name=name,
            metrics=metrics,
            kernels=kernels,
            gradient_scale=1.0 / self.world_size if average_gradients else 1.0,
        )
        # Host frameworks' checkpoints look for the shard by its type.
        self.shard = TableShard([self.cardinalities[t] for t in own], dim, exchange)
        self._requests = RequestExchange(
            self.cardinalities,
            self.placement,
            rank=self.rank,
            config=self.config,
            name=name,
            kernels=kernels,
        )
        seed = seed_of_tables()
        for number, table in zip(own, self.shard.tables(), strict=True):
            draw_table(table, number, seed)

    @property
    def embedding_exchange(self) -> EmbeddingExchange:
        """The exchange of vectors, with its thresholds and counters."""
        return self.shard.embedding_exchange

    @property
    def metrics(self) -> Metrics | None:
        """The metrics that record bytes and times; None records nothing."""
        return self.embedding_exchange.metrics

    @metrics.setter
    def metrics(self, metrics: Metrics | None) -> None:
        self.embedding_exchange.metrics = metrics

    def follow(self, optimizer: Any) -> RemovableHandle:
        """Count the steps of ``optimizer``, for thresholds; call it once.

        See :meth:`EmbeddingExchange.follow() <dct_plugin.embedding.bounds.TableLimits.follow>`.
        """
        return self.embedding_exchange.follow(optimizer)

    def end_step(self) -> None:
        """Count an optimizer step, if the optimizer is not followed (:meth:`follow`)."""
        self.embedding_exchange.end_step()

    # -- forward ---

    @torch.compiler.disable
    def forward(self, categorical: Tensor | Sequence[Bags]) -> Tensor:
        """Look up this rank's samples.

        Args:
            categorical: int [B, F]; or int [B, F, L], L rows per sample, pooled; or one :class:`Bags` per
                table.

        Returns:
            [B, F, dim] in the tables' dtype.

        Raises:
            DesyncError: Other ranks did not look up samples at the same time, or failed.
            IndexError: An id is outside its table; named with table and rank.
            TypeError: The ids are no integers.
            DCTError: DistributedDataParallel reduces the gradients of the tables.
        """
        weight = self.shard.weight
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None and any(weight is parameter for parameter in ddp._module_parameters):
            raise DCTError(
                f"{self.name}: rank {self.rank}: DistributedDataParallel would average the tables of "
                "different ranks; wrap the rest of the model alone, as docs/embeddings.md shows"
            )
        exchange = self.embedding_exchange.transport(self.group, weight.device)
        record = Record("embedding_ids")
        try:
            lookup, requests = self._requests.exchange(categorical, exchange, record)
        except DesyncError as error:
            raise DesyncError(f"{error}. {self.name}: {_ALONE}") from error
        if self.metrics is not None and self.world_size > 1:
            ids = self._requests.ids_to_peers(lookup)
            self.metrics.record(replace(record, dense_bytes=4 * ids, numel=ids, nnz=ids))
        route = Route(
            sent_tables=[[table for table, _ in request.segments] for request in requests],
            sent_rows=[request.counts for request in requests],
            received_rows=[request.counts for request in lookup.requests],
            samples=[request.samples for request in requests],
            own_tables=[len(tables) for tables in self.placement],
        )
        received = self.embedding_exchange(self._look_up(requests), route, self.group)
        pooled = [_pool(*each, received, self.pooling) for each in lookup.pooled.values()]
        rows = torch.cat([received, *pooled]) if pooled else received
        return take_rows(rows, lookup.positions).to(weight.dtype)

    def _look_up(self, requests: Sequence[RowRequest]) -> Tensor:
        """Return the vectors for every rank, [rows, dim], in rank order; one gather for all of them."""
        weight = self.shard.weight
        device = weight.device
        rows = to_device(torch.cat([request.rows for request in requests]), device)
        row_counts = [len(request.rows) for request in requests]
        bag_counts = [len(request.bags.lengths) for request in requests]
        singles = take_rows(weight, rows, sparse=self.sparse)
        if not sum(bag_counts):
            return singles
        ids, lengths = (torch.cat(each) for each in zip(*(r.bags for r in requests), strict=True))
        bags = _pool(
            to_device(ids, device), to_device(lengths, device), weight, self.pooling, sparse=self.sparse
        )
        pairs = zip(singles.split(row_counts), bags.split(bag_counts), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    # -- state of the whole ---

    def gather_tables(self) -> dict[str, Any] | None:
        """Return all tables on rank 0 (None elsewhere), for export and another number of ranks; a collective.

        Returns:
            ``tables``: fp [rows, dim] per table; ``tau`` per table where it exists; ``steps``.
        """
        exchange = self.embedding_exchange
        tables = self.placement[self.rank]
        own = {
            table: (weight.cpu().clone(), tau)
            for table, weight, tau in zip(tables, self.shard.tables(), exchange.tau.tolist(), strict=True)
        }
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, own, group=self.group)
        if self.rank:
            return None
        found = dict(sorted((table, part) for each in everyones for table, part in each.items()))
        return {
            "steps": int(exchange.steps),
            "tables": [weight for weight, _ in found.values()],
            "tau": torch.tensor([tau for _, tau in found.values()], dtype=torch.float32, device="cpu"),
        }


def take_rows(matrix: Tensor, rows: Tensor, *, sparse: bool = False) -> Tensor:
    """Return ``matrix[rows]``: [any, dim], int64 [...] -> [..., dim], with a gradient that costs no more than
    what it adds up.

    On the CPU torch's dense backward pass of an embedding adds row by row, through the dispatcher: some 0.5
    us for a row of 16 numbers, longer than all of the codec. The kernels add the same rows in the same order.

    Args:
        sparse: Make the gradient sparse, for optimizers that take them.
    """
    if sparse or matrix.device.type != "cpu" or matrix.dtype != torch.float32:
        return functional.embedding(rows, matrix, sparse=sparse)

    def add_up(gradient: Tensor) -> Tensor:
        out = torch.zeros(matrix.shape, dtype=torch.float32, device="cpu")
        x = gradient.reshape(-1, matrix.shape[1]).contiguous()
        add_rows(out, rows.reshape(-1).contiguous(), x)
        return out

    return with_gradient(matrix, lambda x: functional.embedding(rows, x), add_up)


def load_tables(module: ShardedTables, whole: Mapping[str, Any]) -> None:
    """Load this rank's part of :meth:`ShardedTables.gather_tables`, whatever the number of ranks was.

    Raises:
        ValueError: Another number of tables, or a table of another shape.
    """
    tables = whole["tables"]
    shapes = [tuple(t.shape) for t in tables]
    expected = [(rows, module.dim) for rows in module.cardinalities]
    if shapes != expected:
        raise ValueError(f"{module.name}: the saved tables have shapes {shapes}, expected {expected}")
    own = module.placement[module.rank]
    exchange = module.embedding_exchange
    with torch.no_grad():
        for view, table in zip(module.shard.tables(), own, strict=True):
            view.copy_(tables[table])
        exchange.steps.fill_(whole["steps"])
        exchange.restart_step()
        if own:
            exchange.tau.copy_(whole["tau"][own])


def _pool(ids: Tensor, lengths: Tensor, weight: Tensor, pooling: Pooling, *, sparse: bool = False) -> Tensor:
    if len(ids) == len(lengths) and bool((lengths == 1).all()):
        return take_rows(weight, ids, sparse=sparse)
    offsets = torch.cumsum(lengths, 0) - lengths
    return functional.embedding_bag(ids, weight, offsets, mode=pooling, sparse=sparse)
