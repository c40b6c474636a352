"""Sharded tables in DeepSpeed engines (one job of two ranks), and the optimizer for tables and MLPs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import binary_cross_entropy_with_logits

pytest.importorskip("deepspeed")
import deepspeed
from deepspeed import comm as dist
from support.deepspeed_launch import run_ranks

from dct_plugin.config import EmbeddingChannelConfig
from dct_plugin.data_parallel.step_units import StepUnit, units_of
from dct_plugin.embedding import ShardedTables
from dct_plugin.errors import ConfigError
from dct_plugin.integrations.dlrm.experts import Experts
from dct_plugin.integrations.dlrm.optimizers import HybridOptimizer, hybrid_groups
from dct_plugin.recommender.models import DLRM

pytestmark = pytest.mark.slow

CARDINALITIES = (3, 50, 40, 7, 21)
DIM = 5  # odd, so that flat vectors end in padding
BATCH = 16
MLP = {"num_dense": 4, "embedding_dim": DIM, "bottom": (8,), "top": (8,), "seed": 1}


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    dense = torch.randn(BATCH, 4, generator=generator)
    ids = [(torch.rand(BATCH, generator=generator) ** 2 * rows).to(torch.int64) for rows in CARDINALITIES]
    return dense, torch.stack(ids, dim=1), torch.randint(0, 2, (BATCH,), generator=generator).float()


def engine_for(stage: int, optimizer: dict[str, Any] | None, method: str | None, **options: Any) -> Any:
    torch.manual_seed(2)
    channel = EmbeddingChannelConfig.of(options.pop("channel", {}))
    accumulation = options.pop("accumulation", 1)
    tables = ShardedTables(CARDINALITIES, DIM, config=channel, average_gradients=False, **options)
    model = Experts(DLRM(cardinalities=CARDINALITIES, tables=tables, **MLP))
    client = None
    if method is not None:
        settings = {"method": method, "lr": 0.05}
        client = HybridOptimizer(hybrid_groups(model, tables=settings, rest={"method": "adam", "lr": 0.01}))
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if optimizer is not None:
        config["optimizer"] = optimizer
    parameters = list(model.parameters()) if client is None else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=client, model_parameters=parameters, config=config
    )
    model.follow(engine.optimizer)
    return engine


def train(engine: Any, first: int, last: int) -> None:
    rank, share = dist.get_rank(), BATCH // dist.get_world_size()
    mine = slice(rank * share, (rank + 1) * share)
    for step in range(first, last):
        dense, ids, label = batch(step)
        loss = binary_cross_entropy_with_logits(engine(dense[mine], ids[mine]), label[mine])
        engine.backward(loss)
        engine.step()


def tables_of(engine: Any) -> ShardedTables:
    return engine.module.model.tables


def whole_model(engine: Any) -> dict[str, Tensor]:
    """Weights of the unsharded model, on every rank."""
    gathered: list[Any] = [tables_of(engine).gather_tables()]
    torch.distributed.broadcast_object_list(gathered, src=0)
    state = {k: v.clone() for k, v in engine.module.model.state_dict().items() if "tables" not in k}
    state["tables.weight"] = torch.cat(gathered[0]["tables"])
    return state


def on_one_rank(start: dict[str, Tensor], steps: int, method: str) -> dict[str, Tensor]:
    model = DLRM(cardinalities=CARDINALITIES, **MLP)
    model.load_state_dict(start)
    rest = [p for name, p in model.named_parameters() if "tables" not in name]
    optimizer = HybridOptimizer(
        [
            {"params": [model.tables.weight], "method": method, "lr": 0.05},
            {"params": rest, "method": "adam", "lr": 0.01},
        ]
    )
    for step in range(steps):
        dense, ids, label = batch(step)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(dense, ids), label).backward()
        optimizer.step()
    return {k: v.detach() for k, v in model.state_dict().items()}


def same_as_one_rank(stage: int, method: str, **options: Any) -> float:
    """Largest difference of a weight after some steps."""
    engine = engine_for(stage, None, method, **options)
    start = whole_model(engine)
    train(engine, 0, 4)
    expected, found = on_one_rank(start, 4, method), whole_model(engine)
    assert expected.keys() == found.keys()
    moved = min(float((start[k] - found[k]).abs().max()) for k in found)
    assert moved > 1e-4, "a weight was not trained"
    engine.destroy()
    return max(float((expected[k] - found[k]).abs().max()) for k in found)


def resumed(stage: int, method: str | None, folder: Path, **options: Any) -> bool:
    """Whether a run that was saved and loaded goes on bitwise, thresholds included."""
    optimizer = None if method is not None else {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    tag = f"{stage}-{method}"
    engine = engine_for(stage, optimizer, method, **options)
    train(engine, 0, 3)
    engine.save_checkpoint(str(folder), tag=tag)
    train(engine, 3, 5)
    straight = {k: v.clone() for k, v in engine.module.state_dict().items()}
    engine.destroy()
    engine = engine_for(stage, optimizer, method, **options)
    path, _ = engine.load_checkpoint(str(folder), tag=tag)
    assert path is not None
    assert int(tables_of(engine).embedding_exchange.steps) == 3
    train(engine, 3, 5)
    state = engine.module.state_dict()
    engine.destroy()
    assert any(key.endswith("embedding_exchange.tau") for key in state)
    return all(torch.equal(straight[k], state[k]) for k in straight)


def counted(stage: int, method: str) -> list[int]:
    """The steps of the exchange of vectors after each of six micro-batches, two to a step."""
    lossy = {"sparsity": 0.5}
    engine = engine_for(stage, None, method, channel=lossy, accumulation=2)
    channel, steps = tables_of(engine).embedding_exchange, []
    for micro_batch in range(6):
        train(engine, micro_batch, micro_batch + 1)
        steps.append(int(channel.steps))
    assert steps[-1] == engine.global_steps
    engine.destroy()
    return steps


def _results(path: str) -> dict[str, Any]:
    folder = Path(path)
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    results: dict[str, Any] = {}
    lossy = {"channel": {"sparsity": 0.5, "error_bound": 0.01, "gradient_bound": 0.1}}
    for name, task in {
        "0 rowwise sparse": lambda: same_as_one_rank(0, "rowwise_adagrad", sparse=True),
        "0 sgd sparse": lambda: same_as_one_rank(0, "sgd", sparse=True),
        "0 adam": lambda: same_as_one_rank(0, "adam"),
        "1 rowwise": lambda: same_as_one_rank(1, "rowwise_adagrad"),
        "1 adam": lambda: same_as_one_rank(1, "adam"),
        "1 adagrad, all on one rank": lambda: same_as_one_rank(1, "adagrad", placement=[[], [0, 1, 2, 3, 4]]),
        "0 resumed": lambda: resumed(0, "rowwise_adagrad", folder, sparse=True, **lossy),
        "0 resumed adam": lambda: resumed(0, None, folder, **lossy),
        "1 resumed": lambda: resumed(1, "rowwise_adagrad", folder, **lossy),
        "1 resumed adam": lambda: resumed(1, None, folder, placement=[[0, 1, 2, 3, 4], []], **lossy),
        "0 steps": lambda: counted(0, "adam"),
        "1 steps": lambda: counted(1, "rowwise_adagrad"),
    }.items():
        results[name] = task()
        gc.collect()
    return results


def _without_experts() -> str:
    deepspeed.init_distributed(dist_backend="gloo")
    equal = (30, 30)  # shards of one shape, which DeepSpeed takes for copies
    model = DLRM(cardinalities=equal, tables=ShardedTables(equal, DIM, average_gradients=False), **MLP)
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "dct": {"data_parallel": {}},
    }
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_tables_that_deepspeed_would_average_are_refused(tmp_path: Path) -> None:
    for rank, error in enumerate(run_ranks(2, _without_experts, tmp_path)):
        assert error.startswith(f"rank {rank}: dct does not support ShardedTables that DeepSpeed averages")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharding")
    return run_ranks(2, _results, folder, str(folder))


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
