"""Nodes in the real megatron-core, on CPU with gloo: four data-parallel ranks as two nodes of two."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.megatron_gpt import Job, Outcome, train_all

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

EXACT = {"sparsity": 0, "value_dtype": "fp32", "min_numel": 256, "nodes": 2}
AHEAD = {"sparsity": 0.95, "min_numel": 256, "feedback": "step_ahead", "nodes": 2}
UPDATES = {"parameters": {"sparsity": 0.9}}


def run(*jobs: Job) -> list[list[Outcome]]:
    """Outcomes by job, then rank."""
    return [list(each) for each in zip(*processes.run(4, train_all, list(jobs)), strict=True)]


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "distributed-optimizer"])
def test_ranks_stay_in_step_and_resume(sharded: bool, tmp_path: Path) -> None:
    def section(settings: dict[str, Any]) -> dict[str, Any]:
        return {"data_parallel": settings}

    job = Job(distributed_optimizer=sharded, steps=4, micro_batches=1, layers=2, evaluate=True)
    ahead = section(AHEAD | UPDATES if sharded else AHEAD)
    folder = str(tmp_path)
    plain, exact, overlapped, whole = run(
        job,
        job.with_dct(section(EXACT), through_codec=True),
        job.with_dct(section(AHEAD), overlap_grad_reduce=True),
        job.with_dct(ahead, steps=6, save=(folder, 4)),
    )
    assert exact[0].losses == pytest.approx(plain[0].losses, rel=1e-4)
    for outcomes in (exact, overlapped, whole):
        assert len({outcome.parameters for outcome in outcomes}) == 1
        assert all("data_parallel" in outcome.active for outcome in outcomes)
        assert [outcome.groups_made for outcome in outcomes] == [0] * 4, "all were made before"
    rest, flat = run(
        job.with_dct(ahead, steps=6, load=(folder, 4)),
        job.with_dct(section(ahead["data_parallel"] | {"nodes": 1}), steps=6, load=(folder, 4)),
    )
    assert [each.parameters for each in rest] == [each.parameters for each in whole]
    assert len({each.parameters for each in flat}) == 1
    assert flat[0].parameters != rest[0].parameters
