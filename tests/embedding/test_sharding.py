"""Sharded tables against the same model on one rank: forward, gradients, layers, state."""

from __future__ import annotations

import copy
import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.processes import launch, logged, run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import dct_plugin
from dct_plugin.config import EmbeddingChannelConfig, KernelConfig, MetricsConfig
from dct_plugin.embedding import Bags, ShardedTables, load_tables
from dct_plugin.integrations.dlrm.optimizers import HybridOptimizer
from dct_plugin.metrics import Metrics

pytestmark = pytest.mark.slow

CARDINALITIES = (3, 500, 40, 7, 120, 2)
DIM = 8
BATCH = 24


# -- the model on one rank ---


def make(world_size: int, **options: Any) -> ShardedTables:
    torch.manual_seed(3)
    config = EmbeddingChannelConfig.of(options.pop("config", {}))
    return ShardedTables(CARDINALITIES, DIM, config=config, **options)


def whole_tables() -> list[Tensor]:
    """The tables every rank draws."""
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, ()))
    tables = []
    for number, rows in enumerate(CARDINALITIES):
        generator, limit = torch.Generator().manual_seed(seed + number), 1 / math.sqrt(rows)
        tables.append(torch.empty(rows, DIM).uniform_(-limit, limit, generator=generator).requires_grad_())
    return tables


def draw(kind: str, step: int, batch: int = BATCH) -> list[Bags]:
    """The global batch as bags, skewed so that rows repeat."""
    generator = torch.Generator().manual_seed(step)
    bags = []
    for rows in CARDINALITIES:
        if kind == "one_hot":
            lengths = torch.ones(batch, dtype=torch.int64)
        elif kind == "fixed":
            lengths = torch.full((batch,), 3)
        else:
            lengths = torch.randint(0, 5, (batch,), generator=generator)
        skewed = torch.rand(int(lengths.sum()), generator=generator) ** 3
        bags.append(Bags((skewed * rows).to(torch.int64), lengths))
    return bags


def part(bags: list[Bags], start: int, stop: int, kind: str) -> Any:
    """Samples ``start`` to ``stop`` in the form a rank would pass."""
    cut = []
    for ids, lengths in bags:
        ends = torch.cumsum(lengths, 0)
        first = int(ends[start - 1]) if start else 0
        cut.append(Bags(ids[first : int(ends[stop - 1])], lengths[start:stop]))
    if kind == "one_hot":
        return torch.stack([bag.ids for bag in cut], dim=1).to(torch.int32)
    if kind == "fixed":
        return torch.stack([bag.ids.view(-1, 3) for bag in cut], dim=1)
    return cut


def pooled(tables: list[Tensor], bags: list[Bags], pooling: str) -> Tensor:
    columns = []
    for table, (ids, lengths) in zip(tables, bags, strict=True):
        offsets = torch.cumsum(lengths, 0) - lengths
        columns.append(functional.embedding_bag(ids, table, offsets, mode=pooling))
    return torch.stack(columns, dim=1)


def loss_of(vectors: Tensor) -> Tensor:
    """Mean over the samples of something that treats every entry differently."""
    weights = torch.linspace(-1, 1, vectors[0].numel()).view(vectors[0].shape)
    return torch.tanh((vectors * weights).sum(dim=(1, 2)) + vectors.square().sum(dim=(1, 2))).mean()


