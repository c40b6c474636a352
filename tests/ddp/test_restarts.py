"""torchrun starts the ranks of a job again when one is killed, and goes on with fewer when a node is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.torchrun_job import Job, ends

from dct_plugin import checkpoint

pytestmark = pytest.mark.slow


def _residuals(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Return the residuals of a checkpoint by so many ranks, as their average."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        for name, stream in checkpoint.read(checkpoint.StateFiles(rank, 0).file(folder))["state"][
            "streams"
        ].items():
            residual = checkpoint.unpacked(stream["residual"])
            found[name] = found.get(name, torch.zeros_like(residual)) + residual / ranks
    return found


def test_a_killed_rank_and_a_lost_node(tmp_path: Path) -> None:
    job = Job(tmp_path, "--steps=90", "--seconds=0.05")
    job.add_node(2)
    job.add_node(1)
    try:
        job.wait_for(20, 3)
        job.kill_rank(0, 1)
        job.wait_for(job.latest() + 20, 3)
        job.kill_node(1)
        log = job.finish()
    finally:
        job.close()
    (ranks, first, loss, weights), other = ends(log)
    assert (ranks, first, weights) == (other[0], other[1], other[3])
    assert ranks == 2
    assert first >= 40
    assert loss < 1.0
    saved = tmp_path / f"step{first}"
    assert f"{saved}: the residuals of 3 ranks at step {first} are spread over 2 ranks\n" in log
    assert "torchrun's key-value store" not in log
    unsent = _residuals(saved, 3)
    assert sum(residual.norm() for residual in unsent.values()) > 0
    for rank in range(2):
        loaded = checkpoint.StateFiles(rank, 2).read(saved)
        for name, residual in unsent.items():
            torch.testing.assert_close(loaded.state["streams"][name]["residual"], residual)
