"""The files of the package that a way enters, traced on real ranks: a change that lengthens a way is seen."""

from __future__ import annotations

import pytest
import torch
from support.processes import run
from support.trace import Trace
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dct_plugin

SECTION = {"data_parallel": {"sparsity": 0.99, "warmup_steps": 2, "sparsity_warmup_steps": 2}}
#: The most files, and calls, of each way; lower them when a way becomes shorter.
MOST = {"attach": (28, 2_300), "forward": (15, 90), "backward": (33, 380), "step": (17, 130)}
#: The same of forward pass, backward pass and step together.
MOST_TOGETHER = 38, 550
#: A file that the way must enter, so that a trace of nothing fails.
ENTERED = {
    "attach": "policy/resolve.py",
    "forward": "data_parallel/step_ahead/displaced_weights.py",
    "backward": "data_parallel/plan_exchange.py",
    "step": "integrations/host/steps.py",
}


def _traced(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    """Trace a second ``attach`` of the process, and a step of AdamW with step-ahead after the start."""
    torch.manual_seed(0)
    traces = {name: Trace() for name in MOST}
    for tracing in (False, True):  # all modules are imported by the second attachment
        model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        if not tracing:
            dct_plugin.attach(ddp, optimizer, SECTION).detach()
            continue
        with traces["attach"]:
            state = dct_plugin.attach(ddp, optimizer, SECTION)
        for _ in range(8):
            optimizer.zero_grad()
            ddp(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        with traces["forward"]:
            loss = ddp(torch.randn(32, 256)).square().mean()
        with traces["backward"]:
            loss.backward()
        with traces["step"]:
            optimizer.step()
        state.close()
    return {name: trace.calls for name, trace in traces.items()}


@pytest.mark.slow
def test_a_way_enters_no_more_files_than_today() -> None:
    for found in run(2, _traced):
        for way, (files, calls) in MOST.items():
            entered = found[way]
            assert ENTERED[way] in entered, (way, sorted(entered))
            assert len(entered) <= files, (way, sorted(entered))
            assert sum(entered.values()) <= calls, (way, entered)
        together = set().union(*(found[way] for way in MOST if way != "attach"))
        calls_together = sum(sum(found[way].values()) for way in MOST if way != "attach")
        assert len(together) <= MOST_TOGETHER[0], sorted(together)
        assert calls_together <= MOST_TOGETHER[1]
