"""A sample of the hosts' own tests that installed wheels have, with the plugin in what they train."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest")
pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent))

from run import judge
from suites import SUITES

pytestmark = pytest.mark.slow

SAMPLE = {
    "torch": [
        f"torch_ddp.py::TestDDP::test_{name}"
        for name in (
            "DistributedDataParallelCPU",
            "DistributedDataParallelCPU_grad_is_view",
            "ddp_create_graph",
            "grads_same_across_ranks_with_no_sync",
            "static_graph_api_cpu",
        )
    ],
    "accelerate": ["accelerate_scripts.py::test_script[test_sync.py]"],
    "torchft": [
        "manager_integ_test.py::ManagerIntegTest::test_ddp_healthy",
        "manager_integ_test.py::ManagerIntegTest::test_ddp_recovery_0_async_quorum",
        "process_group_test.py::ProcessGroupTest::test_dummy",  # a DDP model without a default group
    ],
}


@pytest.mark.parametrize("host", ["torch", pytest.param("accelerate", marks=pytest.mark.long), "torchft"])
def test_sample(host: str) -> None:
    """All pass, and the plugin took part in each."""
    if host == "torchft":
        pytest.importorskip("torchft")
    tests = tuple(SAMPLE[host])
    suite = dataclasses.replace(SUITES[host], paths=tests, refused=())
    assert suite.folder is not None
    found = judge(suite, suite.folder)
    assert len(found["passed"]) == len(found["injected"]) == len(tests), found
