"""Pictures that are drawn from tables of results find their tables."""

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
            assert f":file: results/{panel.file}.csv" in page
            assert len(pictures.points(pictures.read(panel.file))) >= 2, panel


def test_the_picture_of_links_is_drawn_from_its_table(pictures: Any) -> None:
    cells = pictures.links(pictures.read("links_ddp"))
    assert [cell.rate for cell in cells] == ["unlimited", "10 Gbit/s", "1 Gbit/s", "100 Mbit/s"]
    assert all(cell.figures[0].name == "ideal" and len(cell.figures) > 8 for cell in cells)


def test_a_table_is_read_as_it_stands(pictures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.csv").write_text(
        '# python one.py\nsetting,"minus dense (AUC, 95 %)",fewer bytes,"fewer bytes, back"\n'
        "dense,,,\na,+0.5 ± 0.25,20.3x,4x\nb,-0.125,,-\n",
        encoding="utf-8",
    )
    monkeypatch.setattr("result_tables.FOLDER", tmp_path)
    assert pictures.points(pictures.read("one")) == [
        pictures.Point("a", 0.5, 0.25, (20.3, 4.0)),
        pictures.Point("b", -0.125, None, ()),
    ]
    pictures.draw([pictures.Panel("one", "title", "unit")], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "one.csv").write_text("setting,loss\na,1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"one\.csv: 2 columns, but a row is \['a', '1', '2'\]"):
        pictures.read("one")
