"""Requests for rows: which rows of a rank's tables the samples of another rank need.

With de-duplication a request names each distinct row of a table once, in ascending order, which is also the
order in which the rows come back: forward and backward messages need no index. Pooled (multi-hot) vectors are
taken apart into their rows when that is less and nothing lossy applies; otherwise each distinct bag crosses
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import EmbeddingChannelConfig
from ..errors import PayloadError
from ..kernels import Backend
from .request_message import Answer, Bag, Bags, read_request, write_request

__all__ = ["Request", "Requests"]


class Request(NamedTuple):
    """What a rank wants from every owner, and how its samples are put together from the answers.

    Attributes:
        samples: Of this rank.
        messages: Per owner, uint8.
        rows: Per owner: rows of each segment of its answer.
        positions: Per table: row of the answers for each sample; None where rows are pooled here.
        pooled: Per table that is pooled here: rows of the answers, and how many for each sample.
    """

    samples: int
    messages: list[Tensor]
    rows: list[list[int]]
    positions: list[Tensor | None]
    pooled: dict[int, tuple[Tensor, Tensor]]


class Requests:
    """Writes and reads the requests of one set of sharded tables.

    Args:
        cardinalities: Rows of each table.
        placement: Tables of each rank.
        rank: This one.
        config: ``dct.embedding``.
        name: Name in errors.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        placement: Sequence[Sequence[int]],
        *,
        rank: int,
        config: EmbeddingChannelConfig,
        name: str,
    ) -> None:
        self.cardinalities = cardinalities
        self.placement = placement
        self.rank = rank
        self.name = name
        self._deduplicates = config.enabled and config.deduplicate
        # A bound on rows is none on their sum, and a threshold is meant for what the model sees.
        self._keeps_bags = config.sparsity > 0 or config.error_bound is not None
        # Rows of every rank are numbered through its tables.
        self._first_rows = [
            list(itertools.accumulate((cardinalities[t] for t in tables), initial=0)) for tables in placement
        ]

    def write(self, categorical: Tensor | Sequence[Bags], device: torch.device, kernels: Backend) -> Request:
        """The request of this rank's samples.

        Args:
            categorical: int [B, F]; or int [B, F, L]; or one :class:`Bags` per table.
            device: Of the tables; positions and messages will be there.
            kernels: For tensors on ``device``.

        Raises:
            IndexError: an id is outside its table.
            ValueError: ids of another shape.
        """
        bags = _as_bags(categorical, len(self.cardinalities), device)
        request = Request(len(bags[0].lengths) if bags else 0, [], [], [None] * len(bags), {})
        first = 0
        for tables, first_rows in zip(self.placement, self._first_rows, strict=True):
            as_rows = [self._takes_rows(bags[t]) for t in tables]
            distinct: list[Tensor] = []
            kept: list[Bag] = []
            counts: list[int] = []
            for at, table in enumerate(tables):
                if not as_rows[at]:
                    continue
                ids, inverse = torch.unique(bags[table].ids, return_inverse=True)
                self._check_ids(ids, table)
                where = inverse + (first + sum(counts))
                if bags[table].one_hot:
                    request.positions[table] = where
                else:
                    request.pooled[table] = (where, bags[table].lengths)
                distinct.append(ids + first_rows[at])
                counts.append(len(ids))
            for at, table in enumerate(tables):
                if as_rows[at]:
                    continue
                self._check_ids(bags[table].ids, table)
                bag = bags[table]
                if self._deduplicates:
                    bag, where = _distinct_bags(bag)
                else:
                    where = torch.arange(len(bag.lengths), device=device)
                request.positions[table] = where + (first + sum(counts))
                kept.append(bag)
                counts.append(len(bag.lengths))
            first += sum(counts)
            request.rows.append(counts)
            request.messages.append(
                write_request(request.samples, as_rows, distinct, kept, first_rows[-1], device, kernels)
            )
        return request

    def read(self, message: Tensor, source: int, kernels: Backend) -> Answer:
        """What rank ``source`` of the group asks of this one; its rows are on the message's device.

        Raises:
            PayloadError: the request is damaged, or about other tables.
        """
        try:
            return read_request(message, self._first_rows[self.rank], kernels)
        except PayloadError as error:
            raise PayloadError(
                f"{self.name}: rank {self.rank}: request from rank {source} of the group: {error}"
            ) from error

    def ids_to_peers(self, request: Request) -> int:
        """Ids that would be asked for one by one."""
        total = 0
        for owner, tables in enumerate(self.placement):
            if owner != self.rank:
                total += sum(
                    request.pooled[t][0].numel() if t in request.pooled else request.samples for t in tables
                )
        return total

    def _takes_rows(self, bag: Bag) -> bool:
        """Whether a table's rows cross one by one (de-duplicated), rather than pooled."""
        if not self._deduplicates or bag.one_hot:
            return self._deduplicates
        return not self._keeps_bags and len(torch.unique(bag.ids)) <= len(bag.lengths)

    def _check_ids(self, ids: Tensor, table: int) -> None:
        if ids.numel():
            low, high = torch.stack(torch.aminmax(ids)).tolist()
            if low < 0 or high >= self.cardinalities[table]:
                raise IndexError(
                    f"{self.name}: rank {self.rank}: id {low if low < 0 else high} is outside table {table}, "
                    f"which has {self.cardinalities[table]} rows"
                )


