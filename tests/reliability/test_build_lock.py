"""A compilation's lock that is waited for, or was left behind, is spoken of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT
from torch.utils import cpp_extension

from dct_plugin.integrations.deepspeed import build_lock

LOCKS_STAY = pytest.mark.skipif(not build_lock.locks_stay(), reason="the kernel frees this torch's locks")


def test_a_lock_that_was_left_behind_is_said_to_be_old(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    assert f"if no process is compiling, one that was killed left it: rm {lock}" in build_lock.advice(lock)
    os.utime(lock, (time.time() - 3600,) * 2)
    assert "nothing has changed in its folder for 60 minutes" in build_lock.advice(lock)


def test_a_long_compilation_says_so_where_the_kernel_frees_locks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    monkeypatch.setattr(build_lock, "SAY_AFTER", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    said = ""
    with build_lock.watched():
        while "once on this machine" not in said:  # other tests' threads may speak, too
            said += capfd.readouterr().err
    assert "dct: still compiling a part of DeepSpeed, or waiting for a process that does" in said
    assert build_lock.locks() == []


@LOCKS_STAY
@pytest.mark.slow
def test_an_engine_that_waits_says_so(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    code = """
import os, threading, time
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.ops.op_builder.builder import OpBuilder
from dct_plugin.integrations.deepspeed import build_lock
build_lock.SAY_AFTER = 0.2
from torch.utils import cpp_extension, file_baton

def compile_operator():
    baton = cpp_extension.FileBaton(LOCK)
    assert not baton.try_acquire()
    threading.Timer(1.0, lambda: os.remove(LOCK)).start()
    baton.wait()
    assert baton.try_acquire()
    time.sleep(0.5)
    baton.release()
    assert baton.try_acquire()
    baton.release()
    time.sleep(0.5)

OpBuilder.jit_load = own = lambda self: compile_operator()
with build_lock.builder_watched():
    OpBuilder.jit_load(None)
assert OpBuilder.jit_load is own
assert cpp_extension.FileBaton is file_baton.FileBaton
"""
    done = subprocess.run(
        [sys.executable, "-c", f"LOCK = {str(lock)!r}\n{code}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    waiting, compiling = [line for line in done.stderr.splitlines() if line.startswith("dct: ")]
    assert waiting.startswith("dct: waiting for another process to compile a part of DeepSpeed")
    assert waiting.endswith(f"rm {lock}")
    assert compiling.startswith(f"dct: still compiling in {lock.parent}")


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
        timeout=60,
    )
    assert re.fullmatch(r"  compile +\d+ s\n", done.stdout), done
    assert done.stderr == ""


@LOCKS_STAY
@pytest.mark.slow
def test_the_lock_of_a_process_that_was_killed_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    code = f"""
import os, signal
from torch.utils import cpp_extension
from dct_plugin.integrations.deepspeed import build_lock
with build_lock.watched():
    baton = cpp_extension.FileBaton({str(lock)!r})
    if baton.try_acquire():
        os.kill(os.getpid(), signal.SIGKILL)
    baton.wait()
    assert baton.try_acquire()
    baton.release()
"""
    for ends in (-9, 0):
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == ends
    assert list(lock.parent.iterdir()) == []
