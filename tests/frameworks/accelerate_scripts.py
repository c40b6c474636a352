"""Accelerate's own test scripts, which its wheel has, on two processes with CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dct_plugin.recommender.links.team import free_port

pytestmark = pytest.mark.slow

SCRIPTS = Path(find_spec("accelerate").origin).parent / "test_utils" / "scripts"


# The others fail or hang on CPUs without the plugin, or need data sets.
@pytest.mark.parametrize("name", ["test_script.py", "test_sync.py", "test_ops.py"])
def test_script(name: str) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, *command, str(SCRIPTS / name)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
