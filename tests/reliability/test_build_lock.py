"""A compilation's lock that is waited for, or was left behind, is spoken of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.forked import forked_interpreters

from dct_plugin.integrations.deepspeed import build_lock


@pytest.mark.slow
def test_a_long_compilation_says_so_and_names_locks(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    code = """
import time
from deepspeed.ops.op_builder.builder import OpBuilder
from dct_plugin.integrations.deepspeed import build_lock
build_lock.SAY_AFTER = 0.2
own = OpBuilder.jit_load = lambda self, seconds: time.sleep(seconds)
with build_lock.builder_watched():
    OpBuilder.jit_load(None, 0)
    OpBuilder.jit_load(None, 1)
assert OpBuilder.jit_load is own
"""
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with forked_interpreters():
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("dct: ")]
    assert line.startswith("dct: still compiling a part of DeepSpeed, or waiting for a process that does")
    assert line.endswith(f"one that was killed left a lock: rm {lock}") == build_lock.locks_stay()


@pytest.mark.slow
def test_the_set_up_has_a_line_for_each_step_whatever_commands_print(tmp_path: Path) -> None:
    makefile = tmp_path / "Makefile"
    step = "$(call step,compile,{ echo dct: still compiling >&2; false; } || true)"
    makefile.write_text(f"include {ROOT / 'Makefile'}\nprobe:\n\t{step}\n")
    done = subprocess.run(
        ["make", "--no-print-directory", "-f", makefile, "probe"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
        capture_output=True,
        text=True,
    )
    assert re.fullmatch(r"  compile +\d+ s\n", done.stdout), done
    assert done.stderr == ""
