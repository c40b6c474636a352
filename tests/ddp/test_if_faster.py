"""A job that writes no settings, under torch DDP: dense where that is as fast, and memory that is said."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import Lines, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.data_parallel.autotune import add_on
from dct_plugin.data_parallel.autotune.add_on import AutomaticSparsity
from dct_plugin.data_parallel.autotune.cost_model import DecisionRules
from dct_plugin.data_parallel.autotune.measurements import largest
from dct_plugin.integrations.host import attachment
from dct_plugin.policy.rules import Setting

STEPS = 40


def _trained(rank: int, world_size: int, dense_ms: float) -> dict[str, Any]:
    """Train with nothing written; the times of steps are told."""
    handler = Lines()
    rules = DecisionRules(dense_steps=2, settling_steps=1, trial_steps=2, rounds=1, window_steps=4)

    def median(self: AutomaticSparsity) -> float:
        times = {Setting(): dense_ms, Setting(0.0, "int8"): 2.0}
        return largest(self._group, [times.get(self.current, 1.0)])[0]

    with (
        patch.multiple(AutomaticSparsity, rules=rules, _median=median),
        patch(f"{add_on.__name__}.reduction_seconds", lambda group: 0.5 * group.step),
        patch.object(attachment.psutil, "virtual_memory", lambda: type("Free", (), {"available": 1e6})),
    ):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 80)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = dct_plugin.attach(
            model, optimizer, {"data_parallel": {"warmup_steps": 4, "sparsity_warmup_steps": 20}}
        )
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 80, generator=generator)).square().mean().backward()
            optimizer.step()
        (reducer,) = state.reducers
        classes = state.metrics.summary().classes
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        saved = state.state_dict()
        state.close()
        return {
            "lines": handler.lines,
            "dense": reducer.group.stays_dense,
            "streams": len(reducer.group.streams),
            "uncompressed": [cls for cls in classes if cls == "uncompressed/gradient/faster"],
            "weights": weights,
            "saved": saved["reducer"]["automatic"],
        }


@pytest.mark.slow
@pytest.mark.parametrize("dense_ms", [1.0, 3.0])
def test_a_job_that_writes_nothing_stays_dense_where_that_is_as_fast(dense_ms: float) -> None:
    first, second = run(2, _trained, dense_ms)
    assert torch.equal(first["weights"], second["weights"])
    stays = dense_ms == 1.0
    for rank in (first, second):
        assert rank["dense"] == stays
        assert bool(rank["streams"]) == (not stays)
        assert rank["uncompressed"]  # DDP's own all-reduce, at least in a trial of int8
        assert rank["saved"]["is_decided"]
    # Thresholds are predicted to be faster, and are compared with dense steps when the ramp is over.
    *_, decision = (line for line in first["lines"] if line.startswith("dct: step "))
    words = "this link needs no compression: 1.00x with sparsity 0.99, bf16 values; dense"
    assert (words in decision) == stays
    # Residual and displaced weights of 12,960 weights, beside a megabyte that is free.
    (memory,) = (line for line in first["lines"] if "this rank keeps" in line)
    assert "51.8 kB of residual and 51.8 kB of displaced weights" in memory
    assert '"residual_dtype": "int8"' in memory
