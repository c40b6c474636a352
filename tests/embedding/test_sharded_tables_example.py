"""``examples/sharded_tables.py`` runs as docs/embeddings.md shows it; one process loads what it exports."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.deepspeed_launch import torchrun
from support.forked import forked_interpreters

SCRIPT = ROOT / "examples" / "sharded_tables.py"


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "embeddings.md").read_text()
    assert f"```{{literalinclude}} ../{SCRIPT.relative_to(ROOT)}\n" in page


@pytest.mark.slow
def test_the_example_trains_and_exports(tmp_path: Path) -> None:
    file = tmp_path / "recommender.pt"
    with forked_interpreters():
        done = subprocess.run(
            torchrun(2, str(SCRIPT), "--steps", "150", "--export", str(file)),
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    loss = re.search(r"loss ([0-9.]+) on clicks that it has not seen", done.stdout)
    assert loss is not None
    assert float(loss[1]) < 0.4  # 0.69 without training
    saved = torch.load(file)
    assert [tuple(table.shape) for table in saved["tables"]] == [
        (20_000, 16),
        (3_000, 16),
        (200, 16),
        (50, 16),
    ]
    output = done.stdout + done.stderr
    assert re.search("active on .*step_ahead", output)  # Adam's MLPs
    assert re.search(r"150 steps, rank 0 sent .* fewer", output)
