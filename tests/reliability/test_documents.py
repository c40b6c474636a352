"""What pages and docstrings say of the paper, and how they install the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "configs").glob("*.md"))]
#: One page a host, which a user follows from the top.
START = ["ddp", "deepspeed", "dlrm", "fsdp", "huggingface", "megatron", "torchft"]


def test_the_paper_is_cited_by_its_title() -> None:
    (title,) = re.findall(r"conference-paper\n +title: \"(.*)\"", (ROOT / "CITATION.cff").read_text())
    named = []
    for page in [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "dct_plugin").rglob("*.py")]:
        text = " ".join(page.read_text().split())
        named += [(page, found) for found in re.findall(r"\*([^*]{20,})\* \(Gupta", text)]
        # A citation names authors, venue and year, and no title, or this one.
        assert not re.search(r"Gupta et al\.(?!.{0,3}KDD 2021)", text.replace(" [", "")), page
    assert ROOT / "README.md" in [page for page, _ in named]
    assert {found for _, found in named} == {title}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_install_lines_work_without_an_index(page: Path) -> None:
    assert not re.findall(r"pip install '?dct-plugin", page.read_text())


@pytest.mark.parametrize("name", START)
def test_a_start_page_begins_with_its_install_line(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert "pip install" in page[:1200]
