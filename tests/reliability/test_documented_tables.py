"""The example of docs/embeddings.md runs as it stands, launched as it says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT
from support.deepspeed_launch import torchrun


@pytest.mark.slow
def test_the_example_of_sharded_tables_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(# tables.py.*?)```", (ROOT / "docs" / "embeddings.md").read_text(), re.S)
    assert code is not None
    (tmp_path / "tables.py").write_text(code[1])
    done = subprocess.run(
        torchrun(2, "tables.py"),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^dct: 20 steps, rank 0 sent .* fewer", done.stdout, re.M)