def _as_bags(categorical: Tensor | Sequence[Bags], tables: int, device: torch.device) -> list[Bag]:
    """Ids on the tables' device, where the answers will be."""
    if isinstance(categorical, Tensor):
        categorical = categorical.to(device)
        if categorical.dim() not in (2, 3) or categorical.shape[1] != tables:
            raise ValueError(
                f"expected ids [B, {tables}] or [B, {tables}, L], got shape {tuple(categorical.shape)}"
            )
        if categorical.dim() == 2:
            ones = torch.ones(len(categorical), dtype=torch.int64, device=categorical.device)
            return [Bag(column, ones, True) for column in categorical.to(torch.int64).t().contiguous()]
        length = categorical.shape[2]
        lengths = torch.full((len(categorical),), length, dtype=torch.int64, device=categorical.device)
        columns = categorical.to(torch.int64).transpose(0, 1).reshape(tables, -1)
        return [Bag(column, lengths, length == 1) for column in columns]
    if len(categorical) != tables:
        raise ValueError(f"expected bags for {tables} tables, got {len(categorical)}")
    bags = []
    for number, (ids, lengths) in enumerate(categorical):
        ids, lengths = ids.to(device), lengths.to(device, torch.int64)
        if int(lengths.sum()) != len(ids) or len(lengths) != len(categorical[0].lengths):
            raise ValueError(f"table {number}: {len(ids)} ids do not fit the lengths of its bags")
        bags.append(Bag(ids.to(torch.int64), lengths, bool((lengths == 1).all())))
    return bags


def _distinct_bags(bag: Bag) -> tuple[Bag, Tensor]:
    """Each distinct sequence of ids once, and which one each sample has."""
    count = len(bag.lengths)
    longest = int(bag.lengths.max()) if count else 0
    padded = bag.ids.new_full((count, longest + 1), -1)
    padded[:, 0] = bag.lengths
    filled = torch.arange(longest, device=bag.ids.device) < bag.lengths.unsqueeze(1)
    padded[:, 1:].masked_scatter_(filled, bag.ids)
    distinct, inverse = torch.unique(padded, dim=0, return_inverse=True)
    lengths = distinct[:, 0].contiguous()
    filled = torch.arange(longest, device=bag.ids.device) < lengths.unsqueeze(1)
    return Bag(distinct[:, 1:][filled], lengths, bag.one_hot), inverse
