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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from ..autograd import with_gradient
from ..host_traffic import own_traffic
from ..metrics import Metrics, Record
from .placement import Table, check_placement, draw_table, seed_of_tables

#: Tensor classes of the metrics.
_FORWARD, _BACKWARD, _IDS = "des_forward", "des_backward", "embedding_ids"


# -- where embeddings come from ---


class Embeddings(nn.Module):
    """Base class of sources of embeddings, with the fields and columns that they return.

    The methods of this class suit sources that return all fields of the local samples.

    Attributes:
        fields: Numbers of the returned fields, in their order.
        num_fields: Number of fields of the tables as a whole.
        dim: Embedding width of the tables as a whole.
        columns: ``(start, stop)`` of the returned columns.
    """

    def __init__(self, fields: Sequence[int], num_fields: int, dim: int, columns: tuple[int, int]) -> None:
        super().__init__()
        self.fields, self.num_fields, self.dim, self.columns = fields, num_fields, dim, columns

    def forward(self, categorical: Tensor) -> Tensor:
        """Look up ids, int [b, F], of local samples: [B, fields, columns], B is b or N*b in rank order."""
        raise NotImplementedError

    def aggregate(self, partial: Tensor) -> Tensor:
        """Sum partial results [B, K] over the shards; return those of the local samples, [b, K]."""
        return partial

    def total(self, scalars: Tensor) -> Tensor:
        """Sum numbers [K] that are the same for all samples over the shards."""
        return scalars

    def own(self, weight: nn.Parameter) -> Tensor:
        """Return a weight for its use: see :meth:`adopt`."""
        return weight

    def adopt(self, weight: nn.Parameter) -> nn.Parameter:
        """Declare that a weight belongs to the fields that come out here: no other rank has a shard's."""
        return weight

    def columns_of(self, vectors: Tensor) -> Tensor:
        """Return, for vectors [b, dim] of the local samples, the columns here, of all samples."""
        return vectors


class LocalEmbeddings(Embeddings):
    """All fields of the local samples, from tables that are local or fetch their rows.

    Args:
        tables: Module int [b, F] -> [b, F, dim].
    """

    def __init__(self, tables: nn.Module, num_fields: int, dim: int) -> None:
        super().__init__(range(num_fields), num_fields, dim, (0, dim))
        self.tables = tables

    def forward(self, categorical: Tensor) -> Tensor:
        return self.tables(categorical)


class ShardOptions(TypedDict, total=False):
    """Arguments of both kinds of shards by keyword; see :class:`FieldShards`."""

    group: dist.ProcessGroup | None
    seed: int
    average_gradients: bool
    metrics: Metrics | None


