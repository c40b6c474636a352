"""Pages and files of results name the programs that make their figures: each program can be loaded."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.forked import forked_interpreters
from support.processes import fork

from benchmarks import gpu_hour

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
PAGES += (ROOT / "docs" / "results").glob("*.csv")
#: Tests for a GPU that have a stand-in.
FEWEST_TESTS = 100
#: Seconds of a step.
LIMIT = 3.0
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
    return _content(folder)


def _content(folder: Path) -> dict[str, str]:
    """Return the files of the only archive in a folder."""
    (archive,) = folder.iterdir()
    with tarfile.open(archive) as tar:
        files = {Path(each.name).name: tar.extractfile(each) for each in tar if each.isfile()}
        return {name: file.read().decode(errors="replace") for name, file in files.items() if file}


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        ({}, ""),
        ({"is_available": lambda: False}, "a GPU that torch sees"),
        (
            {"nccl": SimpleNamespace(version=lambda: (2, 29, 3))},
            "nccl 2.30, which takes several ranks on one",
        ),
        ({"which": lambda name: None}, "a C compiler, which Triton needs when it runs"),
        ({"triton": None}, "Triton: "),
        ({"TORCH_DIST_USE_NCCL2": "1"}, "a job without TORCH_DIST_USE_NCCL2: nccl2 refuses two ranks on one"),
    ],
)
def test_a_machine_that_lacks_something_fails_the_preflight(
    lacking: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    nccl = lacking.get("nccl", SimpleNamespace(version=lambda: (2, 30, 3)))
    monkeypatch.setattr(torch.cuda, "is_available", lacking.get("is_available", lambda: True))
    monkeypatch.setattr(torch.cuda, "nccl", nccl)
    monkeypatch.setattr(gpu_hour.shutil, "which", lacking.get("which", lambda name: f"/usr/bin/{name}"))
    monkeypatch.setitem(sys.modules, "triton", lacking.get("triton", SimpleNamespace(__version__="3.7.1")))
    monkeypatch.delenv("TORCH_DISTRIBUTED_USE_NCCL2", raising=False)
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", lacking.get("TORCH_DIST_USE_NCCL2", "0"))
    monkeypatch.setattr(sys, "argv", ["gpu_hour.py", "preflight"])
    with pytest.raises(SystemExit) as ended:
        gpu_hour.main()
    said = capsys.readouterr().out
    assert bool(ended.value.code) == bool(lacking) == ("this machine lacks" in said)
    assert not text or f"this machine lacks {text}" in said


@pytest.mark.slow
def test_a_required_step_that_fails_ends_the_call_and_what_nccl_writes_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {
        "dump": gpu_hour.Step('echo stuck > "$TORCH_NCCL_DEBUG_INFO_TEMP_FILE"1', 20, gpu_hour._TRACED),
        "required": gpu_hour.Step("exit 3", 20, required=True),
        "last": gpu_hour.Step("true", 20),
    }
    monkeypatch.setattr(gpu_hour, "STEPS", steps)
    assert gpu_hour.run([*steps], None, 1.0, out=tmp_path) == 1
    content = _content(tmp_path)
    assert content["nccl_trace_rank_1"] == "stuck\n"
    assert [step["exit"] for step in json.loads(content["steps.json"]).values()] == [0, 3]


@pytest.mark.slow
def test_a_step_at_its_limit_is_interrupted_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        "try:\n    print('begun', flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
    )
    (tmp_path / "step.py").write_text(script)
    log = tmp_path / "step.log"

    class Process(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout == LIMIT:  # it is over when the step has begun
                while "begun" not in log.read_text():
                    time.sleep(0.01)
                raise subprocess.TimeoutExpired(self.args, LIMIT)
            return super().wait(timeout)

    monkeypatch.setattr(gpu_hour.subprocess, "Popen", Process)
    command = f"exec {sys.executable} {tmp_path / 'step.py'}"
    assert gpu_hour._run(command, log, dict(os.environ), LIMIT) == -9
    assert log.read_text() == "begun\ninterrupted\n"


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
