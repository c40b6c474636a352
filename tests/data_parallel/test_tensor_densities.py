"""Densities by tensor: what decides them, that ranks agree on them, and that all entries together stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.processes import run
from torch import nn

from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.step_ahead import add_on as step_ahead
from dct_plugin.data_parallel.step_ahead.tensor_densities import (
    INTERVAL,
    LENGTH_LIMITS,
    MAX_DENSITY,
    MIN_MEASUREMENTS,
    TensorDensities,
)
from dct_plugin.data_parallel.step_units import units_of


def measured(lengths: dict[str, tuple[int, float]], *, skipped: bool = False) -> TensorDensities:
    """Densities after the first interval, in which every measurement was the same."""
    densities = TensorDensities()
    numels, values = zip(*lengths.values(), strict=True)
    for step in range(INTERVAL - MIN_MEASUREMENTS + 1, INTERVAL + 1):
        densities.measure(list(lengths), numels, torch.tensor(values))
        densities.end_step(step, skipped=skipped)
    return densities


def test_densities_follow_the_lengths_and_keep_their_sum() -> None:
    densities = measured({"a": (1000, 3.0), "b": (3000, 1.0)})
    found = densities.density("a", 0.01), densities.density("b", 0.01)
    assert found == (pytest.approx(0.02), pytest.approx(0.01 * 2 / 3))
    assert 1000 * found[0] + 3000 * found[1] == pytest.approx(4000 * 0.01)


def test_shares_are_limited_and_keep_their_sum() -> None:
    densities = measured({"a": (1000, 1e6), "b": (9000, 1.0)})
    a, b = densities.density("a", 0.01), densities.density("b", 0.01)
    assert 1000 * a + 9000 * b == pytest.approx(10_000 * 0.01)
    assert a / b == pytest.approx(LENGTH_LIMITS[1] / LENGTH_LIMITS[0])


@pytest.mark.parametrize("density", [1.0, 0.5, 1.01 * MAX_DENSITY])
def test_dense_steps_and_the_start_are_left_alone(density: float) -> None:
    assert measured({"a": (1000, 3.0), "b": (3000, 1.0)}).density("a", density) == density


def test_unknown_tensors_steps_taken_back_and_lengths_that_are_no_numbers() -> None:
    assert measured({"a": (1000, 3.0), "b": (3000, 1.0)}).density("c", 0.01) == 0.01
    assert measured({"a": (1000, 3.0), "b": (3000, 1.0)}, skipped=True).density("a", 0.01) == 0.01
    assert measured({"a": (10, float("nan")), "b": (10, 0.0), "c": (10, 2.0)}).density("c", 0.01) == 0.01


def test_a_state_that_is_loaded_gives_the_same_densities() -> None:
    densities, resumed = measured({"a": (1000, 3.0), "b": (3000, 1.0)}), TensorDensities()
    resumed.load_state_dict(densities.state_dict())
    assert resumed.density("a", 0.01) == densities.density("a", 0.01) != 0.01
    resumed.load_state_dict({})
    assert resumed.density("a", 0.01) == 0.01


def _train(rank: int, world_size: int) -> tuple[Any, Any, torch.Tensor]:
    """Two tensors: what ranks have of the first is the same, of the second noise."""
    with mock.patch.object(step_ahead, "BY_COMPRESSORS", (SimpleNamespace(most=1),)):
        reducer = GradientReducer(DataParallelConfig(sparsity=0.95, feedback="step_ahead", min_numel=100))
    weights = {name: nn.Parameter(torch.zeros(60, 50)) for name in ("drift", "noise")}
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    add_on = reducer.add_ons.step_ahead
    add_on.prepare(weights.items(), units_of(optimizer))
    generator = torch.Generator().manual_seed(rank)
    drift = torch.randn(3000, generator=torch.Generator().manual_seed(7))
    found = {}
    for step in range(2 * INTERVAL + 1):
        entries = [("drift", drift.clone()), ("noise", torch.randn(3000, generator=generator))]
        reducer.all_reduce(entries, scale=1 / world_size)
        for (_, gradient), weight in zip(entries, weights.values(), strict=True):
            weight.grad = gradient.view_as(weight)
        optimizer.step()
        reducer.end_step(skipped=step == 5)
        found = {name: reducer.sparsity(name).density for name in weights}
    state = reducer.state_dict()["ahead"]["densities"]
    return found, state, torch.cat([weight.detach().view(-1) for weight in weights.values()])


@pytest.mark.slow
def test_ranks_agree_on_densities_and_stay_bitwise_equal() -> None:
    (first, state, weights), *others = run(2, _train)
    assert first["drift"] > 0.05 > first["noise"] > 0.0
    assert first["drift"] + first["noise"] == pytest.approx(2 * 0.05)
    for densities, other_state, other_weights in others:
        assert (densities, other_state) == (first, state)
        assert torch.equal(weights, other_weights)
