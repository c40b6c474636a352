"""A wheel holds the compiled kernels, which load on a machine without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import ROOT

from dct_plugin.kernels import build


@pytest.mark.slow
def test_a_wheel_brings_its_kernels(tmp_path: Path) -> None:
    if not build.compilers():
        pytest.skip("no compiler to build the wheel with")
    source = tmp_path / "source"
    ignored = {".git", ".venv", "build", "dist", "out", "tests", "benchmarks"}
    source.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ignored and not path.name.startswith(".") and path.suffix != ".egg-info":
            (source / path.name).symlink_to(path)
    code = "from setuptools import build_meta as b; print(b.build_wheel(OUT))"
    done = subprocess.run(
        [sys.executable, "-c", f"OUT = {str(tmp_path)!r}\n{code}"],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("dct_plugin-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    kernels = tmp_path / "installed" / "dct_plugin" / "kernels"
    load = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
print(build.load()[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", load, str(kernels / "build.py")],
        env={**os.environ, "PATH": "", "CC": "", "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(kernels / "_dct_kernels.so"), done.stderr
