"""DES: the sharded models against the unsharded ones and against the operators' textbook formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run
from torch import Tensor, nn

from dct_plugin.config import MetricsConfig
from dct_plugin.embedding import (
    ColumnShards,
    Embeddings,
    FieldShards,
    LocalEmbeddings,
    Part,
    Table,
    choose,
    place_tables,
)
from dct_plugin.metrics import Metrics, Record
from dct_plugin.recommender.models import DLRM, EmbeddingTables, TableExchange, build
from dct_plugin.recommender.models.parts import FM, CrossNetwork, DotLayer, FirstLayer, Wide, evaluate

CARDINALITIES = (50, 3, 7, 120, 2, 31, 5, 9, 4)
DENSE, DIM = 5, 6
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("widedeep", {"hidden": (12, 8)}),
    ("deepfm", {"hidden": (12, 8)}),
    ("dcn", {"hidden": (12,), "depth": 4}),
    ("dcn", {"hidden": (), "depth": 3}),
    ("dlrm", {"bottom": (8,), "top": (10, 8)}),  # products contracted with the first top layer
    ("dlrm", {"bottom": (8,), "top": (64,)}),  # products aggregated
]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def batch(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(size, DENSE, generator=generator, dtype=dtype)
    ids = [torch.randint(0, n, (size,), generator=generator) for n in CARDINALITIES]
    # One kind of label: gradients of both signs would cancel in the sums over the batch, and what is left of
    # the biases' would be fp32's rounding error, with and without shards.
    return dense, torch.stack(ids, dim=1), torch.ones(size, dtype=dtype)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30)) if b.numel() else 0.0


def gradients(model: nn.Module, dense: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    logits = model(dense, ids)
    nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
    return logits.detach()


def rows_of(field: int) -> slice:
    start = sum(CARDINALITIES[:field])
    return slice(start, start + CARDINALITIES[field])


def shard_of(name: str, source: Embeddings, full: Tensor) -> Tensor:
    """The part of an unsharded parameter (or its gradient) that a shard of ``source`` holds."""
    start, stop = source.columns
    if "tables" in name:
        return torch.cat([full[rows_of(f), start:stop] for f in source.fields] or [full[:0]])
    return full[list(source.fields), start:stop]


def _compare(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Relative distances of logits, parameters and gradients, for all models and types."""
    results = []
    for dtype, tolerance in TOLERANCE.items():
        torch.set_default_dtype(dtype)
        for name, settings in MODELS:
            dense, ids, label = batch(12 * world_size, dtype)
            common = dict(embedding_dim=DIM, seed=7, **settings)
            reference, _ = build(name, DENSE, CARDINALITIES, **common)
            expected = gradients(reference, dense, ids, label)
            model, choices = build(name, DENSE, CARDINALITIES, exchange=TableExchange("des"), **common)
            assert all(choice.strategy == "des" for choice in choices)
            mine = slice(12 * rank, 12 * rank + 12)
            logits = gradients(model, dense[mine], ids[mine], label[mine])
            worst = {"logits": distance(logits, expected[mine])}
            full = {key.replace(".tables.", "."): p for key, p in reference.named_parameters()}
            for key, parameter in model.named_parameters():
                theirs, gradient = full.pop(key), parameter.grad
                assert theirs.grad is not None
                assert gradient is not None
                wanted, value = theirs.grad, theirs.detach()
                if getattr(parameter, "allreduce", True):
                    dist.all_reduce(gradient)
                    gradient /= world_size
                else:
                    source = model.wide_tables if key.startswith("wide_tables") else model.tables
                    wanted, value = (shard_of(key, source, t) for t in (wanted, value))
                assert torch.equal(parameter.detach(), value), key
                worst[key] = distance(gradient, wanted)
            assert not full
            results.append({"model": name, "dtype": str(dtype), "tolerance": tolerance, "worst": worst})
    torch.set_default_dtype(torch.float32)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_models_equal_unsharded_ones(world_size: int) -> None:
    for result in [r for rank in run(world_size, _compare) for r in rank]:
        far = {key: value for key, value in result["worst"].items() if value > result["tolerance"]}
        assert not far, (result["model"], result["dtype"], far)


