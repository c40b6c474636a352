"""Step-ahead's Triton kernels beside plain torch: squares of gradients, displaced weights, and launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from support.launches import counted_launches
from support.processes import run

from dct_plugin.compression.feedback import ScratchBuffers
from dct_plugin.data_parallel.nodes.ranks import NodeRanks
from dct_plugin.data_parallel.step_ahead.add_on import StepAhead, Unsent
from dct_plugin.data_parallel.step_ahead.second_moments import Moments, SecondMoments, _add_steps, sizes
from dct_plugin.data_parallel.step_units import StepUnit, units_of
from dct_plugin.kernels import Backend
from dct_plugin.kernels.cpu import CpuBackend
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import TritonBackend
from dct_plugin.transport.nodes import Nodes

BACKENDS: list[Callable[[], Backend]] = [ReferenceBackend, TritonBackend]
#: A vector, a column, matrices with and without whole tiles, four dimensions, a scalar, nothing.
SHAPES = [(300,), (7, 1), (70, 130), (600, 5), (8, 3, 3, 3), (), (0, 4)]


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {str(shape): torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES}


def fresh(shape: torch.Size) -> Moments:
    return Moments(shape, torch.zeros(2, sum(sizes(shape))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_of_gradients(dtype: torch.dtype) -> None:
    named, found = parameters(dtype), []
    for backend in BACKENDS:
        moments = SecondMoments(named, lambda _: StepUnit(1.0, True, 0.9))
        for step in range(3):
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * step + micro)
                gradients = [
                    (name, torch.randn(p.numel(), generator=generator).to(dtype)) for name, p in named.items()
                ]
                moments.observe(gradients, backend(), ScratchBuffers())
            moments.end_step(skipped=step == 1)
        found.append(moments.state_dict())
    assert found[0].keys() == found[1].keys() == {name for name, p in named.items() if p.numel()}
    for one, other in zip(*(each.values() for each in found), strict=True):
        for key in ("rows", "columns"):
            torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=0)
        assert one["steps"] == other["steps"] == 2


def test_the_last_bits_of_a_step_do_not_depend_on_the_other_tensors() -> None:
    """Moments that share memory are, on a CPU, bitwise those of tensors alone."""
    named = parameters()
    together, alone = SecondMoments(named, lambda _: StepUnit(1.0, True, 0.95)), {}
    for step in range(4):
        for name, parameter in named.items():
            gradient = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(step))
            if step == 2 and parameter.numel():
                gradient[0] = torch.inf
            together.observe([(name, gradient)], ReferenceBackend(), ScratchBuffers())
            if parameter.numel():
                moments = alone.setdefault(name, fresh(parameter.shape))
                ReferenceBackend().add_squares([moments.squares(gradient)])
        together.end_step(skipped=False)
        for moments in alone.values():
            _add_steps(moments.memory, [moments], 0.95)
            moments.memory[1].zero_()
    for name, saved in together.state_dict().items():
        assert torch.equal(saved["rows"], alone[name].rows)
        assert torch.equal(saved["columns"], alone[name].columns)


def _displaced(backend: Backend, dtype: torch.dtype, optimizer: Callable[..., Any]) -> list[Tensor]:
    """Return the weights of a training pass; the residual of one parameter is None."""
    named = parameters(dtype)
    residuals: dict[str, Tensor | None] = {n: 3 * torch.randn(p.numel()) for n, p in named.items()}
    residuals["(600, 5)"] = None
    ahead = StepAhead(
        named.items(),
        units_of(optimizer(named.values(), lr=0.1)),
        Unsent(residuals.get, lasting=True),
        world_size=2,
        kernels=backend,
    )
    ahead.observe([(name, torch.randn(p.numel())) for name, p in named.items()])
    ahead.end_step(skipped=False)
    ahead.displace()
    shown = [parameter.detach().clone() for parameter in named.values()]
    ahead.restore()
    return shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_displaced_weights(dtype: torch.dtype, optimizer: Callable[..., Any]) -> None:
    one, other = (_displaced(backend(), dtype, optimizer) for backend in BACKENDS)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for expected, found in zip(one, other, strict=True):
        torch.testing.assert_close(expected, found, rtol=tolerance, atol=1e-6)
    assert torch.equal(other[3], parameters(dtype)["(600, 5)"])


def test_the_number_of_launches_does_not_depend_on_the_number_of_tensors() -> None:
    with counted_launches() as names:
        _displaced(TritonBackend(), torch.float32, torch.optim.AdamW)
    assert names == ["partial_sums", "add_partial_sums", "mean_rows", "displace"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_of_gradients_add_up_to_the_whole(dtype: torch.dtype) -> None:
    """Parts of all ranks of a node, which begin anywhere in a row; several tiles, and a column."""
    named = {"matrix": torch.zeros(1100, 300), **parameters()}
    for name, parameter in named.items():
        gradient = torch.randn(numel := parameter.numel()).to(dtype)
        whole, plain, compiled, triton = [fresh(parameter.shape) for _ in range(4)]
        ReferenceBackend().add_squares([whole.squares(gradient)])
        bounds = [*itertools.pairwise((0, numel // 3, numel // 2 + 1, numel))] if numel > 1 else [(0, numel)]
        for moments, make in ((plain, ReferenceBackend), (compiled, CpuBackend), (triton, TritonBackend)):
            make().add_squares([moments.squares(gradient[slice(*part)], part[0]) for part in bounds if numel])
        assert torch.equal(plain.memory, compiled.memory)
        if numel:
            torch.testing.assert_close(whole.memory, plain.memory, rtol=1e-5, atol=0, msg=name)
            torch.testing.assert_close(whole.memory, triton.memory, rtol=1e-5, atol=0, msg=name)


def _observe_in_a_node(rank: int, world_size: int) -> tuple[list[str], dict[str, Any]]:
    """Observe a rank's parts of the gradients of a node, of which all ranks have the same ones."""
    node = NodeRanks(Nodes((tuple(range(world_size)),), rank), torch.device("cpu"), 100, None)
    named = {name: p for name, p in parameters().items() if node.is_divided(p.numel())}  # others are dense
    moments = SecondMoments(named, lambda _: StepUnit(1.0, True), node)
    generator = torch.Generator().manual_seed(3)
    gradients = [(name, torch.randn(p.numel(), generator=generator)) for name, p in named.items()]
    with counted_launches() as names:
        moments.observe(node.means(gradients), TritonBackend(), ScratchBuffers())
    moments.end_step(skipped=False)
    return names, moments.state_dict()


