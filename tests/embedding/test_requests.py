"""Requests for rows: both sides agree, and nothing that is damaged is believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dct_plugin.config import EmbeddingChannelConfig
from dct_plugin.embedding import Bags
from dct_plugin.embedding import requests as requests_module
from dct_plugin.embedding.request_message import RowRequest, read_request, write_request
from dct_plugin.embedding.requests import BatchLookup, RequestExchange
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import get_backend
from dct_plugin.kernels.embedding import distinct_rows, distinct_rows_in_torch

CARDINALITIES, PLACEMENT = (9, 300, 4), [[1], [0, 2]]
CPU = torch.device("cpu")
KERNELS = get_backend(CPU)


#: First rows of each owner's tables, and its rows.
FIRST_ROWS = [[0, 300], [0, 9, 13]]


def asked(categorical: Any, asking: int = 0, **options: Any) -> tuple[BatchLookup, list[RowRequest]]:
    """The requests of a rank, and what each owner reads."""
    config = EmbeddingChannelConfig.of(options)
    builder = RequestExchange(CARDINALITIES, PLACEMENT, rank=asking, config=config, name="tables")
    assert builder.first_rows == FIRST_ROWS
    lookup = builder.build(categorical)
    answers = [
        request if r == asking else read_request(message(request, r), FIRST_ROWS[r], KERNELS)
        for r, request in enumerate(lookup.requests)
    ]
    return lookup, answers


def message(request: RowRequest, owner: int) -> Tensor:
    return write_request(request, FIRST_ROWS[owner], KERNELS)


def rows_of(lookup: BatchLookup) -> list[list[int]]:
    """Per owner: rows of each segment of its answer."""
    return [request.counts for request in lookup.requests]


def test_distinct_rows_are_named_once_in_ascending_order() -> None:
    ids = torch.tensor([[8, 299, 3], [2, 5, 3], [8, 5, 0]])
    request, (first, second) = asked(ids)
    assert request.requests[1].samples == first.samples == 3
    assert first.rows.tolist() == [5, 299]
    assert second.rows.tolist() == [2, 8, 9, 12]  # table 2 begins at row 9 of its rank
    assert [first.segments, second.segments] == [[(0, 2)], [(0, 2), (1, 2)]]
    assert rows_of(request) == [[2], [2, 2]]
    assert request.positions.tolist() == [[3, 1, 5], [2, 0, 5], [3, 0, 4]]


def test_ids_cross_as_they_are_without_deduplication() -> None:
    request, (first, second) = asked(torch.tensor([[8, 299, 3], [8, 5, 3]]), deduplicate=False)
    assert first.bags.ids.tolist() == [299, 5]
    assert second.bags.ids.tolist() == [8, 8, 12, 12]
    assert not len(first.rows)
    assert rows_of(request) == [[2], [2, 2]]


@given(st.integers(0, 40), st.integers(0, 2**31), st.booleans())
def test_positions_lead_to_the_rows_that_were_asked_for(samples: int, seed: int, deduplicate: bool) -> None:
    """Whichever rank asks, and whichever kernels find the distinct rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(n, (samples,), generator=generator) for n in CARDINALITIES], dim=1)
    first_rows = {0: (1, 0), 1: (0, 0), 2: (1, 9)}  # table: owner, row of its shard
    for asking in range(2):
        requests = [asked(ids, asking, deduplicate=deduplicate)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(requests_module, "distinct_rows", distinct_rows_in_torch)
            requests.append(asked(ids, asking, deduplicate=deduplicate))
        for request, answers in requests:
            rows = torch.cat([torch.cat([a.rows, a.bags.ids]) for a in answers])
            owners = torch.cat(
                [torch.full((len(a.rows) + len(a.bags.ids),), r) for r, a in enumerate(answers)]
            )
            for table, (owner, first) in first_rows.items():
                assert torch.equal(rows[request.positions[:, table]], ids[:, table] + first)
                assert bool((owners[request.positions[:, table]] == owner).all())
            assert [sum(counts) for counts in rows_of(request)] == [
                int((owners == r).sum()) for r in range(2)
            ]
        (one, _), (other, _) = requests
        assert rows_of(one) == rows_of(other)
        assert torch.equal(one.positions, other.positions)


def test_tables_of_millions_of_rows_are_sorted_too() -> None:
    generator = torch.Generator().manual_seed(0)
    limits = torch.tensor([2**31 - 1, 1, 70_000_000, 2048, 2049])
    ids = torch.stack([torch.randint(int(n), (500,), generator=generator) for n in limits], dim=1)
    ids[0], ids[1] = limits - 1, 0
    order, base = np.array([4, 1, 0, 2, 3]), np.array([7, 0, 0, 2**33, 1])
    found = [find(ids, order, limits.numpy(), base) for find in (distinct_rows, distinct_rows_in_torch)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_equal_bags_cross_once() -> None:
    bags = Bags(torch.tensor([1, 2, 1, 2, 3]), torch.tensor([2, 2, 0, 1]))
    _, (_, second) = asked([bags, bags, bags], error_bound=0.1)
    assert second.segments == [(0, 3), (1, 3)]
    assert sorted(second.bags.lengths[:3].tolist()) == [0, 1, 2]


def test_ids_outside_their_table_and_odd_shapes_are_named() -> None:
    with pytest.raises(IndexError, match="tables: rank 0: id 4 is outside table 2, which has 4 rows"):
        asked(torch.tensor([[0, 0, 4]]))
    with pytest.raises(IndexError, match="id -1 is outside table 0"):
        asked(torch.tensor([[-1, 0, 0]]))
    with pytest.raises(ValueError, match=r"expected ids \[B, 3\]"):
        asked(torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match="do not fit the lengths"):
        asked([Bags(torch.tensor([1]), torch.tensor([2]))] * 3)


def _messages() -> list[Tensor]:
    ids = torch.tensor([[8, 299, 3], [2, 5, 3]])
    return [message(asked(ids, deduplicate=each)[0].requests[1], 1) for each in (True, False)]


@pytest.mark.parametrize("message", _messages(), ids=["rows", "bags"])
def test_every_truncation_and_every_changed_byte_is_refused(message: Tensor) -> None:
    config = EmbeddingChannelConfig()
    builder = RequestExchange(CARDINALITIES, PLACEMENT, rank=1, config=config, name="tables")
    for size in range(message.numel()):
        with pytest.raises(PayloadError, match="tables: rank 1: request from rank 0"):
            builder.read(message[:size].clone(), 0)
    for at in range(message.numel()):
        damaged = message.clone()
        damaged[at] ^= 0x41
        with pytest.raises(PayloadError):
            read_request(damaged, FIRST_ROWS[1], KERNELS)
    with pytest.raises(PayloadError, match="2 tables, this rank has 1"):
        read_request(message, FIRST_ROWS[0], KERNELS)
