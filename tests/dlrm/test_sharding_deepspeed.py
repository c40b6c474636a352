"""Sharded tables in DeepSpeed engines (one job of two ranks), and the optimizer for tables and MLPs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("deepspeed")
from support import SUPPORT
from support.deepspeed_launch import run_script

from dct_plugin.data_parallel.step_units import StepUnit, units_of
from dct_plugin.integrations.dlrm.optimizers import HybridOptimizer

pytestmark = pytest.mark.slow

WORKER = SUPPORT / "sharding_worker.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharding")
    run_script(2, WORKER, folder, str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "name",
    ["0 rowwise sparse", "0 sgd sparse", "0 adam", "1 rowwise", "1 adam", "1 adagrad, all on one rank"],
)
def test_engine_trains_the_unsharded_model(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert result[name] < 1e-5


@pytest.mark.parametrize("name", ["0 resumed", "0 resumed adam", "1 resumed", "1 resumed adam"])
def test_a_checkpoint_goes_on_bitwise(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert result[name] is True


@pytest.mark.parametrize("stage", [0, 1])
def test_the_channel_counts_the_engines_steps(results: list[dict[str, Any]], stage: int) -> None:
    for result in results:
        assert result[f"{stage} steps"] == [0, 1, 1, 2, 2, 3]


# -- the optimizer ---


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("method", "reference"),
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adagrad", torch.optim.Adagrad)],
)
def test_updates_are_those_of_torch(method: str, reference: Any, sparse: bool) -> None:
    torch.manual_seed(0)
    mine, theirs = nn.Parameter(torch.randn(20, 4)), nn.Parameter(torch.empty(20, 4))
    theirs.data.copy_(mine.data)
    if method == "adam" and sparse:
        reference = torch.optim.SparseAdam
    ours = HybridOptimizer([mine], method=method, lr=0.1)
    other = reference([theirs], lr=0.1)
    for _ in range(5):
        ids = torch.randint(0, 20, (7,))
        for weight, optimizer in ((mine, ours), (theirs, other)):
            optimizer.zero_grad()
            functional.embedding(ids, weight, sparse=sparse).square().sum().backward()
            optimizer.step()
    assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_rowwise_adagrad_keeps_one_number_per_row_however_it_is_given() -> None:
    torch.manual_seed(0)
    start = torch.randn(20, 3)
    flat = nn.Parameter(torch.cat([start.reshape(-1), torch.zeros(1)]))  # padded, as ZeRO does
    table, lazy, sums, expected = (
        nn.Parameter(start.clone()),
        nn.Parameter(start.clone()),
        torch.zeros(20),
        start.clone(),
    )
    settings = {"method": "rowwise_adagrad", "lr": 0.1}
    optimizers = [HybridOptimizer([table], **settings), HybridOptimizer([lazy], **settings)]
    optimizers.append(HybridOptimizer([{"params": [flat], "width": 3}], **settings))
    for _ in range(4):
        ids = torch.randint(0, 20, (9,))
        for weight, sparse in ((table, False), (lazy, True)):
            weight.grad = None
            functional.embedding(ids, weight, sparse=sparse).pow(3).sum().backward()
        gradient = table.grad
        assert gradient is not None
        flat.grad = torch.cat([gradient.reshape(-1), torch.zeros(1)])
        sums += gradient.square().mean(dim=1)
        expected -= 0.1 * gradient / (sums.sqrt() + 1e-10).unsqueeze(1)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(table, expected, atol=1e-6)
    assert torch.allclose(lazy, expected, atol=1e-6)
    assert torch.allclose(flat[:-1].view(20, 3), expected, atol=1e-6)
    assert optimizers[0].state[table]["sum"].shape == (20,)


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="method is 'lamb'; allowed: sgd, adam, adagrad, rowwise_adagrad"):
        HybridOptimizer([nn.Parameter(torch.zeros(2))], method="lamb")
    flat = nn.Parameter(torch.zeros(6))
    flat.grad = torch.zeros(6)
    with pytest.raises(ValueError, match="width"):
        HybridOptimizer([flat], method="rowwise_adagrad").step()


def test_step_ahead_knows_the_unit_of_every_method() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    methods = ("sgd", "adam", "adagrad", "rowwise_adagrad")
    groups = [{"params": [w], "method": m, "width": 2} for w, m in zip(weights, methods, strict=True)]
    optimizer = HybridOptimizer(groups, lr=0.5, betas=(0.9, 0.98))
    found = [units_of(optimizer)(weight) for weight in weights]
    sums = StepUnit(0.5, True, None, 1e-10)
    assert found == [StepUnit(0.5), StepUnit(0.5, True, 0.98, 1e-8), sums, sums]