@pytest.mark.slow
def test_ranks_of_a_node_observe_their_parts_with_as_many_launches_as_whole_gradients() -> None:
    (alone, expected), *_ = run(1, _observe_in_a_node)
    for names, found in run(2, _observe_in_a_node):
        assert names == alone == ["partial_sums", "add_partial_sums"]
        for name in found:
            for key in ("rows", "columns"):
                torch.testing.assert_close(found[name][key], expected[name][key], rtol=1e-5, atol=0)


def test_many_rows_and_columns() -> None:
    """Several tiles in both directions, and a vector of more than one tile."""
    named = {
        "matrix": torch.nn.Parameter(torch.zeros(1100, 300)),
        "vector": torch.nn.Parameter(torch.zeros(70_001)),
    }
    gradients = [(name, torch.randn(p.numel())) for name, p in named.items()]
    moments = SecondMoments(named, lambda _: StepUnit(1.0, True))
    moments.observe(gradients, TritonBackend(), ScratchBuffers())
    moments.end_step(skipped=False)
    squares = gradients[0][1].view(1100, 300).square()
    found = moments.state_dict()
    torch.testing.assert_close(found["matrix"]["rows"], squares.mean(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["matrix"]["columns"], squares.mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["vector"]["rows"], gradients[1][1].square().mean().view(1))
