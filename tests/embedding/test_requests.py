"""Requests for rows: both sides agree, and nothing that is damaged is believed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dct_plugin.config import EmbeddingChannelConfig
from dct_plugin.embedding import Bags
from dct_plugin.embedding.request_message import Answer
from dct_plugin.embedding.requests import Request, Requests
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import get_backend

CARDINALITIES, PLACEMENT = (9, 300, 4), [[1], [0, 2]]
CPU = torch.device("cpu")
KERNELS = get_backend(CPU)


def asked(categorical: Any, **options: Any) -> tuple[Request, list[Answer]]:
    """A request of rank 0, and what each owner reads."""
    config = EmbeddingChannelConfig.of(options)
    ranks = [Requests(CARDINALITIES, PLACEMENT, rank=r, config=config, name="tables") for r in range(2)]
    request = ranks[0].write(categorical, CPU, KERNELS)
    return request, [ranks[r].read(request.messages[r], 0, KERNELS) for r in range(2)]


def test_distinct_rows_are_named_once_in_ascending_order() -> None:
    ids = torch.tensor([[8, 299, 3], [2, 5, 3], [8, 5, 0]])
    request, (first, second) = asked(ids)
    assert request.samples == first.samples == 3
    assert first.rows.tolist() == [5, 299]
    assert second.rows.tolist() == [2, 8, 9, 12]  # table 2 begins at row 9 of its rank
    assert [first.segments, second.segments] == [[(0, 2)], [(0, 2), (1, 2)]]
    assert request.rows == [[2], [2, 2]]
    positions = torch.stack([p for p in request.positions if p is not None], dim=1)
    assert positions.tolist() == [[3, 1, 5], [2, 0, 5], [3, 0, 4]]


def test_ids_cross_as_they_are_without_deduplication() -> None:
    request, (first, second) = asked(torch.tensor([[8, 299, 3], [8, 5, 3]]), deduplicate=False)
    assert first.bags.ids.tolist() == [299, 5]
    assert second.bags.ids.tolist() == [8, 8, 12, 12]
    assert not len(first.rows)
    assert request.rows == [[2], [2, 2]]


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
    return [asked(ids)[0].messages[1], asked(ids, deduplicate=False)[0].messages[1]]


@pytest.mark.parametrize("message", _messages(), ids=["rows", "bags"])
def test_every_truncation_and_every_changed_byte_is_refused(message: Tensor) -> None:
    config = EmbeddingChannelConfig()
    owner = Requests(CARDINALITIES, PLACEMENT, rank=1, config=config, name="tables")
    for size in range(message.numel()):
        with pytest.raises(PayloadError, match="tables: rank 1: request from rank 0"):
            owner.read(message[:size].clone(), 0, KERNELS)
    for at in range(message.numel()):
        damaged = message.clone()
        damaged[at] ^= 0x41
        with pytest.raises(PayloadError):
            owner.read(damaged, 0, KERNELS)
    other = Requests(CARDINALITIES, PLACEMENT, rank=0, config=config, name="tables")
    with pytest.raises(PayloadError, match="2 tables, this rank has 1"):
        other.read(message, 0, KERNELS)
