"""Pictures that are drawn from the tables of docs/quality.md find their tables."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

PAGE = ROOT / "docs" / "quality.md"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "studies")
    return importlib.import_module("pictures")


def test_every_picture_has_its_tables_and_stands_on_the_page(pictures: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, panels in pictures.PICTURES.items():
        assert f"](images/{name}.png)" in page
        assert (PAGE.parent / "images" / f"{name}.png").exists()
        for panel in panels:
            assert len(pictures.points(page, panel)) >= 2, panel


def test_the_picture_of_links_is_drawn_from_its_table(pictures: Any) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    cells = pictures.links(page)
    assert [cell.rate for cell in cells] == ["unlimited", "10 Gbit/s", "1 Gbit/s", "100 Mbit/s"]
    assert all(cell.figures[0].name == "ideal" and len(cell.figures) > 8 for cell in cells)


def test_a_table_is_read_as_it_stands(pictures: Any, tmp_path: Path) -> None:
    page = (
        "## One\n\ntext\n\n| s | AUC - dense (95 %) | fewer | fewer back |\n|---|--:|--:|--:|\n"
        "| dense |  |  |  |\n| **a** | +0.5 ± 0.25 | 20.3x | 4x |\n| b | -0.125 |  | - |\n\n## Two\n"
    )
    panel = pictures.Panel("One", 0, "title", "unit")
    assert pictures.points(page, panel) == [
        pictures.Point("a", 0.5, 0.25, (20.3, 4.0)),
        pictures.Point("b", -0.125, None, ()),
    ]
    pictures.draw(page, [panel], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no section 'Three'"):
        pictures.tables(page, "Three")
