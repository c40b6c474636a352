"""What a reducer asks of its add-ons, and that it needs none of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import add_on_of
from support.processes import run
from torch import Tensor

from dct_plugin.checkpoint import in_unit
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer, Shard, add_ons
from dct_plugin.data_parallel.accordion import Accordion
from dct_plugin.data_parallel.add_on import AddOn, ReducerContext
from dct_plugin.data_parallel.plan import ReductionPlan, Sparsity
from dct_plugin.errors import ConfigError
from dct_plugin.kernels.cpu import CpuBackend

pytestmark = pytest.mark.slow


class Recorder(AddOn):
    """Notes every call, and sends a quarter of one tensor."""

    key, option = "recorder", "sparsity"

    def __init__(self) -> None:
        self.calls: list[str] = []

    @classmethod
    def configured(cls, context: ReducerContext) -> Recorder:
        return cls()

    def before_compression(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        self.calls.append("observe " + " ".join(name for name, tensor in entries if tensor.any()))

    def compared(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name == "b"]

    def sparsity(self, name: str, otherwise: Sparsity) -> Sparsity:
        return Sparsity(0.25) if name == "a" else otherwise

    def before_reduce(self, plan: ReductionPlan) -> None:
        self.calls.append(f"before {plan.operation} {plan.compared}")

    def after_reduce(self, plan: ReductionPlan) -> None:
        held = [plan.parts_held(each, 1) for each in plan.tensors]
        self.calls.append(f"after {held}")

    def end_step(self, *, skipped: bool) -> None:
        self.calls.append(f"end {skipped}")

    def rescale(self, factor: float) -> None:
        self.calls.append(f"rescale {factor}")

    def state_dict(self) -> Any:
        return len(self.calls)

    @staticmethod
    def in_unit(state: Any, ratio: float) -> Any:
        return state if ratio == 1.0 else f"{state} times {ratio:g}"

    def load_state_dict(self, state: Any, *, step: int) -> None:
        self.calls.append(f"load {state} {step}")


def _recorded(rank: int, world_size: int) -> tuple[list[str], float]:
    with patch.object(add_ons, "ADD_ONS", (Recorder,)):
        reducer = GradientReducer(DataParallelConfig(sparsity=0.5, min_numel=1))
    a, b = torch.ones(1000), torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    reducer.all_reduce([("a", a), ("b", b)])
    reducer.reduce_scatter([("c", torch.ones(10), [Shard(0, 0, 5), Shard(1, 5, 10)])])
    reducer.end_step(loss_scale=2.0)
    reducer.load_state_dict(reducer.state_dict())
    reducer.load_state_dict(in_unit(reducer.state_dict(), 0.25), loss_scale=16.0)  # it was 2
    return add_on_of(reducer, Recorder).calls, float((a != 0).float().mean())


def test_an_add_on_sees_every_reduction() -> None:
    for calls, kept in run(2, _recorded):
        assert calls == [
            "observe a b",
            "before direct ['b']",
            "after [[(0, 1000)], [(0, 1000)]]",
            "observe c",
            "before reduce_scatter []",
            "after [[(5, 10)]]",
            "end False",
            "rescale 2.0",
            "load 8 1",
            "load 9 times 2 1",
        ]
        # All entries are equal: a threshold keeps what the capacity allows.
        assert 0.25 <= kept <= 0.75


def _without(rank: int, world_size: int, features: bool) -> Tensor:
    rows = add_ons.ADD_ONS if features else ()
    with patch.object(add_ons, "ADD_ONS", rows):
        reducer = GradientReducer(DataParallelConfig(sparsity=0.9, min_numel=1))
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        reducer.all_reduce([("a", gradient)])
        reducer.end_step()
    return gradient


def test_a_reducer_without_add_ons_is_one_that_asks_for_none() -> None:
    with_rows, without = run(2, _without, True), run(2, _without, False)
    assert all(torch.equal(one, two) for one, two in zip(with_rows, without, strict=True))


def test_a_feature_is_one_row_of_the_table() -> None:
    rest = tuple(kind for kind in add_ons.ADD_ONS if kind is not Accordion)
    assert len(rest) == len(add_ons.ADD_ONS) - 1
    assert len({kind.key for kind in rest}) == len(rest)


def _with_few_value_types(rank: int, world_size: int) -> str:
    with patch.object(CpuBackend, "value_dtypes", (ValueDtype.FP32,)):
        GradientReducer(DataParallelConfig(value_dtype="fp32"))
        with pytest.raises(ConfigError) as error:
            GradientReducer(DataParallelConfig(value_dtype="bf16"))
    return str(error.value)


def test_a_value_type_that_the_kernels_do_not_write_is_refused() -> None:
    for message in run(2, _with_few_value_types):
        assert "dct.data_parallel.value_dtype = 'bf16'" in message
        assert "(cpu) do not write it" in message
