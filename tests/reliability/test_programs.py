"""The pages name programs by which their figures come about: each can be loaded."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked import forked_interpreters
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


@pytest.mark.slow
def test_the_steps_for_a_gpu_run_without_one(tmp_path: Path) -> None:
    """The kernels of a GPU are run by Triton's interpreter. ``--dry-run`` alone runs all steps."""
    pytest.importorskip("triton", reason="triton is for Linux only")
    command = ["run", "--dry-run", "--out", str(tmp_path), "--steps", "versions", "selection-1000000"]
    with forked_interpreters():
        subprocess.run([sys.executable, "benchmarks/gpu_hour.py", *command], cwd=ROOT, check=True)
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert {name: step["exit"] for name, step in steps.items()} == dict.fromkeys(command[5:], 0)
    figures = json.loads((tmp_path / "gpu-1000000.json").read_text())
    assert "sum of 2 slots" in [row["what"] for row in figures["kernels"]]
