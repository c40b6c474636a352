"""Gradients of every kind, and other numbers of ranks: nothing is lost."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run
from support.state_files import save_state
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_plugin import DCTState, checkpoint, dct_hook
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer

SIZES = {"weight": 20_000, "rare": 6_000, "small": 10, "empty": 0}
STEPS = 24


def gradient(kind: str, name: str, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(name))
    values = torch.randn(SIZES[name], generator=generator)
    if kind == "zero" and step > 2:
        return torch.zeros(SIZES[name])
    return values * {"denormal": 1e-41, "huge": 1e30, "normal": 1.0, "zero": 1.0, "rare": 1.0}[kind]


def _sums(rank: int, world_size: int, kind: str, exchange: str) -> dict[str, Any]:
    """What was put in, what arrived, what is left; ``rare`` comes every third step only (frozen, unused)."""
    reducer = GradientReducer(
        DataParallelConfig(sparsity=0.95, exchange=exchange, value_dtype="bf16", min_numel=1000)
    )
    put_in = {name: torch.zeros(numel, dtype=torch.float64) for name, numel in SIZES.items()}
    arrived = {name: torch.zeros(numel, dtype=torch.float64) for name, numel in SIZES.items()}
    for step in range(STEPS):
        names = [name for name in SIZES if name != "rare" or step % 3 == 0]
        entries = [(name, gradient(kind, name, step, rank)) for name in names]
        for name, tensor in entries:
            put_in[name] += tensor.double()
        reducer.all_reduce(entries)
        for name, tensor in entries:
            arrived[name] += tensor.double()
        reducer.end_step()
    left = {name: s["residual"] for name, s in reducer.state_dict()["streams"].items()}
    assert all(bool(residual.isfinite().all()) for residual in left.values())
    return {"put in": put_in, "arrived": arrived, "left": left}


def left_of(name: str, numel: int, left: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Sum the residuals of a tensor, in the streams of all ranks and of owners: fp64 [numel]."""
    total = torch.zeros(numel, dtype=torch.float64)
    for streams in left:
        for stream, residual in streams.items():
            if stream == name:
                total += residual.double()
            elif stream.startswith(f"{name}["):
                start, stop = map(int, stream[len(name) + 1 : -1].split(":"))
                total[start:stop] += residual.double()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
@pytest.mark.parametrize("kind", ["normal", "zero", "denormal", "huge"])
def test_what_was_put_in_arrives_or_is_left(kind: str, exchange: str) -> None:
    results = run(2, _sums, kind, exchange)
    for name, numel in SIZES.items():
        given = sum(result["put in"][name] for result in results)
        for result in results:
            assert torch.equal(result["arrived"][name], results[0]["arrived"][name])
        left = left_of(name, numel, [result["left"] for result in results])
        if numel:
            error = (given - results[0]["arrived"][name] - left).abs().max()
            assert error <= 1e-5 * given.abs().max() + 1e-40


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare, self.late = (nn.Linear(50, 40) for _ in range(3))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        y: torch.Tensor = self.always(x) + self.late(x)
        return y + self.rare(x) if rare else y


def _changes_under_way(rank: int, world_size: int, keys: dict[str, Any], views: bool) -> dict[str, Any]:
    """A layer that rank 1 uses every other step, or no rank in the second half, one that is frozen at first
    and in the end, an empty parameter, and one or three passes in a step: what was put in, what arrived, what
    is left.
    """
    torch.manual_seed(0)
    model = _Branches()
    section = {"data_parallel": {"sparsity": 0.95, "min_numel": 100, **keys}}
    state = DCTState(section, named_parameters=model.named_parameters())
    put_in = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    arrived = {name: tensor.clone() for name, tensor in put_in.items()}
    for phase, frozen in enumerate((True, False, True)):
        model.late.requires_grad_(not frozen)
        ddp = DistributedDataParallel(
            model, find_unused_parameters=True, gradient_as_bucket_view=views and phase != 1
        )
        ddp.register_comm_hook(state, dct_hook)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for step in range(6):
            rare, passes = rank == 0 or step % 2 == 0, 1 if step < 3 else 3
            rare &= step < 4  # from then on DDP drops what would arrive there
            model.zero_grad(set_to_none=phase != 1)
            for micro in range(passes):
                seed = 1000 * rank + 100 * phase + 10 * step + micro
                x = torch.randn(8, 50, generator=torch.Generator().manual_seed(seed))
                own = torch.autograd.grad(
                    model(x, rare).square().mean(), list(trained.values()), allow_unused=True
                )
                for name, gradient in zip(trained, own, strict=True):
                    put_in[name] += 0.0 if gradient is None else gradient.double()
                with ddp.no_sync() if micro + 1 < passes else contextlib.nullcontext():
                    ddp(x, rare).square().mean().backward()
            for name, p in trained.items():
                arrived[name] += 0.0 if p.grad is None else p.grad.double() * world_size
    streams = state.state_dict()["reducer"]["streams"]
    return {"put in": put_in, "arrived": arrived, "left": {n: s["residual"] for n, s in streams.items()}}


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "views"), [({}, False), ({"exchange": "two_phase"}, True)])
def test_what_changes_under_way_in_ddp(keys: dict[str, Any], views: bool) -> None:
    results = run(2, _changes_under_way, keys, views)
    assert any(results[0]["left"]["late.weight"] != 0.0)
    for name, arrived in results[0]["arrived"].items():
        assert torch.equal(arrived, results[1]["arrived"][name])
        given = sum(result["put in"][name] for result in results)
        given -= left_of(name, arrived.numel(), [result["left"] for result in results]).view(arrived.shape)
        torch.testing.assert_close(arrived, given, rtol=0, atol=1e-6)


@pytest.mark.parametrize("path", [(2, 4, 2), (4, 1, 3), (1, 3, 2)])
def test_other_numbers_of_ranks_keep_residuals(tmp_path: Path, path: tuple[int, ...]) -> None:
    """The mean over the ranks, to 1e-6 relative."""
    generator = torch.Generator().manual_seed(0)
    threshold = {"tau": 0.5, "step": 7, "age": 1, "refreshes": 3, "density": 0.1, "out_of_band": False}
    states = [
        {
            "step": 7,
            "loss_scale": 1.0,
            "streams": {
                "w": {
                    "threshold": threshold,
                    "residual": torch.randn(5000, generator=generator),
                    "shape": None,
                }
            },
        }
        for _ in range(path[0])
    ]

    def unsent() -> torch.Tensor:
        return sum(s["streams"]["w"]["residual"].double() for s in states) / len(states)  # type: ignore

    before = unsent()
    for number, ranks in enumerate(path[1:]):
        folder = tmp_path / str(number)
        for rank, state in enumerate(states):
            save_state(folder, state, rank=rank, world_size=len(states))
        states = [checkpoint.StateFiles(rank, ranks).read(folder).state for rank in range(ranks)]
    assert ((unsent() - before).norm() / before.norm()).item() < 1e-6
