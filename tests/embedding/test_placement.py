"""Which rank gets which tables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dct_plugin.embedding import Table, place_tables
from dct_plugin.embedding.placement import check_placement


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 64), st.floats(1, 20)), max_size=40),
    st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_placement_is_complete_and_balanced(sizes: list[tuple[int, int, float]], ranks: int) -> None:
    tables = [Table(*size) for size in sizes]
    placed = place_tables(tables, ranks)
    assert len(placed) == ranks
    assert sorted(t for part in placed for t in part) == list(range(len(tables)))
    loads = [sum(tables[t].cost for t in part) for part in placed]
    total = sum(loads)
    largest = max((t.cost for t in tables), default=0.0)
    # Graham: the last table to come to the fullest rank found it the emptiest.
    assert max(loads) <= total / ranks + largest * (1 - 1 / ranks) + 1e-6 * total


def test_tables_are_spread_even_if_they_cost_nothing_yet() -> None:
    assert [len(part) for part in place_tables([Table(1, 1)] * 7, 4)] == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="world_size"):
        place_tables([], 0)


def test_a_given_placement_has_to_be_complete() -> None:
    tables = [Table(4, 2), Table(5, 2)]
    assert check_placement(None, tables, 2) == [[1], [0]]
    assert check_placement([(), (0, 1)], tables, 2) == [[], [0, 1]]
    for wrong in ([[0], [0]], [[0, 1]], [[0], []], [[0], [2]]):
        with pytest.raises(ValueError, match="does not put each of 2 tables on one of 2 ranks"):
            check_placement(wrong, tables, 2)
