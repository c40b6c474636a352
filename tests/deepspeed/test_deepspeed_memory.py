"""The memory that ``dct advise --memory`` prints, beside what ranks of real engines keep between steps.

Engines of torch's DDP and FSDP2 are here, too: the comparison is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import deepspeed_launch
from support.deepspeed_launch import launch

from dct_plugin.policy.memory import Job, memory

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parents[1] / "support" / "memory_worker.py"
WIDTH = 1024
AHEAD = {"feedback": "step_ahead", "warmup_steps": 1}
EXACT, INT8 = AHEAD | {"parameters": "exact"}, {"residual_dtype": "int8"}
HPZ = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100}
#: Ranks, stage, keys of ``zero_optimization``, the training as the table has it, tensors of scratch.
CASES: dict[str, tuple[int, int, dict[str, Any], Job, int]] = {
    "DDP": (2, 0, {}, Job("", AHEAD, 2, weight_bytes=4.0, in_slots=False), 0),
    "FSDP2": (4, 0, {}, Job("", AHEAD, 2, 2, 4.0, 2, in_slots=False), 0),
    "ZeRO-0": (2, 0, {}, Job("", AHEAD, 2, weight_bytes=4.0, in_slots=False), 0),
    "ZeRO-1, exact updates": (2, 1, {}, Job("", EXACT, 2, shards=2, in_slots=False), 1),
    "ZeRO-2, int8 residuals": (2, 2, {}, Job("", EXACT | INT8, 2, shards=2, in_slots=False), 2),
    "ZeRO-3": (2, 3, {}, Job("", INT8 | {"feedback": "local"}, 2, shards=2, in_slots=False), 2),
    "ZeRO-3, copies in nodes": (
        *(4, 3, HPZ),
        Job("", EXACT | INT8 | {"nodes": 2}, 2, 2, 2.0, 2, shards=2, copies=True, in_slots=False),
        2,
    ),
}


def settings(host: str, stage: int, zero: dict[str, Any], dct: dict[str, Any] | None) -> dict[str, Any]:
    sizes = {"reduce_bucket_size": 6_553_600, **zero}
    section = None if dct is None else {"data_parallel": dct}
    if host != "DeepSpeed":
        return section or {}
    return deepspeed_launch.config(
        stage, "bf16" if stage else "fp32", dct=section, optimizer="AdamW", zero=sizes
    )


@pytest.mark.long
@pytest.mark.parametrize("layers", [24, 96])
@pytest.mark.parametrize("name", CASES)
def test_memory_is_what_a_rank_keeps(name: str, layers: int, tmp_path: Path) -> None:
    ranks, stage, zero, job, tensors = CASES[name]
    host = "DeepSpeed" if name.startswith("ZeRO") else name
    kept = []
    for kind, section in (("plain", None), ("dct", job.section)):
        run = {"id": kind, "host": host, "layers": layers, "config": settings(host, stage, zero, section)}
        kept.append([rank[kind] for rank in launch(ranks, [run], tmp_path / kind, worker=WORKER)])
    found = max(with_it - without for without, with_it in zip(*kept, strict=True))
    expected = memory(job, layers * WIDTH**2, width=WIDTH)
    del expected["updates"]  # they are there during a step
    # Beside the sums lies scratch memory: step-ahead's two parts, ten bytes for each entry of a record of
    # changes, and fp32 copies of the largest tensor.
    scratch = (8 << 20) + (10 << 20) * (job.section.get("parameters") == "exact") + 4 * tensors * WIDTH**2
    total = sum(expected.values())
    print(f"{name}: {found / 1e6:.1f} MB; {total / 1e6:.1f} MB, scratch {scratch / 1e6:.1f} MB")
    assert 0.95 * total < found < 1.05 * total + scratch, expected
