"""``nonfinite_action: "skip"``: a step whose gradient is not finite leaves no trace, on any rank."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from support.processes import logged, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_plugin import DCTState, dct_hook
from dct_plugin.errors import ConfigError

pytestmark = pytest.mark.slow

Outcome = tuple[torch.Tensor, dict[str, torch.Tensor], list[str]]


def _trains(rank: int, world_size: int, batches: list[int], poison: int, options: dict[str, Any]) -> Outcome:
    """Parameters, residuals, and what was logged; the batch ``poison`` is infinite on rank 1."""
    with logged() as lines:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 1))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        keys = {"sparsity": 0.9, "min_numel": 100, "nonfinite_action": "skip", "feedback": "local", **options}
        state = DCTState(
            {"data_parallel": keys}, named_parameters=model.named_parameters(), optimizer=optimizer
        )
        ddp.register_comm_hook(state, dct_hook)
        for batch in batches:
            x = torch.randn(8, 60, generator=torch.Generator().manual_seed(10 * rank + batch))
            factor = float("inf") if batch == poison and rank == 1 else 1.0
            optimizer.zero_grad()
            (ddp(x).square().mean() * factor).backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
        streams = state.state_dict()["reducer"]["streams"]
        assert state.steps.step == len(batches)
        lines = [line for line in lines if "active on" not in line and "known to lose" not in line]
    residuals = {name: stream["residual"] for name, stream in streams.items()}
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), residuals, lines


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (2, {"warmup_steps": 9}),
        (3, {"exchange": "two_phase"}),
    ],
)
def test_ddp_goes_on_as_if_the_batch_had_not_been(ranks: int, options: dict[str, Any]) -> None:
    poisoned = run(ranks, _trains, [0, 1, 2, 3, 4], 2, options)
    without = run(ranks, _trains, [0, 1, 3, 4], -1, options)
    for (parameters, residuals, _), (expected, left, quiet) in zip(poisoned, without, strict=True):
        assert torch.equal(parameters, expected)
        assert residuals.keys() == left.keys()
        assert all(torch.equal(residual, left[name]) for name, residual in residuals.items())
        assert quiet == []
    first, second, *others = (lines for *_, lines in poisoned)
    (line,) = first
    assert line.startswith("dct: rank 0: step 2 is skipped on all ranks: the gradient of 0.weight, 0.bias")
    (line,) = second  # the rank and a parameter where it arose
    assert line.startswith("dct: rank 1: the gradient of ")
    assert line.endswith("is not finite in step 2")
    assert not any(others)


def _refused(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        DCTState({"data_parallel": {"nonfinite_action": "skip"}}).register(
            DistributedDataParallel(nn.Linear(2, 1))
        )
    return str(error.value)


def test_what_it_needs_is_said() -> None:
    assert "needs DCTState(..., optimizer=optimizer)" in run(1, _refused)[0]


def _megatron(rank: int, world_size: int, job: Any) -> tuple[Any, list[str]]:
    """The second and the fifth iteration have an infinite loss on rank 1."""
    from support.megatron_gpt import counting, train

    torch.set_num_threads(1)
    seen = 0

    def batches(job: Any, source: int) -> Any:
        nonlocal seen
        for batch in counting(job, source):
            seen += 1
            yield batch

    def poison(module: nn.Module, _: Any, output: Any) -> Any:
        iteration = (seen - 1) // job.micro_batches
        infinite = rank == 1 and iteration in (1, 4) and type(module).__name__ == "GPTModel"
        return output * float("inf") if infinite else output

    with logged() as lines:
        handle = torch.nn.modules.module.register_module_forward_hook(poison)
        try:
            return train(job, batches), lines
        finally:
            handle.remove()


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("kind", ["fp32", "bf16 sharded"])
def test_megatron_skips_on_all_ranks(kind: str) -> None:
    from support.megatron_gpt import Job

    keys = {"sparsity": 0.9, "min_numel": 256, "nonfinite_action": "skip", "warmup_steps": 3}
    section = {"data_parallel": keys}
    sharded = "sharded" in kind
    job = Job(layers=1, steps=6, watch=True, bf16=sharded, distributed_optimizer=sharded).with_dct(section)
    outcomes = run(2, _megatron, job)
    first, second = (outcome for outcome, _ in outcomes)
    assert first.parameters == second.parameters
    for rank, (outcome, lines) in enumerate(outcomes):
        taken = [success for success, *_ in outcome.history]
        assert taken == [True, False, True, True, False, True]
        before, after = (outcome.history[at][2]["reducers"]["dense"]["state"]["streams"] for at in (3, 4))
        assert any(stream["residual"].any() for stream in before.values())
        for name, stream in before.items():
            assert torch.equal(stream["residual"], after[name]["residual"])
            assert stream["threshold"] == after[name]["threshold"]
        skipped = [line for line in lines if "is skipped on all ranks: the gradient of 0." in line]
        assert len(skipped) == (2 if rank == 0 else 0)


def _freeze_last_stage(chunk: Any, config: Any) -> None:
    chunk.requires_grad_(not chunk.post_process)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("ranks", [2, 4])
def test_megatron_with_a_frozen_stage_skips_on_all_ranks(ranks: int) -> None:
    """The ranks of the frozen stage have no gradients, and take part in the agreement."""
    from support.megatron_gpt import Job

    keys = {"sparsity": 0.9, "min_numel": 256, "nonfinite_action": "skip"}
    off = {"forward": "none"}
    section = {"data_parallel": keys, "model_parallel": {"pipeline": off, "tensor": off}}
    job = Job(
        layers=2,
        pp=2,
        steps=6,
        micro_batches=2,
        watch=True,
        tied_embeddings=False,
        prepare=_freeze_last_stage,
    )
    outcomes = run(ranks, _megatron, job.with_dct(section))
    for rank, (outcome, _) in enumerate(outcomes):
        assert [success for success, *_ in outcome.history] == [True, False, True, True, False, True]
        assert bool(outcome.history[-1][2]["reducers"]) == (ranks == 4 and rank < 2)
        assert outcome.parameters == outcomes[rank - rank % (ranks // 2)][0].parameters
    warnings = [line for _, lines in outcomes for line in lines if "is skipped on all ranks" in line]
    assert len(warnings) == 2