def bounds_of_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Samples of a rank."""
    return BATCH * rank // world_size, BATCH * (rank + 1) // world_size


def _against_one_rank(
    rank: int, world_size: int, kind: str, pooling: str, options: dict[str, Any]
) -> dict[str, Any]:
    module = make(world_size, pooling=pooling, **options)
    tables = whole_tables()
    bags = draw(kind, 0)
    start, stop = bounds_of_rank(rank, world_size)
    vectors = module(part(bags, start, stop, kind))
    expected = pooled(tables, bags, pooling)
    loss_of(vectors).backward()
    loss_of(expected).backward()
    gradient = module.shard.weight.grad
    assert gradient is not None
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    own = module.placement[rank]
    wanted = torch.cat([tables[t].grad for t in own]) if own else torch.zeros(1, DIM)  # type: ignore[misc]
    return {
        "forward": torch.equal(vectors, expected[start:stop]),
        "forward_error": float((vectors - expected[start:stop]).abs().max()),
        "error": float((gradient - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30),
        "vectors": vectors.detach(),
        "gradient": gradient,
        "placement": module.placement,
    }


@pytest.mark.parametrize("kind", ["one_hot", "fixed", "ragged"])
@pytest.mark.parametrize(("world_size", "pooling"), [(2, "sum"), (4, "mean")])
def test_same_as_one_rank(world_size: int, pooling: str, kind: str) -> None:
    plain = run(world_size, _against_one_rank, kind, pooling, {"config": {"enabled": False}})
    through = run(world_size, _against_one_rank, kind, pooling, {"config": {"deduplicate": False}})
    distinct = run(world_size, _against_one_rank, kind, pooling, {})
    for a, b, c in zip(plain, through, distinct, strict=True):
        assert a["forward"]
        assert a["error"] < 1e-6
        # Through payloads: the same bits. De-duplicated: sums in another order.
        assert torch.equal(a["vectors"], b["vectors"])
        assert torch.equal(a["gradient"], b["gradient"])
        assert c["forward_error"] < 1e-6
        assert c["error"] < 1e-6
        if kind == "one_hot":
            assert torch.equal(a["vectors"], c["vectors"])


def test_uneven_shards_ranks_without_tables_and_sparse_gradients() -> None:
    everything = [[], [0, 1, 2, 3, 4, 5], [], []]
    for config in ({}, {"deduplicate": False}, {"enabled": False}):
        options = {"placement": everything, "config": config, "sparse": True}
        for result in run(4, _against_one_rank, "one_hot", "sum", options):
            assert result["forward"]
            assert result["error"] < 1e-6
    for result in run(
        2, _against_one_rank, "ragged", "sum", {"placement": [[5, 0], [1, 2, 3, 4]], "sparse": True}
    ):
        assert result["forward_error"] < 1e-6
        assert result["error"] < 1e-6


# -- lossy layers ---


def _lossy(rank: int, world_size: int, config: dict[str, Any], kind: str = "one_hot") -> dict[str, Any]:
    """Three steps; at the last one forward and gradients are compared with what the layers mean."""
    module = make(world_size, config={"value_dtype": "fp32", **config})
    start, stop = bounds_of_rank(rank, world_size)
    for step in range(2):
        module(part(draw(kind, step), start, stop, kind))
        module.end_step()
    module.eval()  # what has been found stays
    bags = draw(kind, 2)
    vectors = module(part(bags, start, stop, kind))
    vectors.retain_grad()
    loss_of(vectors).backward()
    state: list[Any] = [module.gather_tables()]
    dist.broadcast_object_list(state, src=0)
    tables = whole_tables()
    exact = pooled(tables, bags, "sum")
    shown, mask = exact.detach().clone(), torch.ones_like(exact, dtype=torch.bool)
    cfg = module.config
    if cfg.sparsity:
        mask = shown.abs() >= state[0]["tau"].view(1, -1, 1)
    shown = torch.where(mask, shown, torch.zeros_like(shown))
    if cfg.error_bound is not None:
        error = (vectors.detach() - shown[start:stop]).abs()
        within = bool((error.double() <= cfg.error_bound).all())
        everyones: list[Any] = [None] * world_size
        dist.all_gather_object(everyones, vectors.detach())
        shown = torch.cat(everyones)
        if cfg.sparsity:
            mask = mask & (shown != 0)
    else:
        within = torch.equal(vectors.detach(), shown[start:stop])
    masked = exact * mask if not cfg.dense_gradient else exact
    loss_of(masked + (shown - masked).detach()).backward()
    own = module.placement[rank]
    wanted = torch.cat([tables[t].grad for t in own]) if own else torch.zeros(1, DIM)  # type: ignore[misc]
    gradient = module.shard.weight.grad
    assert gradient is not None
    return {
        "within": within,
        "error": float((gradient - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30),
        "kept": float(mask.float().mean()),
        "gradient": gradient,
        "wanted": wanted,
    }


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {"sparsity": 0.7},
        {"sparsity": 0.7, "dense_gradient": True},
        {"error_bound": 0.02},
        {"sparsity": 0.6, "error_bound": 0.02},
        {"sparsity": 0.6, "error_bound": 0.02, "dense_gradient": True},
    ],
    ids=lambda config: "-".join(f"{k}={v}" for k, v in config.items()),
)
def test_layers_mean_what_they_say(world_size: int, deduplicate: bool, config: dict[str, Any]) -> None:
    for result in run(world_size, _lossy, {"deduplicate": deduplicate, **config}):
        assert result["within"]
        assert result["error"] < 2e-6
        if config.get("sparsity"):
            assert result["kept"] == pytest.approx(1 - config["sparsity"], abs=0.1)
        else:
            assert result["kept"] == 1.0


def test_layers_apply_to_pooled_vectors_too() -> None:
    for config in ({"sparsity": 0.7}, {"error_bound": 0.02}):
        for deduplicate in (True, False):
            for result in run(2, _lossy, {"deduplicate": deduplicate, **config}, "ragged"):
                assert result["within"]
                assert result["error"] < 2e-6


def _gradient_bound(rank: int, world_size: int) -> dict[str, Any]:
    exact = _lossy(rank, world_size, {})
    rounded = _lossy(rank, world_size, {"gradient_bound": 0.1})
    error = (rounded["gradient"] - exact["gradient"]).abs()
    return {
        "largest": float(error.max()),
        "scale": float(exact["gradient"].abs().max()),
        "any": bool(error.any()),
    }


def test_gradient_bound_is_relative() -> None:
    for result in run(2, _gradient_bound):
        assert result["any"]
        # A row's gradient is the sum of one exact and one rounded part; rms <= max.
        assert result["largest"] <= 0.1 * result["scale"] * 2


def _evaluation(rank: int, world_size: int) -> dict[str, bool]:
    found = {}
    start, stop = bounds_of_rank(rank, world_size)
    ids = part(draw("one_hot", 0), start, stop, "one_hot")
    exact = pooled(whole_tables(), draw("one_hot", 0), "sum")[start:stop]
    for evaluation in (True, False):
        module = make(world_size, config={"sparsity": 0.8, "evaluation": evaluation})
        sparse = module(ids)
        module.eval()
        with torch.no_grad():
            again = module(ids)
        found[f"thresholded {evaluation}"] = bool((sparse == 0).float().mean() > 0.5)
        found[f"same {evaluation}"] = bool(((again == 0) == (sparse == 0)).all())
        found[f"dense {evaluation}"] = torch.equal(again, exact)
    return found


def test_evaluation() -> None:
    for found in run(2, _evaluation):
        assert found == {
            "thresholded True": True,
            "same True": True,
            "dense True": False,
            "thresholded False": True,
            "same False": False,
            "dense False": True,
        }


# -- optimizer steps ---


def _accumulated(rank: int, world_size: int) -> dict[str, Any]:
    """Three micro-batches to a step, each of them recomputed in the backward pass."""
    options = {"sparsity": 0.6, "error_bound": 0.02}
    module = make(world_size, config=options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.follow(optimizer)
    start, stop = bounds_of_rank(rank, world_size)
    ids = [part(draw("one_hot", number), start, stop, "one_hot") for number in range(3)]
    seen = []
    for _ in range(4):
        found = []
        for micro_batch in ids:
            passes: list[Tensor] = []

            def run_tables(batch: Tensor, passes: list[Tensor] = passes) -> Tensor:
                passes.append(module(batch))
                return loss_of(passes[-1])

            checkpoint(run_tables, micro_batch, use_reentrant=False).backward()
            assert len(passes) == 2
            found.append(
                {
                    "exact": not bool((passes[0] == 0).any()),
                    "recomputed": torch.equal(passes[0].detach(), passes[1].detach()),
                    "tau": module.embedding_exchange.tau.clone(),
                }
            )
        optimizer.step()
        optimizer.zero_grad()
        seen.append(found)
    return {"seen": seen, "steps": int(module.embedding_exchange.steps)}


def test_optimizer_steps_are_counted_not_forward_passes() -> None:
    for result in run(2, _accumulated):
        assert result["steps"] == 4
        assert not any(found[0]["exact"] for found in result["seen"])
        for found in result["seen"]:
            assert all(one["recomputed"] for one in found)
            assert all(one["exact"] == found[0]["exact"] for one in found)
            assert all(torch.equal(one["tau"], found[0]["tau"]) for one in found)


def _followed(rank: int, world_size: int) -> dict[str, Any]:
    module = make(world_size, config={"sparsity": 0.5})
    rows = torch.optim.SGD([module.shard.weight], lr=0.1)
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=rows))
    handle = module.follow(wrapped)
    start, stop = bounds_of_rank(rank, world_size)
    ids = part(draw("one_hot", 0), start, stop, "one_hot")
    steps = []

    def one_step(calls: int) -> None:
        loss_of(module(ids)).backward()
        for _ in range(calls):
            rows.step()
        steps.append(int(module.embedding_exchange.steps))

    one_step(1)
    one_step(3)  # ZeRO calls step() once per parameter group
    module.eval()
    one_step(1)  # evaluation is no step
    module.train()
    handle.remove()
    one_step(1)
    with pytest.raises(TypeError, match="tables: follow"):
        module.follow("adam")
    return {"steps": steps}


def test_follow_counts_steps_of_an_optimizer() -> None:
    for result in run(2, _followed):
        assert result["steps"] == [1, 2, 2, 2]


def _forgotten(rank: int, world_size: int) -> list[list[str]]:
    start, stop = bounds_of_rank(rank, world_size)
    ids = part(draw("one_hot", 0), start, stop, "one_hot")
    found = []
    for config in ({"sparsity": 0.5}, {"error_bound": 0.01}):
        with logged() as lines, torch.no_grad():
            module = make(world_size, config=config)
            module.embedding_exchange._passes = 250
            for _ in range(10):
                module(ids)
        found.append([text for text in lines if "without an optimizer step" in text])
    return found


def test_forgetting_to_count_steps_is_warned_about_once() -> None:
    for warned, silent in run(2, _forgotten):
        assert len(warned) == 1
        assert "tables: 256 forward passes" in warned[0]
        assert "follow(optimizer)" in warned[0]
        assert not silent


# -- metrics, state, failures ---


def _reported(rank: int, world_size: int, config: dict[str, Any]) -> Any:
    metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
    module = make(world_size, config=config, metrics=metrics)
    start, stop = bounds_of_rank(rank, world_size)
    for step in range(3):
        loss_of(module(part(draw("one_hot", step), start, stop, "one_hot"))).backward()
        module.end_step()
        metrics.step(step)
    return metrics.summary(), len(module.placement[rank])


def test_every_layer_is_reported() -> None:
    config = {"sparsity": 0.5, "error_bound": 0.01, "gradient_bound": 0.1}
    for summary, tables in run(2, _reported, config):
        for direction, there in (("forward", tables), ("backward", len(CARDINALITIES) - tables)):
            whole = summary.classes[f"embedding_{direction}"]
            layers = [
                summary.classes[f"embedding_{direction}/{x}"] for x in ("lossless", "threshold", "bounded")
            ]
            assert whole.dense_bytes == 3 * (BATCH // 2) * there * DIM * 4 == layers[0].dense_bytes
            assert layers[0].sent_bytes == layers[1].dense_bytes < layers[0].dense_bytes
            assert layers[1].sent_bytes == layers[2].dense_bytes < layers[1].dense_bytes
            assert layers[2].sent_bytes == whole.sent_bytes
        flat = [c for name, c in summary.classes.items() if "/" not in name]
        assert summary.sent_bytes == sum(c.sent_bytes for c in flat)
        assert summary.classes["embedding_ids"].sent_bytes > 0


def _kernels(rank: int, world_size: int, section: dict[str, Any]) -> tuple[str, Tensor]:
    config = {"error_bound": 0.01, "sparsity": 0.5}
    module = make(world_size, config=config, kernels=KernelConfig.of(section))
    start, stop = bounds_of_rank(rank, world_size)
    vectors = module(part(draw("one_hot", 0), start, stop, "one_hot"))
    return module.embedding_exchange.backend(vectors.device).name, vectors.detach()


def test_the_kernels_section_picks_the_backend() -> None:
    reference = run(2, _kernels, {"backend": "reference"})
    default = run(2, _kernels, {})
    assert {name for name, _ in reference} == {"reference"}
    for (_, expected), (_, found) in zip(reference, default, strict=True):
        assert torch.equal(expected, found)


def _tables_in_halves(rank: int, world_size: int) -> list[Any]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        tables = make(world_size, config={"sparsity": 0.5}).to(dtype)
        optimizer = torch.optim.SGD(tables.parameters(), lr=1e-3)
        tables.follow(optimizer)
        for step in range(3):
            vectors = tables(part(draw("one_hot", step), rank * 8, rank * 8 + 8, "one_hot"))
            vectors.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        tau = tables.embedding_exchange.tau
        kept = float(vectors.count_nonzero()) / vectors.numel()
        found.append((vectors.dtype == dtype, tau.dtype, bool((tau > 0).all()), 0.4 < kept < 0.6))
    return found


def test_tables_in_16_bits_are_thresholded() -> None:
    assert run(2, _tables_in_halves) == [[(True, torch.float32, True, True)] * 2] * 2


def _resharded(rank: int, world_size: int, saved: Any) -> Any:
    module = make(world_size, config={"sparsity": 0.6, "error_bound": 0.02})
    start, stop = bounds_of_rank(rank, world_size)
    if saved is None:
        for step in range(2):
            module(part(draw("one_hot", step), start, stop, "one_hot"))
            module.end_step()
        with torch.no_grad():
            module.shard.weight += 0.01
    else:
        load_tables(module, saved)
        with pytest.raises(ValueError, match="shapes"):
            load_tables(module, {**saved, "tables": saved["tables"][1:]})
    module.eval()
    with torch.no_grad():
        vectors = module(part(draw("one_hot", 7), start, stop, "one_hot"))
    return vectors, module.gather_tables()


def test_tables_move_to_another_number_of_ranks() -> None:
    before = run(2, _resharded, None)
    assert before[1][1] is None
    after = run(4, _resharded, before[0][1])
    assert torch.equal(torch.cat([v for v, _ in before]), torch.cat([v for v, _ in after]))
    assert torch.equal(before[0][1]["tau"], after[0][1]["tau"])


def _bad_id(rank: int, world_size: int) -> None:
    ids = part(draw("one_hot", 0), 0, 4, "one_hot")
    if rank == 1:
        ids[2, 4] = 120
    make(world_size)(ids)


def test_an_id_out_of_range_stops_every_rank_with_a_reason() -> None:
    outcomes = launch(2, _bad_id)
    assert [kind for kind, _ in outcomes] == ["error", "error"]
    assert "IndexError: tables: rank 1: id 120 is outside table 4, which has 120 rows" in outcomes[1][1]
    assert "DesyncError" in outcomes[0][1]
    assert "[1]" in outcomes[0][1]


def _poisoned(rank: int, world_size: int) -> bool:
    module = make(world_size, config={"sparsity": 0.5, "error_bound": 0.01, "gradient_bound": 0.1})
    if rank == 0:
        with torch.no_grad():
            module.shard.weight[0, 0] = float("nan")
    vectors = module(part(draw("one_hot", 0), 0, 12, "one_hot"))
    loss = loss_of(vectors)
    loss.backward()
    gradient = module.shard.weight.grad
    assert gradient is not None
    return not bool(loss.isfinite()) and not bool(gradient.isfinite().all())


def test_non_finite_rows_reach_every_rank() -> None:
    assert run(2, _poisoned) == [True, True]


def _evaluates_alone(rank: int, world_size: int) -> None:
    module = make(world_size)
    with torch.set_grad_enabled(rank == 1):
        module.train(rank == 1)
        module(part(draw("one_hot", 0), 0, 4, "one_hot"))


def test_a_rank_that_evaluates_beside_a_training_step_is_told() -> None:
    for kind, said in launch(2, _evaluates_alone):
        assert kind == "error"
        assert "tables: a look-up is a collective, in evaluation too" in said


def _refused(rank: int, world_size: int) -> list[str]:
    found = []
    for rows in ((3, 0, 5), (3, -1, 5), (3, 2**31), (2**31 - 1, 3)):
        with pytest.raises(ValueError) as error:
            ShardedTables(rows, 64)
        found.append(str(error.value))
    return found


def test_tables_that_cannot_be_are_refused_on_every_rank() -> None:
    first, second = run(2, _refused)
    assert first == second
    assert first[:3] == [
        "tables: table 1 has 0 rows; allowed: 1 to 2**31 - 1",
        "tables: table 1 has -1 rows; allowed: 1 to 2**31 - 1",
        "tables: table 1 has 2147483648 rows; allowed: 1 to 2**31 - 1",
    ]
    assert "tables: the tables of rank 0 take 549.8 GB of 549.8 GB, and this machine has " in first[3]


def _float_ids(rank: int, world_size: int) -> None:
    ids = part(draw("one_hot", 0), 0, 4, "one_hot")
    make(world_size)(ids + 0.7 if rank == 1 else ids)


def test_ids_that_are_no_integers_stop_every_rank() -> None:
    outcomes = launch(2, _float_ids)
    assert "TypeError: tables: rank 1: ids are torch.float32; they must be integers" in outcomes[1][1]
    assert "DesyncError" in outcomes[0][1]


def _copies(rank: int, world_size: int) -> list[bool]:
    module = make(world_size, config={"sparsity": 0.5, "error_bound": 0.01})
    ids = part(draw("one_hot", 0), *bounds_of_rank(rank, world_size), "one_hot")
    loss_of(module(ids)).backward()  # makes the transport and the kernels
    pickled = io.BytesIO()
    torch.save(module, pickled)
    pickled.seek(0)
    average = AveragedModel(module)
    average.update_parameters(module)
    copies = (copy.deepcopy(module), torch.load(pickled, weights_only=False), average)
    found = []
    for each in (module, *copies):
        each.zero_grad()
        vectors = each.eval()(ids)
        loss_of(vectors).backward()
        found += [vectors, *(parameter.grad for parameter in each.parameters())]
    return [torch.equal(own, found[at % 2]) for at, own in enumerate(found)]


def test_copies_and_pickles_look_up_the_same_vectors() -> None:
    assert all(map(all, run(2, _copies)))


def _compiled(rank: int, world_size: int) -> bool:
    tables, top = make(world_size), _Top()
    ids = part(draw("one_hot", 0), *bounds_of_rank(rank, world_size), "one_hot")

    def model(dense: Tensor, ids: Tensor) -> Tensor:
        return top(dense, tables(ids))

    dense = torch.ones(len(ids), 2)
    compiled = torch.compile(model, backend="eager")(dense, ids)
    compiled.square().mean().backward()
    return torch.equal(compiled, model(dense, ids)) and tables.shard.weight.grad is not None


def test_a_compiled_model_may_have_tables() -> None:
    assert run(2, _compiled) == [True, True]


def _wrapped_whole(rank: int, world_size: int) -> None:
    tables = ShardedTables((10, 10), DIM)  # equal shapes, which DistributedDataParallel does not refuse
    DistributedDataParallel(tables)(torch.zeros(4, 2, dtype=torch.int64))


def test_tables_inside_distributed_data_parallel_are_refused() -> None:
    for rank, (kind, said) in enumerate(launch(2, _wrapped_whole)):
        assert kind == "error"
        assert f"tables: rank {rank}: DistributedDataParallel would average the tables" in said


def _fully_sharded(rank: int, world_size: int) -> None:
    fully_shard(nn.Sequential(ShardedTables((10, 10), DIM), nn.Linear(DIM, 1)))


def test_tables_inside_fully_shard_are_refused() -> None:
    for rank, (kind, said) in enumerate(launch(2, _fully_sharded)):
        assert kind == "error"
        assert f"tables: rank {rank}: fully_shard (FSDP2) would mix the tables" in said


def _as_the_page_says(rank: int, world_size: int, folder: str, is_resumed: bool) -> list[Tensor]:
    """Train, save and go on; or resume and go on: with the blocks of the page."""
    *_, evaluate, save, load = _page_blocks()
    tables = make(world_size, config={"sparsity": 0.5})
    mlps = DistributedDataParallel(_Top())
    of_tables = HybridOptimizer([tables.shard.weight], method="rowwise_adagrad", lr=0.02)
    of_mlps = torch.optim.AdamW(mlps.parameters(), lr=0.01)
    section = {"data_parallel": {"sparsity": 0.9, "min_numel": 1, "warmup_steps": 1}}
    state = dct_plugin.attach(mlps, of_mlps, section)
    tables.follow(of_tables)
    names = locals() | {"torch": torch, "dist": dist}

    def train(first: int) -> None:
        for step in range(first, first + 4):
            ids = part(draw("one_hot", step), *bounds_of_rank(rank, world_size), "one_hot")
            mlps(torch.ones(len(ids), 2), tables(ids)).square().mean().backward()
            for optimizer in (of_tables, of_mlps):
                optimizer.step()
                optimizer.zero_grad()

    if is_resumed:
        exec(load, names)
    else:
        train(0)
        exec(save, names)
    train(4)
    batches = [(torch.ones(4, 2), part(draw("one_hot", n), 0, 4, "one_hot"), None) for n in range(3)]
    exec(evaluate, names := names | {"test_batches": batches})
    assert len(names["logits"]) == 2 - rank
    return [tables.shard.weight.detach(), *(p.detach() for p in mlps.module.parameters()), *names["logits"]]


class _Top(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(2 + DIM * len(CARDINALITIES), 1)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.layer(torch.cat([dense, vectors.flatten(1)], dim=1)).squeeze(1)


def _page_blocks() -> list[str]:
    page = (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    wanted = ("test_batches", "state.save(folder)", "state.load(folder)")
    return [next(block for block in found if each in block) for each in wanted]


def test_checkpoints_and_evaluation_of_the_page(tmp_path: Path) -> None:
    whole = run(2, _as_the_page_says, str(tmp_path), False)
    again = run(2, _as_the_page_says, str(tmp_path), True)
    for first, second in zip(whole, again, strict=True):
        assert all(map(torch.equal, first, second))
