"""What ranks remember of the sets of tensors they have seen."""

from __future__ import annotations

import random

import pytest

from dct_plugin.data_parallel import plan
from dct_plugin.data_parallel.plan import BoundedTable


def test_the_entry_that_was_not_asked_for_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CAPACITY", 3)
    table: BoundedTable[str] = BoundedTable()
    for number in range(3):
        table[number] = str(number)
    assert table.has(0)
    table[3] = "3"
    assert list(table) == [2, 0, 3]
    table[2] = "again"
    table[4] = "4"
    assert list(table) == [3, 2, 4]
    assert not table.has(0)


def test_ranks_that_do_the_same_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CAPACITY", 8)
    tables: list[BoundedTable[int]] = [BoundedTable(), BoundedTable()]
    numbers = random.Random(1)
    for _ in range(1000):
        number = numbers.randrange(20)
        found = [table.has(number) for table in tables]
        assert found[0] == found[1]
        if not found[0]:
            for table in tables:
                table[number] = 1
        assert len(tables[0]) <= 8
