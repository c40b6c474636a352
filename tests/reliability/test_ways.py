"""The files of the package that a way enters, traced on real ranks: a change that lengthens a way is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from support.processes import run
from support.trace import Trace
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dct_plugin

SECTION = {"data_parallel": {"sparsity": 0.99, "warmup_steps": 2, "sparsity_warmup_steps": 2}}
#: The most files, and calls, of each way; lower them when a way becomes shorter.
MOST = {"attach": (28, 2_300), "forward": (15, 90), "backward": (28, 380), "step": (17, 130)}
#: The same of forward pass, backward pass and step together.
MOST_TOGETHER = 34, 550
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


def _silent_local_step(rank: int, world_size: int) -> list[dict[str, int]]:
    """Trace an optimizer step of local steps in which ranks exchange nothing."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    state = dct_plugin.attach(
        ddp, optimizer, {"data_parallel": {"local_steps": {"every": 4}, "warmup_steps": 2}}
    )
    trace = Trace()
    for step in range(9):
        optimizer.zero_grad()
        ddp(torch.randn(32, 256)).square().mean().backward()
        with trace if step == 8 else contextlib.nullcontext():
            optimizer.step()
    state.close()
    return [trace.calls]


def _zero1(rank: int, world_size: int) -> list[dict[str, int]]:
    """Trace a second ``initialize`` of DeepSpeed's ZeRO-1, and a backward pass with step-ahead after the
    start.
    """
    import deepspeed

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "dct": SECTION,
    }
    start, trace = Trace(), Trace()
    for tracing in (contextlib.nullcontext(), start):  # all modules are imported by the second engine
        model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64))
        with tracing:
            engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    for step in range(9):
        loss = engine(torch.randn(32, 256, dtype=torch.bfloat16)).float().square().mean()
        with trace if step == 8 else contextlib.nullcontext():
            engine.backward(loss)
        engine.step()
    engine.destroy()
    return [start.calls, trace.calls]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "most", "entered"),
    [
        (_zero1, [58, 30], "integrations/deepspeed/zero.py"),
        (_silent_local_step, [12], "data_parallel/local_steps/add_on.py"),
    ],
)
def test_ways_of_zero_1_and_of_a_silent_local_step(
    way: Callable[[int, int], list[dict[str, int]]], most: list[int], entered: str
) -> None:
    for traces in run(2, way):
        for found, files in zip(traces, most, strict=True):
            assert entered in found, sorted(found)
            assert len(found) <= files, " ".join(sorted(found))


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
        assert len(together) <= MOST_TOGETHER[0], " ".join(sorted(together))
        assert calls_together <= MOST_TOGETHER[1]