class _Shards(Embeddings):
    """The base class of both kinds of shards.

    The loss is taken to be the mean over all samples, of which every rank computes its local mean. Weights
    that only this rank has see the gradients of all samples, so theirs is divided by the number of ranks
    here, as the host framework's average does for the replicated ones. All ranks pass batches of the same
    size.

    Args:
        cardinalities, dim: Rows of each field's table, and their width.
        fields, columns: Those that come out here.
        options: See :class:`FieldShards`.

    Attributes:
        metrics: Records what crosses; None records nothing.
    """

    first_rows: Tensor

    def __init__(
        self,
        cardinalities: Sequence[int],
        dim: int,
        fields: Sequence[int],
        columns: tuple[int, int],
        **options: Unpack[ShardOptions],
    ) -> None:
        super().__init__(fields, len(cardinalities), dim, columns)
        self.group, self.metrics = options.get("group"), options.get("metrics")
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._scale = 1 / self.world_size if options.get("average_gradients", True) else 1.0
        start, stop = columns
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.get("seed", 0))
            of_tables = seed_of_tables()
        whole = (
            draw_table(torch.empty(cardinalities[f], dim, device="cpu"), f, of_tables) for f in sorted(fields)
        )
        tables = [table[:, start:stop].clone() for table in whole]
        none = torch.empty(0, stop - start, device="cpu")
        self.weight = self.adopt(nn.Parameter(torch.cat([none, *tables])))
        sizes = [len(table) for table in tables]
        first = torch.tensor([0, *sizes], device="cpu")[: len(sizes)].cumsum(0)
        self.register_buffer("first_rows", first, persistent=False)

    def forward(self, categorical: Tensor) -> Tensor:
        """int [b, F] -> [N*b, own fields, own columns]."""
        found = nn.functional.embedding(self._ids(categorical) + self.first_rows, self.weight)
        # Scaled here and not in own(): the looked-up rows are fewer than the table's.
        return self._scaled(found)

    def _ids(self, categorical: Tensor) -> Tensor:
        """Return the ids of this rank's fields in the global batch, [N*b, own fields]."""
        raise NotImplementedError

    def aggregate(self, partial: Tensor) -> Tensor:
        def reduce_scatter(partial: Tensor) -> Tensor:
            # Summed in rank order by the receiver: gloo has no reduce-scatter on all versions, and the bytes
            # are the same.
            blocks = partial.reshape(self.world_size, -1, *partial.shape[1:])
            received = torch.empty_like(blocks)
            self._all_to_all(blocks, received, _FORWARD)
            return received.sum(0)

        return with_gradient(partial, reduce_scatter, lambda gradient: self._gather(gradient, _BACKWARD))

    def total(self, scalars: Tensor) -> Tensor:
        def all_reduce(tensor: Tensor, cls: str) -> Tensor:
            return self._gather(tensor.unsqueeze(0), cls).sum(0)

        return with_gradient(
            scalars, lambda x: all_reduce(x, _FORWARD), lambda gradient: all_reduce(gradient, _BACKWARD)
        )

    def own(self, weight: nn.Parameter) -> Tensor:
        return self._scaled(weight)

    def adopt(self, weight: nn.Parameter) -> nn.Parameter:
        # As DeepSpeed marks the weights of an expert: its gradient is not for the data-parallel average.
        weight.allreduce = False  # type: ignore[attr-defined]
        return weight

    def _scaled(self, tensor: Tensor) -> Tensor:
        """Return the same tensor, with its gradient scaled."""
        return with_gradient(tensor, lambda x: x.view_as(x), lambda gradient: gradient * self._scale)

    # -- communication ---

    def _all_to_all(
        self, blocks: Sequence[Tensor] | Tensor, received: Sequence[Tensor] | Tensor, cls: str
    ) -> None:
        """Send ``blocks[r]`` to rank ``r``, fill ``received[r]`` with what it sends; recorded as ``cls``."""
        leaving, arriving = ([block.numel() for block in each] for each in (blocks, received))
        with self._recorded(cls, sum(leaving) - leaving[self.rank], blocks[0]):
            output = blocks[0].new_empty(sum(arriving))
            joined = torch.cat([block.reshape(-1) for block in blocks])
            dist.all_to_all_single(output, joined, arriving, leaving, group=self.group)
            for block, part in zip(received, output.split(arriving), strict=True):
                block.copy_(part.view_as(block))

    def _gather(self, tensor: Tensor, cls: str) -> Tensor:
        """[b, ...] -> [N*b, ...] in rank order; recorded as ``cls``."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._recorded(cls, tensor.numel() * (self.world_size - 1), tensor):
            dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts)

    @contextmanager
    def _recorded(self, cls: str, numel: int, like: Tensor) -> Iterator[None]:
        """Record so many entries, sent in the block."""
        nbytes = numel * like.element_size()
        record = Record(cls, dense_bytes=nbytes, sent_bytes=nbytes, numel=numel, nnz=numel)
        with own_traffic(), record.timed("exchange"):
            yield
        if self.metrics is not None:
            self.metrics.record(record)


class FieldShards(_Shards):
    """Table shards: each rank holds whole tables, and returns the embeddings of its fields for the global
    batch.

    Args:
        cardinalities: Rows of each field's table.
        dim: Embedding width.
        group: Process group, None for the default one.
        placement: Fields of each rank, ascending; balanced by default. A rank may have none.
        seed: Seeds the initial rows, which are those of ``EmbeddingTables`` made under that seed.
        average_gradients: Divide the gradients of what only this rank has by the number of ranks; False where
            the host framework does that.
        metrics: Records ``des_forward``, ``des_backward`` and ``embedding_ids``.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        dim: int,
        *,
        placement: Sequence[Sequence[int]] | None = None,
        **options: Unpack[ShardOptions],
    ) -> None:
        described, group = [Table(rows, dim) for rows in cardinalities], options.get("group")
        placed = check_placement(placement, described, dist.get_world_size(group))
        super().__init__(cardinalities, dim, placed[dist.get_rank(group)], (0, dim), **options)
        self.placement = placed

    def _ids(self, categorical: Tensor) -> Tensor:
        blocks = [categorical[:, fields] for fields in self.placement]
        received = [categorical.new_empty(len(categorical), len(self.fields)) for _ in blocks]
        self._all_to_all(blocks, received, _IDS)
        return torch.cat(received)

    def columns_of(self, vectors: Tensor) -> Tensor:
        raise NotImplementedError("tables that are sharded by field have no columns of their own")


class ColumnShards(_Shards):
    """Column shards: each rank holds some columns of every table, and returns them for the global batch.

    Arguments are those of :class:`FieldShards`; the columns are split evenly.
    """

    def __init__(self, cardinalities: Sequence[int], dim: int, **options: Unpack[ShardOptions]) -> None:
        rank, ranks = (of(options.get("group")) for of in (dist.get_rank, dist.get_world_size))
        columns = [(dim * r // ranks, dim * (r + 1) // ranks) for r in range(ranks)]
        super().__init__(cardinalities, dim, range(len(cardinalities)), columns[rank], **options)
        self._widths = [stop - start for start, stop in columns]

    def _ids(self, categorical: Tensor) -> Tensor:
        return self._gather(categorical, _IDS)

    def columns_of(self, vectors: Tensor) -> Tensor:
        widths = self._widths

        def to_columns(vectors: Tensor) -> Tensor:
            received = [vectors.new_empty(len(vectors), widths[self.rank]) for _ in widths]
            self._all_to_all(vectors.split(widths, dim=1), received, _FORWARD)
            return torch.cat(received)

        def from_columns(gradient: Tensor) -> Tensor:
            blocks = gradient.contiguous().chunk(len(widths))
            received = [gradient.new_empty(len(blocks[0]), width) for width in widths]
            self._all_to_all(blocks, received, _BACKWARD)
            return torch.cat(received, dim=1)

        return with_gradient(vectors, to_columns, from_columns)
