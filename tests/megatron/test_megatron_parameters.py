"""Thresholded updates of the weights in the real megatron-core, on CPU with gloo."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import given_times, processes
from support.megatron_gpt import Job, Outcome, Training, train, train_all
from torch import Tensor

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from dct_plugin.integrations.megatron import hooks
from dct_plugin.integrations.megatron.data import DataParallelHook

pytestmark = pytest.mark.slow

BASE = Job(micro_batches=2, distributed_optimizer=True, steps=6, evaluate=True)


def section(
    parameters: float | None = 0.97, sparsity: float = 0.9, value_dtype: str = "bf16", **options: Any
) -> dict[str, Any]:
    """A ``dct`` section with thresholded updates."""
    data = {"sparsity": sparsity, "min_numel": 256, "value_dtype": value_dtype, **options}
    updates = {"sparsity": parameters, "value_dtype": value_dtype}
    return {
        "data_parallel": {**data, "parameters": updates},
    }


def run(world_size: int, *jobs: Job) -> list[list[Outcome]]:
    """Outcomes by job, then rank."""
    by_rank = processes.run(world_size, train_all, list(jobs))
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_two_data_parallel_ranks(kind: str) -> None:
    base = BASE if kind == "fp32" else replace(BASE, **{kind: True}, loss_scale=2.0**10)
    lossless = section(0.0, 0.0, "fp32")
    plain, same, sparse, overlapped, ahead = run(
        2,
        base,
        base.with_dct(lossless, through_codec=True),
        base.with_dct(section(), evaluate_between=True),
        base.with_dct(section(), overlap_grad_reduce=True, evaluate_between=True),  # and overlap_param_gather
        base.with_dct(section(feedback="step_ahead"), overlap_grad_reduce=True),
    )
    for one, other in zip(plain, same, strict=True):
        assert one.losses == other.losses
        assert one.parameters == other.parameters
    for outcomes in (sparse, overlapped, ahead):
        first, second = outcomes
        assert first.parameters == second.parameters
        assert first.parameters != plain[0].parameters
        assert first.losses[-1] < first.losses[0]
        part = first.classes["parameter"]
        assert part["density"] == pytest.approx(0.03, abs=0.02)
        assert part["sent_bytes"] < part["dense_bytes"] / 8
        assert "parameter_full" not in first.classes


def look_ahead(rank: int, world_size: int, job: Job) -> tuple[float, float]:
    """How far from the masters weights are at most after the last step: the working ones, and what the
    ranks see on average in training passes.
    """
    torch.set_num_threads(1)
    distances = []

    def look(training: Training, step: int) -> None:
        if step + 1 < job.steps:
            return
        session = hooks.current()
        assert session is not None
        hook = next(hook for hook in session.hooks if isinstance(hook, DataParallelHook))
        (ahead,) = [each.ahead for each in hook.reductions]
        assert ahead is not None
        parameters = list(ahead._parameters.values())
        working = [parameter.data.clone() for parameter in parameters]
        ahead.forget()
        ahead.displace()
        seen = [parameter.data.clone() for parameter in parameters]
        ahead.restore()
        hooks.gather_parameters()
        for mean in seen:
            dist.all_reduce(mean)
            mean.div_(world_size)
        for found in working, seen:
            distances.append(
                max(float((a - b.data).abs().max()) for a, b in zip(found, parameters, strict=True))
            )

    train(replace(job, after_step=look))
    return distances[0], distances[1]


def test_owners_look_ahead_by_what_they_have_not_sent() -> None:
    """No gradient is unsent: on average over the ranks, passes run at the masters."""
    job = replace(BASE, steps=3, evaluate=False)
    dct = section(sparsity=0.0, value_dtype="fp32", feedback="step_ahead")
    job = job.with_dct(dct, through_codec=True)
    for working, seen in processes.run(2, look_ahead, job):
        assert working > 1e-3
        assert seen < 1e-6


def test_bytes_of_everything_that_crosses() -> None:
    """Gradients at 0.99, updates at 0.97, with small tensors and size messages: 12.6 M weights in fp32."""
    wide = replace(BASE, hidden=512, micro_batches=1, steps=3, evaluate=False)
    (first, second), *_ = run(2, wide.with_dct(section(sparsity=0.99, min_numel=4096)))
    assert first.parameters == second.parameters
    for outcome in (first, second):
        dense = sum(part["dense_bytes"] for part in outcome.classes.values())
        assert dense / sum(part["sent_bytes"] for part in outcome.classes.values()) > 60


def test_warm_up_is_megatrons_own() -> None:
    base = replace(BASE, steps=3, bf16=True, overlap_grad_reduce=True)
    plain, warm = run(2, base, base.with_dct(section(warmup_steps=3)))
    for one, other in zip(plain, warm, strict=True):
        assert one.losses == other.losses
        assert one.parameters == other.parameters
        assert other.classes["parameter_full"]["sent_bytes"] > 0


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_resumed_run_goes_on_bitwise(kind: str, tmp_path: Path) -> None:
    """Weights are gathered in full for the checkpoint; the run that wrote it goes on from there, too. With
    bf16 residuals are kept in int8.
    """
    bf16 = kind == "bf16"
    dct = section(feedback="step_ahead", warmup_steps=1, residual_dtype="int8" if bf16 else "auto")
    base = replace(BASE, bf16=bf16).with_dct(dct)
    whole, rest = run(
        2, replace(base, save=(str(tmp_path), 4)), replace(base, load=(str(tmp_path), 4), seed=9)
    )
    for one, other in zip(whole, rest, strict=True):
        assert one.losses[4:] == other.losses
        assert one.parameters == other.parameters
    assert rest[0].parameters == rest[1].parameters


def test_expert_layers_and_model_parallel_ranks(tmp_path: Path) -> None:
    moe, tensor = run(
        4,
        replace(BASE, bf16=True, experts=2, ep=2, steps=4).with_dct(section()),
        replace(BASE, tp=2, sequence_parallel=True, steps=4).with_dct(section()),
    )
    for outcomes in (moe, tensor):
        assert all(outcome.classes["parameter"]["density"] < 0.06 for outcome in outcomes)
    assert tensor[0].parameters == tensor[2].parameters
    assert tensor[1].parameters == tensor[3].parameters
    assert moe[0].parameters == moe[2].parameters


def _embeddings(rank: int, world_size: int) -> list[Tensor]:
    """The weights after every step that this stage shares with another one."""
    torch.set_num_threads(1)
    found: list[Tensor] = []

    def keep(training: Training, step: int) -> None:
        session = hooks.current()
        assert session is not None
        (hook,) = (hook for hook in session.hooks if isinstance(hook, DataParallelHook))
        weights = (weight for model in hook.models for weight in model.parameters())
        found.extend(weight.detach().clone() for weight in weights if hasattr(weight, "shared_embedding"))

    train(replace(BASE, pp=2, vocab=512, bucket_size=20_000, steps=4, after_step=keep).with_dct(section()))
    return found


def test_embeddings_of_two_stages_stay_equal() -> None:
    """The stages cut them in different places, and would measure different thresholds."""
    for stages in zip(*processes.run(4, _embeddings), strict=True):
        assert all(torch.equal(weight, stages[0]) for weight in stages)


def refused(rank: int, world_size: int, job: Job) -> str:
    torch.set_num_threads(1)
    with pytest.raises(Exception) as raised:
        train(job)
    return str(raised.value)


def test_without_the_distributed_optimizer_it_is_refused() -> None:
    for text in processes.run(2, refused, Job(steps=1).with_dct(section())):
        assert "dct.data_parallel.parameters: Megatron without the distributed" in text


def test_exact_updates_are_the_default_of_thresholded_gradients() -> None:
    dense = {"data_parallel": {"sparsity": 0.9, "min_numel": 100, "feedback": "local", "parameters": None}}
    default = {"data_parallel": {k: v for k, v in dense["data_parallel"].items() if k != "parameters"}}
    base = replace(BASE, bf16=True, steps=4)
    gathered, exact, fp32 = run(
        2, *(base.with_dct(each) for each in (dense, default)), replace(BASE, steps=2).with_dct(default)
    )
    for theirs, ours in zip(gathered, exact, strict=True):
        assert (ours.losses, ours.parameters) == (theirs.losses, theirs.parameters)
        assert "parameter_exact" in ours.classes
        assert "parameter_exact" not in theirs.classes
    assert any("updated weights cross where their bits changed" in line for line in exact[0].log)
    assert any("are gathered whole: Megatron in fp32" in line for line in fp32[0].log)
    assert "parameter_exact" not in fp32[0].classes


def test_exact_updates_are_megatrons_gathers() -> None:
    """Bitwise, also with gathers that the forward pass asks for, and in fewer bytes at a small step."""
    exact = {"data_parallel": {**section(0.0, 0.0, "fp32")["data_parallel"], "parameters": "exact"}}
    for kind in ("bf16", "fp16"):
        base = replace(BASE, **{kind: True}, loss_scale=2.0**10, steps=8)
        both = replace(base, overlap_grad_reduce=True)  # and overlap_param_gather
        jobs = [job.with_dct(exact, through_codec=True) for job in (base, both)]
        plain, same, chosen, overlapped, updated, chosen_too = run(
            2,
            *(base, jobs[0], replace(jobs[0], times=given_times.whole_gathers_are_faster)),
            *(both, jobs[1], replace(jobs[1], times=given_times.whole_gathers_are_faster)),
        )
        pairs = [(plain, same), (plain, chosen), (overlapped, updated), (overlapped, chosen_too)]
        for theirs, ours in (pair for both in pairs for pair in zip(*both, strict=True)):
            assert ours.losses == theirs.losses
            assert ours.parameters == theirs.parameters
            part = ours.classes["parameter_exact"]
            assert 0 < part["density"] <= 1
            assert part["sent_bytes"] < part["dense_bytes"]
        for each, steps in ((same, 2), (chosen, 5), (updated, 2), (chosen_too, 5)):  # of 8
            for ours in each:
                gathers, updates = (
                    ours.classes[f"parameter_{kind}"]["dense_bytes"] for kind in ("full", "exact")
                )
                assert gathers / (gathers + updates) == pytest.approx(steps / 8, rel=0.01)


def step_again(training: Training, step: int) -> None:
    """After three of the steps take another one, without a forward pass between."""
    if step in (1, 4, 5):
        training.optimizer.step()


def test_a_step_without_a_forward_pass_before_the_next_one() -> None:
    """With ``overlap_param_gather`` the forward pass asks for weights: the rest crosses later."""
    exact = {"data_parallel": {**section(0.0, 0.0, "fp32")["data_parallel"], "parameters": "exact"}}
    base = replace(BASE, bf16=True, lr=1e-5, overlap_grad_reduce=True, after_step=step_again)
    plain, same, sparse = run(
        2,
        base,
        base.with_dct(exact, through_codec=True),
        base.with_dct(section(warmup_steps=2), through_codec=True),  # step 1 is gathered whole
    )
    for theirs, ours in zip(plain, same, strict=True):
        assert ours.losses == theirs.losses
        assert ours.parameters == theirs.parameters
        assert 0 < ours.classes["parameter_exact"]["density"] < 1
    first, second = sparse
    assert first.parameters == second.parameters
