"""Pages and files of results name the programs that make their figures: each program can be loaded."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from support.forked import forked_interpreters
from support.processes import fork

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
PAGES += (ROOT / "docs" / "results").glob("*.csv")
#: Tests for a GPU that have a stand-in.
FEWEST_TESTS = 100
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


def _gpu_hour(folder: Path, *options: str) -> dict[str, str]:
    """Run a call without a GPU; return the files of the only archive that it leaves."""
    command = ["run", "--dry-run", "--out", str(folder), *options]
    subprocess.run([sys.executable, "benchmarks/gpu_hour.py", *command], cwd=ROOT, check=True)
    (archive,) = folder.iterdir()
    with tarfile.open(archive) as tar:
        files = {Path(each.name).name: tar.extractfile(each) for each in tar if each.isfile()}
        return {name: file.read().decode(errors="replace") for name, file in files.items() if file}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("call", ["ranks", "tests", "figures"])
def test_the_calls_for_a_gpu_run_without_one(call: str, tmp_path: Path) -> None:
    """Exchanges have the bits of plain torch, and a rank that fails is named by the other one."""
    pytest.importorskip("triton", reason="triton is for Linux only")
    content = _gpu_hour(tmp_path, "--call", call, "--minutes", "60")
    assert {step["exit"] for step in json.loads(content["steps.json"]).values()} == {0}
    rows = [json.loads(line) for line in content.get("ranks.jsonl", "").splitlines()]
    assert len(rows) == (6 * 4 + 4 * 2 if call == "ranks" else 0)
    said = {row["case"]: row["said"] for row in rows if row["rank"] == 0 and "said" in row}
    assert all("rank(s) [1]" in text for text in said.values())
    if call == "tests":
        (suite,) = ElementTree.fromstring(content["tests.xml"])
        ran = int(suite.attrib["tests"]) - int(suite.attrib["skipped"])
        assert ran > FEWEST_TESTS, "tests of a GPU that ran by Triton's interpreter, over gloo"


@pytest.mark.slow
def test_the_steps_for_a_gpu_run_without_one(tmp_path: Path) -> None:
    """The kernels of a GPU are run by Triton's interpreter. ``--dry-run`` alone runs all steps."""
    pytest.importorskip("triton", reason="triton is for Linux only")
    names = ["preflight", "selection-1000000"]
    with forked_interpreters():
        content = _gpu_hour(tmp_path, "--steps", *names)
    steps = json.loads(content["steps.json"])
    assert {name: step["exit"] for name, step in steps.items()} == dict.fromkeys(names, 0)
    figures = json.loads(content["gpu-1000000.json"])
    assert "sum of 2 slots" in [row["what"] for row in figures["kernels"]]