def test_operators_are_the_textbook_formulas() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        dense, ids, _ = batch(10, torch.float64)
        tables = EmbeddingTables(CARDINALITIES, DIM)
        source = LocalEmbeddings(tables, len(CARDINALITIES), DIM)
        e = source(ids)
        fm, first, cross = FM(source), FirstLayer(source, DENSE, 11), CrossNetwork(source, DENSE, 3)
        with torch.no_grad():
            cross.bias.normal_()
            cross.dense_bias.normal_()
        got = evaluate(source, e, [fm, first, cross], dense)

        pairs = torch.bmm(e, e.transpose(1, 2)).tril(-1).sum((1, 2))
        torch.testing.assert_close(got[0], pairs)
        x0 = torch.cat([dense, e.flatten(1)], dim=1)
        weight = torch.cat([first.dense_weight, first.weight.flatten(0, 1)])
        torch.testing.assert_close(got[1], x0 @ weight + first.bias)
        weight = torch.cat([cross.dense_weight, cross.weight.flatten(0, 1).T], dim=1)
        bias = torch.cat([cross.dense_bias, cross.bias.flatten(0, 1).T], dim=1)
        x = x0
        for layer in range(3):
            x = x0 * (x @ weight[layer]).unsqueeze(1) + bias[layer] + x
        torch.testing.assert_close(got[2], x @ weight[3])

        wide_tables = EmbeddingTables(CARDINALITIES, 1)
        wide = Wide(DENSE)
        (got_wide,) = evaluate(source, wide_tables(ids), [wide], dense)
        torch.testing.assert_close(got_wide, wide_tables(ids).sum((1, 2)) + wide.dense(dense).squeeze(1))
        for hidden in (4, 100):
            layer = nn.Linear(DENSE + 36, hidden)
            dot = DotLayer(len(CARDINALITIES), layer)
            (got_dot,) = evaluate(source, e, [dot], dense)
            row, column = torch.tril_indices(9, 9, -1)
            products = (e[:, row] * e[:, column]).sum(2)
            torch.testing.assert_close(got_dot, layer(torch.cat([dense, products], dim=1)))
    finally:
        torch.set_default_dtype(torch.float32)


def _more_ranks_than_tables(rank: int, world_size: int) -> tuple[list[int], float, float]:
    cardinalities = (40, 10)
    torch.manual_seed(0)
    ids = torch.stack([torch.randint(0, n, (3 * world_size,)) for n in cardinalities], dim=1)
    mine = slice(3 * rank, 3 * rank + 3)
    shards = FieldShards(cardinalities, DIM, seed=5)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        tables = EmbeddingTables(cardinalities, DIM)
    (got,) = evaluate(shards, shards(ids[mine]), [FM(shards)], torch.empty(3, 0))
    home = LocalEmbeddings(tables, 2, DIM)
    (expected,) = evaluate(home, home(ids), [FM(home)], torch.empty(3 * world_size, 0))
    expected.mean().backward()
    got.mean().backward()
    assert shards.weight.grad is not None
    assert tables.weight.grad is not None
    wanted = torch.cat(
        [tables.weight.grad.split(list(cardinalities))[f] for f in shards.fields] or [torch.empty(0, DIM)]
    )
    return (
        list(shards.fields),
        distance(got.detach(), expected[mine].detach()),
        distance(shards.weight.grad, wanted),
    )


@pytest.mark.slow
def test_ranks_without_tables_take_part() -> None:
    results = run(4, _more_ranks_than_tables)
    assert [fields for fields, _, _ in results] == [[0], [1], [], []]
    assert all(forward < 1e-6 and backward < 1e-6 for _, forward, backward in results)


