"""The pages name programs by which their figures come about: each can be loaded."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from support.processes import fork

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
#: Their paths, or names of modules.
PROGRAMS = sorted(
    {
        named
        for page in PAGES
        for named in re.findall(
            r"\b(benchmarks/[\w/]+\.py)|-m (benchmarks[\w.]+)", page.read_text(encoding="utf-8")
        )
    }
)


def _load(path: str, module: str) -> None:
    sys.path[:0] = [str((ROOT / path).parent) if path else str(ROOT)]
    if path:
        runpy.run_path(str(ROOT / path), run_name="loaded")
    else:
        runpy.run_module(module, run_name="loaded", alter_sys=True)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "module"), PROGRAMS, ids=["".join(each) for each in PROGRAMS])
def test_a_program_can_be_loaded(path: str, module: str) -> None:
    process = fork(_load, path, module)
    process.join()
    assert process.exitcode == 0
