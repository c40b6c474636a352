"""The automatic mode in the real megatron-core: all ranks take the same settings, and training goes on."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import NamedTuple

import pytest
from support import add_on_of, given_times, processes
from support.megatron_gpt import Job, Outcome, Training, train

from dct_plugin.data_parallel.autotune.add_on import AutomaticSparsity
from dct_plugin.data_parallel.autotune.cost_model import DecisionRules

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

#: One that follows the optimizer, which is Adam.
AHEAD = {"data_parallel": {"sparsity": "auto", "feedback": "step_ahead", "min_numel": 256}}
AHEAD["data_parallel"] |= {"warmup_steps": 5, "sparsity_warmup_steps": 5}
LOCAL = {"data_parallel": {"quality": "bytes", "min_numel": 256}}
STEPS = 40


class Course(NamedTuple):
    """The record of a rank: its training, the setting of every step by reducer, and the decisions."""

    outcome: Outcome
    used: dict[str, list[str]]
    decisions: list[str]


def _trained(rank: int, world_size: int, jobs: list[Job]) -> list[Course]:
    # Everything is tried, and every two windows the ranks decide anew.
    AutomaticSparsity.rules = DecisionRules(
        dense_steps=2,
        settling_steps=1,
        trial_steps=1,
        rounds=1,
        most_sparsities=2,
        trial_ratio=1e9,
        window_steps=2,
        step_ratio=1.0 + 1e-9,
    )
    given_times.time_codings_briefly()
    return [_course(job) for job in jobs]


def _course(job: Job) -> Course:
    from dct_plugin.integrations.megatron import hooks
    from dct_plugin.integrations.megatron.data import DataParallelHook

    used: dict[str, list[str]] = {}
    decisions: list[str] = []

    def note(training: Training, step: int) -> None:
        session = hooks.current()
        assert session is not None
        (data,) = (each for each in session.hooks if isinstance(each, DataParallelHook))
        for each in data.reductions:
            used.setdefault(each.name, []).append(str(add_on_of(each.reducer, AutomaticSparsity).current))
        session.metrics.event = lambda name, **figures: decisions.extend(  # type: ignore[method-assign]
            [figures["setting"]] if "setting" in figures else []
        )

    return Course(train(replace(job, after_step=note)), used, decisions)


def test_ranks_decide_alike_and_training_goes_on() -> None:
    job = Job(layers=1, micro_batches=2, steps=STEPS)
    jobs = [
        job.with_dct(LOCAL, overlap_grad_reduce=True),
        job.with_dct(AHEAD, overlap_grad_reduce=True),
        job.with_dct(LOCAL, distributed_optimizer=True, bf16=True),
        job.with_dct(AHEAD, distributed_optimizer=True),
    ]
    for first, second in zip(*processes.run(2, _trained, jobs), strict=True):
        assert (first.used, first.decisions) == (second.used, second.decisions)
        assert first.outcome.parameters == second.outcome.parameters
        assert len(first.used["dense"]) == STEPS
        assert len(set(first.used["dense"])) > 2  # dense, and both trials; what is tried later, times decide
        assert len(first.decisions) > 1
        losses = first.outcome.losses
        assert losses[-1] < losses[0] - 1, losses


def test_experts_decide_for_themselves() -> None:
    section = {**LOCAL, "model_parallel": {"expert_gradients": True}}
    job = Job(layers=1, experts=2, ep=2, micro_batches=1, steps=STEPS, distributed_optimizer=True).with_dct(
        section
    )
    courses = [course for (course,) in processes.run(4, _trained, [job])]
    assert all(each.used["dense"] == courses[0].used["dense"] for each in courses)
    for rank in 0, 1:  # ranks r and r + 2 hold the same experts
        assert courses[rank].used == courses[rank + 2].used
        assert courses[rank].outcome.parameters == courses[rank + 2].outcome.parameters
        assert len(set(courses[rank].used["expert"])) > 2
    assert courses[0].outcome.losses[-1] < courses[0].outcome.losses[0] - 0.5
