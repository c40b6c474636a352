"""Accordion: which layers are in a critical regime."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from support import add_on_of
from support.processes import logged
from support.processes import run as run_ranks

from dct_plugin.config import AccordionConfig, DataParallelConfig, MetricsConfig
from dct_plugin.config.data_parallel import SparsitySchedule
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.accordion import SAMPLES, Accordion
from dct_plugin.data_parallel.plan import PlannedTensor, ReductionPlan
from dct_plugin.errors import ConfigError
from dct_plugin.metrics import Metrics


def accordion(interval: int) -> Accordion:
    exchange = SimpleNamespace(received=lambda tensor, what: tensor)
    group = SimpleNamespace(step=0, rank=1, schedule=SparsitySchedule(0.5), exchange=exchange)
    return Accordion(group, AccordionConfig(interval=interval, sparsity=0.0))


def planned(gradient: torch.Tensor, *, owned: list[tuple[int, int]] | None = None) -> ReductionPlan:
    """A plan of one tensor, of which rank 1 gets the sums of some parts, or all of it."""
    numel = gradient.numel()
    if owned is None:
        return ReductionPlan("sum", [PlannedTensor("w", gradient, [Shard(0, 0, numel)], False)])
    bounds = sorted({0, numel, *(bound for part in owned for bound in part)})
    shards = [Shard(int((a, b) in owned), a, b) for a, b in itertools.pairwise(bounds)]
    return ReductionPlan("sum", [PlannedTensor("w", gradient, shards, False)], sums_everywhere=False)


def run(regimes: Accordion, gradients: list[torch.Tensor], *, first: int = 0) -> list[bool]:
    """Whether the layer was critical at every step."""
    seen = []
    for step, gradient in enumerate(gradients, first):
        regimes._group.step = step
        regimes.before_reduce(planned(gradient))
        seen.append(regimes.critical("w"))
        regimes.after_reduce(planned(gradient))
        regimes.end_step(skipped=False)
    return seen


def test_norms_that_stay_leave_the_critical_regime_and_changes_enter_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = torch.ones(50)
    gradients = [one] * 8 + [2 * one] * 8
    # Nothing to compare with in the first interval; a change is seen when its interval is over.
    assert run(accordion(4), gradients) == [True] * 8 + [False] * 4 + [True] * 4
    monkeypatch.setattr(Accordion, "change", 1.5)
    assert run(accordion(4), gradients) == [True] * 8 + [False] * 8


def test_accumulated_gradients_count_not_single_ones() -> None:
    one = torch.ones(50)
    noise = [one, -one] * 8  # norms of single gradients stay; their sums are zero
    assert all(run(accordion(4), noise))


def test_a_learning_rate_that_drops_is_critical_and_one_that_decays_is_not() -> None:
    regimes, one = accordion(2), torch.ones(10)
    rates = iter([1.0, 1.0, 0.9, 0.8, 0.3])
    regimes.learning_rate = lambda: next(rates)
    assert run(regimes, [one] * 10) == [True] * 4 + [False] * 4 + [True] * 2


def test_large_tensors_are_sampled_and_owners_share_the_norm() -> None:
    numel = 3 * SAMPLES
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    squares = []
    for owned in (None, [(0, 1000), (30_000, numel)], [(1000, 30_000)]):
        regimes = accordion(1)
        regimes.after_reduce(planned(gradient, owned=owned))
        regimes.end_step(skipped=False)
        squares.append(regimes.state_dict()["w"]["total"].double().square().sum())
    whole, left, right = squares
    assert torch.allclose(left + right, whole)
    assert float(whole) == pytest.approx(SAMPLES * (1 - 1 / 6), rel=0.05)  # unique ones of the draws


def test_skipped_steps_leave_no_trace_and_states_continue() -> None:
    gradients = [torch.full((9,), float(value)) for value in (1, 1, 1, 1, 5, 5, 5, 5)]
    expected = run(accordion(2), gradients)
    first = accordion(2)
    seen = run(first, gradients[:4])
    first.after_reduce(planned(torch.full((9,), float("nan"))))
    first.end_step(skipped=True)
    second = accordion(2)
    second.load_state_dict(first.state_dict(), step=4)
    assert second.critical("w") == first.critical("w")
    assert seen + run(second, gradients[4:], first=4) == expected


def test_the_unit_of_gradients_may_change() -> None:
    regimes, one = accordion(2), torch.ones(5)
    assert run(regimes, [one] * 5)[-1] is False
    regimes.rescale(1024.0)
    assert run(regimes, [1024 * one] * 3, first=5)[-1] is False


def test_a_saved_state_follows_the_unit_of_gradients() -> None:
    regimes, other, ones = accordion(2), accordion(2), [torch.ones(5)] * 3
    run(regimes, ones)
    saved = Accordion.in_unit(regimes.state_dict(), 1024.0)
    regimes.rescale(1024.0)
    other.load_state_dict(saved, step=3)
    assert str(other.state_dict()) == str(regimes.state_dict())


def test_the_gentle_setting_is_not_the_stronger_one() -> None:
    with pytest.raises(ConfigError, match=r"adaptive.sparsity = 0.95 is above sparsity = 0.9"):
        DataParallelConfig.of(sparsity=0.9, adaptive={"kind": "accordion", "sparsity": 0.95})


def _reduced(rank: int, world_size: int, kind: str) -> tuple[list[bool], int]:
    config = DataParallelConfig.of(
        sparsity=0.5, adaptive={"kind": "accordion", "sparsity": 0.0, "interval": 4}, exchange="direct"
    )
    metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
    reducer = GradientReducer(config, metrics=metrics)
    numel, critical = 20_000, []
    shards = [
        Shard(owner, owner * numel // world_size, (owner + 1) * numel // world_size) for owner in (0, 1)
    ]
    for step in range(16):
        generator = torch.Generator().manual_seed(100 * step + rank)
        size = 1.0 if step < 8 else 4.0
        gradient = torch.randn(numel, generator=generator) * size + size
        if kind == "all_reduce":
            reducer.all_reduce([("w", gradient)], scale=0.5)
        else:
            reducer.reduce_scatter([("w", gradient, shards)], scale=0.5)
        critical.append(add_on_of(reducer, Accordion).critical("w"))
        reducer.end_step()
        metrics.step(step)
        if step == 9:
            state, reducer = reducer.state_dict(), GradientReducer(config, metrics=metrics)
            reducer.load_state_dict(state)
    return critical, round(metrics.summary().classes["gradient/critical"].dense_bytes / (4 * numel))


def _told(rank: int, world_size: int, kind: str) -> tuple[list[bool], int, list[str]]:
    with logged() as lines:
        critical, steps = _reduced(rank, world_size, kind)
    return critical, steps, [line for line in lines if "Accordion" in line]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_ranks_decide_alike_with_reduced_gradients_and_with_shards(kind: str) -> None:
    (first, steps, told), (second, _, silent) = run_ranks(2, _told, kind)
    # Nothing to compare with at first; the change at step 8 is seen when its interval is over.
    assert first == second == [True] * 8 + [False] * 4 + [True] * 4
    # A dense exchange of one tensor between two ranks; gloo scatters sums at the price of an all-reduce.
    assert steps == 12
    assert told == [
        "dct: step 8: Accordion: 1 tensor out of a critical regime, sparsity 0.5: w",
        "dct: step 12: Accordion: 1 tensor in a critical regime, sparsity 0: w",
    ]
    assert silent == []
