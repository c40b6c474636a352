"""DES: small partial results are aggregated, instead of moving embeddings.

Source: Rong et al., SIGIR 2020, arXiv:1909.04823.

An operator over the embeddings of all fields is replaced by sub-operators that run where the shards are;
their partial results are summed over the ranks. Forward, the partial results of the global batch are
reduce-scattered to the ranks whose samples they belong to; backward, the gradients of the results are
all-gathered, and every rank goes on from them by itself. That is exact, and worth it when the partial results
are fewer than the numbers that an all-to-all of embeddings would move: see
:func:`~dct_plugin.embedding.choice.choose`.

Where a model's embeddings come from is an :class:`Embeddings` module: :class:`LocalEmbeddings` (all fields of
the local batch, from local tables or through an all-to-all), :class:`FieldShards` (the fields of this rank's
tables for the global batch) or :class:`ColumnShards` (some columns of all fields for the global batch). A
model's operators are written once, for any of them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..metrics import Metrics, Record
from .placement import Table, check_placement

__all__ = ["ColumnShards", "Embeddings", "FieldShards", "LocalEmbeddings"]

# -- communication ---


class _Link:
    """A process group, and the metrics of what goes over it."""

    def __init__(self, group: dist.ProcessGroup | None, metrics: Metrics | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.metrics = metrics

    def transpose(self, tensor: Tensor, cls: str) -> Tensor:
        """[N, ...], block r for rank r -> [N, ...], block r from rank r; recorded as ``cls``."""
        started = time.perf_counter()
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        self._record(cls, tensor.numel() // self.world_size * (self.world_size - 1), tensor, started)
        return received

    def all_to_all(self, blocks: Sequence[Tensor], received: Sequence[Tensor], cls: str) -> None:
        """Send ``blocks[r]`` to rank ``r``, fill ``received[r]`` with what it sends; recorded as ``cls``."""
        started = time.perf_counter()
        output = blocks[0].new_empty(sum(block.numel() for block in received))
        dist.all_to_all_single(
            output,
            torch.cat([block.reshape(-1) for block in blocks]),
            [block.numel() for block in received],
            [block.numel() for block in blocks],
            group=self.group,
        )
        for block, part in zip(received, output.split([block.numel() for block in received]), strict=True):
            block.copy_(part.view_as(block))
        sent = sum(block.numel() for rank, block in enumerate(blocks) if rank != self.rank)
        self._record(cls, sent, output, started)

    def gather(self, tensor: Tensor, cls: str) -> Tensor:
        """[b, ...] -> [N*b, ...] in rank order; recorded as ``cls``."""
        started = time.perf_counter()
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        self._record(cls, tensor.numel() * (self.world_size - 1), tensor, started)
        return torch.cat(parts)

    def _record(self, cls: str, numel: int, like: Tensor, started: float) -> None:
        if self.metrics is not None:
            nbytes = numel * like.element_size()
            self.metrics.record(
                Record(
                    cls,
                    dense_bytes=nbytes,
                    sent_bytes=nbytes,
                    numel=numel,
                    nnz=numel,
                    exchange_ms=1e3 * (time.perf_counter() - started),
                )
            )


#: Classes of the metrics.
_FORWARD, _BACKWARD, _IDS = "des_forward", "des_backward", "embedding_ids"


class _ReduceScatter(torch.autograd.Function):
    """Partial results [N*b, K] -> their sums for this rank's samples [b, K]; backward an all-gather.

    Summed in rank order by the receiver: gloo has no reduce-scatter on all versions, and the bytes are the
    same.
    """

    @staticmethod
    def forward(context: Any, partial: Tensor, link: _Link) -> Tensor:
        context.link = link
        blocks = partial.reshape(link.world_size, -1, *partial.shape[1:])
        return link.transpose(blocks, _FORWARD).sum(0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.link.gather(gradients[0], _BACKWARD), None


class _AllReduce(torch.autograd.Function):
    """Sum over the ranks of a few numbers that do not depend on the samples; so is the gradient's."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, link: _Link) -> Tensor:
        context.link = link
        return link.gather(tensor.unsqueeze(0), _FORWARD).sum(0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.link.gather(gradients[0].unsqueeze(0), _BACKWARD).sum(0), None


class _ToColumns(torch.autograd.Function):
    """Vectors of the local samples [b, m] -> this rank's columns of all samples [N*b, widths[rank]]."""

    @staticmethod
    def forward(context: Any, vectors: Tensor, widths: Sequence[int], link: _Link) -> Tensor:
        context.widths, context.link = widths, link
        received = [vectors.new_empty(len(vectors), widths[link.rank]) for _ in range(link.world_size)]
        link.all_to_all(vectors.split(list(widths), dim=1), received, _FORWARD)
        return torch.cat(received)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        blocks = gradients[0].contiguous().chunk(context.link.world_size)
        received = [blocks[0].new_empty(len(blocks[0]), width) for width in context.widths]
        context.link.all_to_all(blocks, received, _BACKWARD)
        return torch.cat(received, dim=1), None, None


class _ScaleGradient(torch.autograd.Function):
    """The same tensor, with its gradient multiplied by ``factor``."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * context.factor, None


# -- where embeddings come from ---


class Embeddings(nn.Module):
    """Gives embeddings, and says of which fields, columns and samples; base class.

    Attributes:
        fields: Numbers of the fields that come out, in their order.
        num_fields, dim: Of the tables as a whole.
        columns: ``(start, stop)`` of the columns that come out.
    """

    fields: Sequence[int]
    num_fields: int
    dim: int
    columns: tuple[int, int]

    def forward(self, categorical: Tensor) -> Tensor:
        """int [b, F] of the local samples -> [B, fields, columns]; B is b, or N*b in rank order."""
        raise NotImplementedError

    def aggregate(self, partial: Tensor) -> Tensor:
        """Partial results [B, K] -> results of the local samples [b, K]."""
        raise NotImplementedError

    def total(self, scalars: Tensor) -> Tensor:
        """Sum over the shards of numbers [K] that are the same for all samples."""
        raise NotImplementedError

    def own(self, weight: nn.Parameter) -> Tensor:
        """A weight for its use: see :meth:`adopt`."""
        raise NotImplementedError

    def adopt(self, weight: nn.Parameter) -> nn.Parameter:
        """Declare that a weight belongs to the fields that come out here: no other rank has a shard's."""
        raise NotImplementedError

    def columns_of(self, vectors: Tensor) -> Tensor:
        """Vectors [b, dim] of the local samples -> the columns that come out here, of all samples."""
        raise NotImplementedError


class LocalEmbeddings(Embeddings):
    """All fields of the local samples: the tables are here, or fetch what they need.

    Args:
        tables: Module int [b, F] -> [b, F, dim].
    """

    def __init__(self, tables: nn.Module, num_fields: int, dim: int) -> None:
        super().__init__()
        self.tables = tables
        self.fields = range(num_fields)
        self.num_fields, self.dim, self.columns = num_fields, dim, (0, dim)

    def forward(self, categorical: Tensor) -> Tensor:
        return self.tables(categorical)

    def aggregate(self, partial: Tensor) -> Tensor:
        return partial

    def total(self, scalars: Tensor) -> Tensor:
        return scalars

    def own(self, weight: nn.Parameter) -> Tensor:
        return weight

    def adopt(self, weight: nn.Parameter) -> nn.Parameter:
        return weight

    def columns_of(self, vectors: Tensor) -> Tensor:
        return vectors


class _Shards(Embeddings):
    """What both kinds of shards have in common.

    The loss is taken to be the mean over all samples, of which every rank computes its local mean. Weights
    that only this rank has see the gradients of all samples, so theirs is divided by the number of ranks
    here, as the host framework's average does for the replicated ones. All ranks pass batches of the same
    size.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, average_gradients: bool, metrics: Metrics | None
    ) -> None:
        super().__init__()
        self._link = _Link(group, metrics)
        self._scale = 1 / self._link.world_size if average_gradients else 1.0

    @property
    def metrics(self) -> Metrics | None:
        """Takes the records; None: nothing is recorded."""
        return self._link.metrics

    @metrics.setter
    def metrics(self, metrics: Metrics | None) -> None:
        self._link.metrics = metrics

    def aggregate(self, partial: Tensor) -> Tensor:
        return _ReduceScatter.apply(partial, self._link)

    def total(self, scalars: Tensor) -> Tensor:
        return _AllReduce.apply(scalars, self._link)

    def own(self, weight: nn.Parameter) -> Tensor:
        return _ScaleGradient.apply(weight, self._scale)

    def adopt(self, weight: nn.Parameter) -> nn.Parameter:
        # As DeepSpeed marks the weights of an expert: its gradient is not for the data-parallel average.
        weight.allreduce = False  # type: ignore[attr-defined]
        return weight

    def _look_up(self, categorical: Tensor, first_rows: Tensor, weight: nn.Parameter) -> Tensor:
        found = nn.functional.embedding(categorical + first_rows, weight)
        # Scaled here and not in own(): the looked-up rows are fewer than the table's.
        return _ScaleGradient.apply(found, self._scale)


class FieldShards(_Shards):
    """Whole tables, spread over the ranks; gives the embeddings of this rank's fields for the global batch.

    Args:
        cardinalities: Rows of each field's table.
        dim: Embedding width.
        group: Process group, None for the default one.
        placement: Fields of each rank, ascending; balanced by default. A rank may have none.
        seed: Of the initial rows, which are those of ``EmbeddingTables`` made under that seed.
        average_gradients: Divide the gradients of what only this rank has by the number of ranks; False where
            the host framework does that.
        metrics: Records ``des_forward``, ``des_backward`` and ``embedding_ids``.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        dim: int,
        *,
        group: dist.ProcessGroup | None = None,
        placement: Sequence[Sequence[int]] | None = None,
        seed: int = 0,
        average_gradients: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(group, average_gradients, metrics)
        link = self._link
        described = [Table(rows, dim) for rows in cardinalities]
        self.placement = check_placement(placement, described, link.world_size)
        self.fields = self.placement[link.rank]
        self.num_fields, self.dim, self.columns = len(cardinalities), dim, (0, dim)
        own = [table for f, table in enumerate(_initial_tables(cardinalities, dim, seed)) if f in self.fields]
        self.weight = self.adopt(nn.Parameter(torch.cat(own) if own else torch.empty(0, dim)))
        self.first_rows: Tensor
        sizes = [cardinalities[field] for field in self.fields]
        first = torch.tensor([0, *sizes])[: len(sizes)].cumsum(0)
        self.register_buffer("first_rows", first, persistent=False)

    def forward(self, categorical: Tensor) -> Tensor:
        """int [b, F] -> [N*b, own fields, dim]."""
        return self._look_up(self._ids(categorical), self.first_rows, self.weight)

    def _ids(self, categorical: Tensor) -> Tensor:
        """Ids of this rank's fields in the global batch, [N*b, own fields]."""
        blocks = [categorical[:, fields] for fields in self.placement]
        received = [categorical.new_empty(len(categorical), len(self.fields)) for _ in blocks]
        self._link.all_to_all(blocks, received, _IDS)
        return torch.cat(received)

    def columns_of(self, vectors: Tensor) -> Tensor:
        raise NotImplementedError("tables that are sharded by field have no columns of their own")


class ColumnShards(_Shards):
    """Some columns of every table on each rank; gives these columns of all fields for the global batch.

    Arguments are those of :class:`FieldShards`; the columns are split evenly.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        dim: int,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        average_gradients: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(group, average_gradients, metrics)
        link = self._link
        bounds = [dim * rank // link.world_size for rank in range(link.world_size + 1)]
        self._widths = [stop - start for start, stop in itertools.pairwise(bounds)]
        self.columns = bounds[link.rank], bounds[link.rank + 1]
        self.fields = range(len(cardinalities))
        self.num_fields, self.dim = len(cardinalities), dim
        start, stop = self.columns
        parts = [table[:, start:stop].clone() for table in _initial_tables(cardinalities, dim, seed)]
        self.weight = self.adopt(nn.Parameter(torch.cat(parts)))
        self.first_rows: Tensor
        self.register_buffer("first_rows", torch.tensor([0, *cardinalities[:-1]]).cumsum(0), persistent=False)

    def forward(self, categorical: Tensor) -> Tensor:
        """int [b, F] -> [N*b, F, own columns]."""
        return self._look_up(self._link.gather(categorical, _IDS), self.first_rows, self.weight)

    def columns_of(self, vectors: Tensor) -> Tensor:
        return _ToColumns.apply(vectors, self._widths, self._link)


def _initial_tables(cardinalities: Sequence[int], dim: int, seed: int) -> Iterable[Tensor]:
    """The tables one after the other, as ``EmbeddingTables`` initialises them under ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for rows in cardinalities:
            bound = 1 / math.sqrt(rows)
            yield torch.empty(rows, dim).uniform_(-bound, bound)
