"""The study of many compressors in one process: its threads get the bits of real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"
STEPS, WIDTH, SEQUENCE, SYMBOLS = 12, 16, 8, 95

#: gloo adds more than two ranks up in another order. So four and eight ranks begin without dense steps, and
#: measure nothing; what they send in messages is added up in the order of the ranks.
EXACT = {"warmup_steps": 0, "sparsity_warmup_steps": 3, "expert": {"step_ahead_coefficient": 0.5}}
START = {"warmup_steps": 2, "sparsity_warmup_steps": 3}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2 ranks, two-phase": (2, 1, {"exchange": "two_phase", "value_dtype": "int4", **START}),
    "2 ranks, updates": (2, 1, {"parameters": {"sparsity": 0.8}, **START}),
    "4 ranks, direct": (4, 1, {"exchange": "direct", **EXACT}),
    "4 ranks, two-phase": (4, 1, {"exchange": "two_phase", **EXACT}),
    "2 nodes of 2 ranks": (4, 2, START),
    "8 ranks, two-phase": (8, 1, {"exchange": "two_phase", "value_dtype": "int4", **EXACT}),
}


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STUDIES)


def _train(rank: int, per_node: int, section: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The weights of a rank after some steps, and the bytes that it sent."""
    from adam import model_of
    from many_streams import Rank
    from torch.nn import functional

    common = {"feedback": "step_ahead", "sparsity": 0.9, "min_numel": 100}
    worker = Rank(model_of(0, WIDTH, 1, SEQUENCE), {**common, **section}, per_node)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randint(SYMBOLS, (2, SEQUENCE), generator=generator)
        worker.step(lambda model, x=x: functional.cross_entropy(model(x).view(-1, SYMBOLS), x.view(-1)), 0.01)
    worker.ahead.detach()
    weights = torch.cat([parameter.detach().view(-1) for parameter in worker.named.values()])
    return weights, worker.metrics.summary().sent_bytes


def _in_processes(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    sys.path.insert(0, str(STUDIES))
    return {name: _train(rank, *CASES[name][1:]) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8])
def test_threads_get_the_bits_of_processes(count: int, studies: None) -> None:
    import one_process

    names = [name for name, (ranks, *_) in CASES.items() if ranks == count]
    expected = run(count, _in_processes, names)
    for name in names:
        _, per_node, section = CASES[name]
        found = one_process.run(count, lambda rank, n=per_node, s=section: _train(rank, n, s))
        for (weights, sent), real in zip(found, expected, strict=True):
            assert torch.equal(weights, real[name][0]), name
            assert sent == real[name][1], name
            assert torch.equal(weights, found[0][0]), name


def test_an_error_of_one_rank_ends_all(studies: None) -> None:
    import one_process

    def fails(rank: int) -> list[Any]:
        if rank == 1:
            raise ValueError("no data")
        return one_process.gather(rank)

    with pytest.raises(ValueError, match="no data"):
        one_process.run(3, fails)
    assert one_process.run(3, one_process.gather) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_with_different_data_are_told(
    differ: bool, studies: None, caplog: pytest.LogCaptureFixture
) -> None:
    import one_process
    from many_streams import Rank

    def train(rank: int) -> float:
        section = {"feedback": "step_ahead", "sparsity": 0.9, "min_numel": 100, "warmup_steps": 0}
        torch.manual_seed(0)
        worker = Rank(torch.nn.Linear(32, 32, bias=False), section)
        generator, drift = torch.Generator().manual_seed(rank), -0.5 if differ and rank else 0.5
        for _ in range(60):  # gradients are noise and a drift, which has the same sign on all ranks or not
            gradient = torch.randn(32, 32, generator=generator) + drift
            worker.step(lambda model, g=gradient: (model(torch.eye(32)) * g).sum(), 0.01)
        worker.ahead.detach()
        return worker.ahead.coefficients.agreement()

    agreement = one_process.run(2, train)[0]
    lines = [line for line in caplog.messages if "their data are of different kinds" in line]
    assert len(lines) == differ, (agreement, lines)
