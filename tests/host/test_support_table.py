"""The table of frameworks in ``docs/support.md``: its rows name tests that exist, and the page has them."""

from __future__ import annotations

import re

import pytest
from support import ROOT
from support_table import ROWS, Row, updated


def test_the_page_is_generated_from_the_rows() -> None:
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert "generated from the rows of frameworks" in page
    assert updated(page) == page, "run python docs/support_table.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.framework}, {row.parallelism}, {row.optimizer}")
def test_a_row_names_tests(row: Row) -> None:
    for test in row.tests:
        file, _, function = test.partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / "tests" / f"{file}.py").read_text(), re.M), test