class _Records(Metrics):
    """Keeps every record."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(MetricsConfig(), rank=rank, world_size=world_size)
        self.classes: list[str] = []

    def record(self, record: Record) -> None:
        self.classes.append(record.cls)
        super().record(record)


def _bytes(rank: int, world_size: int) -> tuple[int, int, int, list[str]]:
    dense, ids, label = batch(16 * world_size, torch.float32)
    metrics = _Records(rank, world_size)
    model, _ = build(
        "deepfm",
        DENSE,
        CARDINALITIES,
        exchange=TableExchange("des", metrics=metrics),
        embedding_dim=DIM,
        hidden=(12, 8),
    )
    model.wide_tables.metrics = None
    mine = slice(16 * rank, 16 * rank + 16)
    gradients(model, dense[mine], ids[mine], label[mine])
    found = metrics.summary().classes
    sent = [found[cls].sent_bytes for cls in ("des_forward", "des_backward", "embedding_ids")]
    model.tables.metrics = None
    model(dense[mine], ids[mine])
    return sent[0], sent[1], sent[2], metrics.classes


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_are_those_of_the_formula(world_size: int) -> None:
    width = DIM + 1 + 12
    fields = len(CARDINALITIES)
    for rank, (forward, backward, ids, classes) in enumerate(run(world_size, _bytes)):
        # (N-1)/N * K floats per global sample and direction
        assert forward == backward == (world_size - 1) * 16 * width * 4
        own = len(place_tables([Table(rows, DIM) for rows in CARDINALITIES], world_size)[rank])
        assert ids == 16 * (fields - own) * 8
        assert classes == ["embedding_ids", "des_forward", "des_backward"]


def _wrong_placement(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as error:
        FieldShards((4, 5), 2, placement=[[0], [0]])
    with pytest.raises(ValueError, match="column shards"):
        DLRM(3, (4, 5), embedding_dim=2, tables=FieldShards((4, 5), 2))
    dist.barrier()  # a rank must not leave while others still connect
    assert ColumnShards((4, 5), 3).weight.shape == (9, 1 + rank)
    return str(error.value)


@pytest.mark.slow
def test_faults_are_named() -> None:
    assert "placement [[0], [0]] does not put" in run(2, _wrong_placement)[0]
    with pytest.raises(ValueError, match="unknown model 'mlp'"):
        build("mlp", 3, (4, 5))
    with pytest.raises(ValueError, match="exchange 'nothing'"):
        build("dcn", 3, (4, 5), exchange=TableExchange("nothing"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no setting 'bottom'"):
        build("dcn", 3, (4, 5), bottom=(3,))


def test_choice_follows_the_formula() -> None:
    def decide(width: int | None, dim: int, ranks: int, **settings: Any) -> Any:
        (choice,) = choose([Part("x", width, "t", 26, dim)], world_size=ranks, **settings)
        return choice

    # The table of N*K / (T*m) for T = 26
    for width, dim, ranks, ratio in [
        (17, 16, 2, 0.08),
        (17, 16, 8, 0.33),
        (7, 16, 2, 0.03),
        (400, 16, 2, 1.9),
        (400, 64, 2, 0.48),
        (400, 64, 8, 1.9),
    ]:
        choice = decide(width, dim, ranks)
        assert choice.ratio == pytest.approx(ratio, abs=0.05)
        assert choice.strategy == ("des" if ratio < 1 else "all_to_all")
        assert f"({ranks}*{width})/(26*{dim})" in choice.reason
    assert decide(None, 16, 2).strategy == "all_to_all"
    assert "no equivalent substitution" in decide(None, 16, 2).reason
    assert decide(7, 16, 1).strategy == "all_to_all"
    assert decide(17, 16, 2, compression=20).strategy == "all_to_all"
    assert decide(400, 16, 2, force="des").strategy == "des"


def test_parts_on_the_same_tables_are_decided_together() -> None:
    parts = [Part("FM", 17, "e", 26, 16), Part("deep", 400, "e", 26, 16), Part("wide", 1, "w", 26, 1)]
    fm, deep, wide = choose(parts, world_size=2)
    assert fm.ratio is not None
    assert fm.ratio < 1  # by itself DES would win, but the deep part needs the embeddings at home
    assert fm.strategy == deep.strategy == "all_to_all"
    assert "(17+400)" in fm.reason
    assert wide.strategy == "des"
