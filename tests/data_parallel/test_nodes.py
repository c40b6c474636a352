"""Sums inside nodes before the exchange between them: four processes as two nodes of two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import launch, logged, run
from support.state_files import save_state
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_plugin import DCTState, checkpoint, processes
from dct_plugin.config import DataParallelConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.plan import ALIGNED
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.errors import ConfigError, DesyncError
from dct_plugin.integrations.host import startup
from dct_plugin.integrations.host.startup import nodes_of
from dct_plugin.metrics import Metrics
from dct_plugin.transport.nodes import find_nodes, layout_of, ranks_of_machines

#: An odd size, one that is sent dense, a single entry, and a type of two bytes.
SIZES = {"a": 100_001, "small": 10, "one": 1, "b": 40_000}
TYPES = {"b": torch.bfloat16}
#: Owners as under ZeRO: partitions cut tensors inside nodes and between them.
OWNERS = {
    "a": [Shard(0, 0, 20_000), Shard(1, 20_000, 70_000), Shard(2, 70_000, 80_001), Shard(3, 80_001, 100_001)],
    "small": [Shard(3, 0, 10)],
    "one": [Shard(1, 0, 1)],
    "b": [Shard(2, 0, 40_000)],
}


def nodes(per_node: int = 2) -> Any:
    ranks = list(range(dist.get_world_size()))
    return find_nodes(ranks, ranks_of_machines(ranks, limit=60), per_node)


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    return {n: torch.randn(size, generator=made).to(TYPES.get(n, torch.float32)) for n, size in SIZES.items()}


def reducer(per_node: int = 2, metrics: Metrics | None = None, **settings: Any) -> GradientReducer:
    config = DataParallelConfig.model_validate(
        {"value_dtype": "fp32", "expert": {"threshold": "topk"}} | settings
    )
    return GradientReducer(config, nodes(per_node), metrics=metrics)


def _reduces(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mean = {n: torch.zeros(size, dtype=torch.float64) for n, size in SIZES.items()}
    for other in range(world_size):
        for name, tensor in gradients(other, 0).items():
            mean[name] += tensor.double() / world_size
    for exchange in ("direct", "two_phase"):
        whole = reducer(sparsity=0, exchange=exchange)
        whole.all_reduce([("one", torch.ones(1))])  # then the ranks' shared memory has to grow
        entries = gradients(rank, 0)
        whole.all_reduce(list(entries.items()), scale=1 / world_size)
        parts = gradients(rank, 0)
        reducer(sparsity=0, exchange=exchange).reduce_scatter(
            [(n, t, OWNERS[n]) for n, t in parts.items()], scale=1 / world_size
        )
        for name, size in SIZES.items():
            close = {"rtol": 0.02, "atol": 0.02} if name in TYPES else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(entries[name].double(), mean[name], **close)
            for owner, start, stop in OWNERS[name]:
                if owner == rank:
                    torch.testing.assert_close(
                        parts[name][start:stop].double(), mean[name][start:stop], **close
                    )
            assert size == entries[name].numel()
        found[f"{exchange} 0"] = torch.cat([t.float() for t in entries.values()])
        metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
        sparse = reducer(metrics=metrics, sparsity=0.9, exchange=exchange, warmup_steps=1)
        for step in range(4):
            entries = gradients(rank, step)
            sparse.all_reduce(list(entries.items()), scale=1 / world_size)
            sparse.end_step()
            metrics.step(step + 1)
        found[f"{exchange} 0.9"] = torch.cat([t.float() for t in entries.values()])
        own = {
            n: s.residual.current.numel()
            for n, s in sparse.group.streams.items()
            if n in SIZES and s.residual
        }
        assert own == ({"a": 49_984, "b": 19_968}, {"a": 50_017, "b": 20_032})[rank % 2]  # half of the model
        summary = metrics.summary()
        # Inside the node: half of every large tensor for the means, and once more for the sums.
        half = 100_001 / 2 * 4 + 40_000 / 2 * 2
        inside = torch.tensor(float(summary.classes["node"].intra_node))
        dist.all_reduce(inside)
        assert 0.99 < inside / (4 * 8 * half) < 1.02
        assert 0 < summary.classes["gradient"].sent_bytes < 8 * half / 5
    return found


@pytest.mark.slow
def test_sums_are_those_of_a_flat_exchange_and_bitwise_the_same_on_all_ranks() -> None:
    found = run(4, _reduces)
    for case in found[0]:
        assert all(torch.equal(found[0][case], other[case]) for other in found[1:]), case


def _gathers(rank: int, world_size: int) -> tuple[list[list[str]], bool]:
    """Return what was gathered inside the node behind each of two reductions, and in the end."""
    group, gathered = reducer(sparsity=0.9), list[str]()
    node, entries = group.group.node, list(gradients(rank, 0).items())
    assert node is not None
    gather = node.gather

    def noted(operation: str, tensors: Any, *rest: Any, **more: Any) -> None:
        gathered.extend(name for name, _ in tensors)
        gather(operation, tensors, *rest, **more)

    node.gather = noted  # type: ignore[method-assign]
    behind = []
    for bucket in (entries[:2], entries[2:]):
        group.begin(bucket, scale=1 / world_size).finish()
        behind.append(list(gathered))
    group.finish()
    same = [torch.equal(each, mean) for each, mean in zip(*_with_first_rank(entries), strict=True)]
    return [*behind, gathered], all(same)


def _with_first_rank(entries: list[tuple[str, torch.Tensor]]) -> tuple[list[torch.Tensor], ...]:
    own = [tensor for _, tensor in entries]
    first = [tensor.clone() for tensor in own]
    for tensor in first:
        dist.broadcast(tensor, 0)
    return own, first


@pytest.mark.slow
def test_sums_are_gathered_in_the_node_behind_each_bucket() -> None:
    names = list(SIZES)
    for gathered, same in run(4, _gathers):
        assert gathered == [names[:2], names, names]
        assert same


def _spreads(rank: int, world_size: int, folder: str, per_node: int, save: bool) -> dict[str, Any]:
    group = reducer(per_node, sparsity=0.9, exchange="two_phase")
    layout = layout_of(group.group.nodes)
    if save:
        for step in range(3):
            group.all_reduce(list(gradients(rank, step).items()), scale=1 / world_size)
            group.end_step()
        save_state(folder, group.state_dict(), rank=rank, world_size=world_size, identity="one")
        dist.barrier()
    else:
        loaded = checkpoint.StateFiles(rank, world_size, sizes=SIZES, layout=layout).read(folder)
        group.load_state_dict(loaded.state)
    unsent = {name: torch.zeros(size) for name, size in SIZES.items()}
    saved = checkpoint.reshard([checkpoint.StateFiles(rank, 1).content(group.state_dict())])
    for name, stream in saved["streams"].items():
        unsent[name] += stream["residual"] / world_size
    for tensor in unsent.values():
        dist.all_reduce(tensor)
    entries = gradients(rank, 3)
    group.all_reduce(list(entries.items()), scale=1 / world_size)
    return {"unsent": unsent, "next": entries}


@pytest.mark.slow
def test_saved_states_are_spread_between_flat_and_nodes_and_other_numbers_of_nodes(tmp_path: Path) -> None:
    for per_node, world_size in ((2, 4), (1, 4)):
        folder = str(tmp_path / str(per_node))
        before = run(world_size, _spreads, folder, per_node, True)
        for ranks, nodes_of_ranks in ((4, 2), (4, 1), (2, 1), (2, 2), (4, 4), (1, 1)):
            after = run(ranks, _spreads, folder, nodes_of_ranks, False)
            for name in ("a", "b"):
                assert before[0]["unsent"][name].abs().sum() > 0
                torch.testing.assert_close(
                    after[0]["unsent"][name], before[0]["unsent"][name], atol=2e-6, rtol=1e-4
                )
                for each in after:
                    assert torch.equal(each["next"][name], after[0]["next"][name])
                if (ranks, nodes_of_ranks) == (world_size, per_node):
                    assert torch.equal(after[0]["next"][name], before[0]["next"][name])


def _displaces(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Displaced weights: of four ranks in nodes, or of two ranks that have the gradients of a node each."""
    found, in_nodes = [], world_size == 4
    shapes = {"a": (301, 37), "b": (5_000,), "half": (100, 64), "tiny": (3,)}
    config = DataParallelConfig.model_validate(
        {"sparsity": 0.9, "feedback": "step_ahead", "min_numel": 1000, "value_dtype": "fp32"}
    )
    made = torch.Generator().manual_seed(1)
    weights = {name: nn.Parameter(torch.randn(shape, generator=made)) for name, shape in shapes.items()}
    weights["half"].data = weights["half"].data.bfloat16()
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    reduction = GradientReducer(config, nodes() if in_nodes else None)
    ahead = reduction.add_ons.step_ahead.prepare(weights.items(), units_of(optimizer))
    for step in range(3):
        entries = []
        for name, shape in shapes.items():
            place = rank // 2 if in_nodes else rank
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + place))
            other = torch.randn(shape, generator=torch.Generator().manual_seed(7 * step + place))
            if in_nodes:  # the mean of the node is that of the flat rank
                grad = grad + (1 - 2 * (rank % 2)) * other
            entries.append((name, grad.view(-1).contiguous()))
        reduction.all_reduce(entries, scale=1 / world_size)
        reduction.end_step()
        ahead.displace()
        found.append({name: weight.data.clone().float() for name, weight in weights.items()})
        ahead.restore()
        ahead.forget()
    # Updates of weights that this rank alone knows, of entries of both ranks' parts. Before gradients are
    # observed nothing else is displaced.
    update = (Shard(rank % 2, 1000, 9000), torch.full((8000,), 1.0 + rank))
    ahead = reduction.add_ons.step_ahead.prepare(
        weights.items(), units_of(optimizer), pending_of=lambda name: update if name == "a" else None
    )
    ahead.displace()
    found.append({name: weight.data.float() - ahead.weight(weight) for name, weight in weights.items()})
    return found


@pytest.mark.slow
def test_a_node_is_displaced_as_a_flat_rank_with_the_mean_gradient() -> None:
    found, flat = run(4, _displaces), run(2, _displaces)
    for step in range(3):
        for name, weight in found[0][step].items():
            assert torch.equal(weight, found[1][step][name])
            assert torch.equal(found[2][step][name], found[3][step][name])
            # Parts have thresholds of their own, and coefficients of 256 samples each: the same up to these.
            close = (weight - flat[0][step][name]).abs() < 2e-3
            assert close.float().mean() > 0.9, (name, step)
        assert not torch.equal(found[0][step]["a"], found[2][step]["a"])  # each node by its own residual
    for rank, each in enumerate(found):
        shown = torch.zeros(301 * 37)
        shown[1000:9000] = 2 * (1 + rank)  # for both ranks of its node
        torch.testing.assert_close(each[3]["a"].view(-1), shown)
        assert not each[3]["b"].any()


# -- torch DDP ---


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 301), nn.Tanh(), nn.Linear(301, 200), nn.Tanh(), nn.Linear(200, 1))


def _trains(rank: int, world_size: int, folder: str, section: dict[str, Any] | None, part: str) -> Any:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    state = None
    if section is not None:
        state = DCTState({"data_parallel": section}, optimizer=optimizer).register(model)
        if section.get("feedback") == "step_ahead":
            state.step_ahead(model.module, optimizer)
    first, last = {"whole": (0, 8), "first": (0, 5), "rest": (5, 8)}[part]
    if part == "rest":
        assert state is not None
        saved = torch.load(f"{folder}/model.pt", weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert state.load(folder)
    losses = []
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    for step in range(first, last):
        x = torch.randn(32, 100, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = (model(x).squeeze(1) - x.sin().sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if part == "first":
        assert state is not None
        state.save(folder)
        if rank == 0:
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()},
                f"{folder}/model.pt",
            )
        dist.barrier()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


AHEAD = {"sparsity": 0.95, "min_numel": 500, "feedback": "step_ahead", "nodes": 2, "verify": {"every": 2}}


@pytest.mark.slow
def test_ddp_trains_in_nodes_and_resumes_bitwise_and_with_other_nodes(tmp_path: Path) -> None:
    native = run(4, _trains, "", None, "whole")
    dense = run(4, _trains, "", {"sparsity": 0, "value_dtype": "fp32", "nodes": 2}, "whole")
    torch.testing.assert_close(dense[0], native[0], atol=1e-3, rtol=1e-3)
    whole = run(4, _trains, "", AHEAD, "whole")
    assert all(torch.equal(whole[0], other) for other in whole[1:])
    folder = str(tmp_path)
    run(4, _trains, folder, AHEAD, "first")
    assert torch.equal(run(4, _trains, folder, AHEAD, "rest")[0], whole[0])
    for world_size, per_node in ((4, 1), (2, 2), (2, 1)):
        rest = run(world_size, _trains, folder, AHEAD | {"nodes": per_node}, "rest")
        assert all(torch.equal(rest[0], other) for other in rest[1:])


@pytest.mark.slow
def test_a_tensor_too_small_for_a_part_of_every_rank_is_sent_dense() -> None:
    section = AHEAD | {"warmup_steps": 2, "sparsity_warmup_steps": 0}
    lowered, least = (run(4, _trains, "", section | {"min_numel": n}, "whole") for n in (1, 2 * ALIGNED))
    assert all(torch.equal(lowered[0], other) for other in lowered[1:] + least)


def _poisoned(rank: int, world_size: int) -> list[str]:
    group = reducer(sparsity=0.9, nonfinite_action="skip")
    before = None
    with logged() as lines:
        for step in range(3):
            entries = gradients(rank, step)
            if step == 1 and rank == 2:
                entries["a"][5] = float("nan")
            group.all_reduce(list(entries.items()), scale=1 / world_size)
            if step == 1:
                assert entries["a"].isnan().any()
            group.end_step(skipped=step == 1)
            state = group.state_dict()["streams"]["a"]["residual"].clone()
            if step == 1:
                assert before is not None
                assert torch.equal(state, before)
            before = state
    return lines


def _fails(rank: int, world_size: int, kind: str) -> str:
    group = reducer(sparsity=0.9)
    entries = gradients(rank, 0)
    group.all_reduce(list(entries.items()))
    if rank == 1 and kind == "other tensors":
        entries = {"c": entries.pop("a"), **entries}
    elif rank == 1:
        phase = group.topologies.all_reduce.phases[0]
        failing = group.group.node.transport if kind == "fails inside" else phase
        assert failing is not None
        failing._write = failing.encode = lambda *_: 1 / 0  # type: ignore[union-attr, method-assign]
    try:
        group.all_reduce(list(entries.items()))
        group.all_reduce(list(gradients(rank, 1).items()))
    except DesyncError as error:
        return str(error)
    except ZeroDivisionError as error:
        return f"rank 1: {error}"
    return "nothing"


@pytest.mark.slow
def test_ranks_that_fail_or_differ_are_named_and_a_poisoned_step_leaves_no_trace() -> None:
    lines = run(4, _poisoned)
    assert any("node of ranks 2-3: the gradient of a is not finite" in line for line in lines[2] + lines[3])
    for kind in ("other tensors", "fails inside", "fails between"):
        said = run(4, _fails, kind)
        assert "nothing" not in said
        assert "imed out" not in "".join(said)  # nobody waited for the limit of the process group
        assert any("rank(s) [1]" in each for each in said), said


# -- which ranks are a node ---


def _chosen(rank: int, world_size: int, host: str) -> dict[str, str]:
    """Return the nodes chosen for the option; ``host`` names the machine of every rank."""
    found = {}
    startup.log_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(processes, "machine", lambda: f"{host[rank]} boot")
        for value in ("auto", 1, 2, 3):
            config = DataParallelConfig.model_validate({"nodes": value})
            try:
                found[str(value)] = str(layout_of(nodes_of(config, None)))
            except ConfigError as error:
                found[str(value)] = str(error)
            dist.barrier()
        config = DataParallelConfig()
        found["unsupported"] = str(layout_of(nodes_of(config, None, unsupported="a slot")))
        found["log"] = " ".join(lines)
    return found


@pytest.mark.slow
def test_nodes_are_machines_and_impossible_nodes_are_refused() -> None:
    equal = run(4, _chosen, "xxyy")
    assert equal[3]["auto"] == "[[0, 1], [2, 3]]"
    assert equal[3]["1"] == "[]"
    assert equal[0]["2"] == "[[0, 1], [2, 3]]"
    assert "dct.data_parallel.nodes = 3: 4 ranks" in equal[2]["3"]
    assert "set it to one of 1, 2, 4" in equal[2]["3"]
    assert equal[0]["unsupported"] == "[]"
    assert "nodes are not used with a slot" in equal[0]["log"]
    mixed = run(4, _chosen, "xyxy")
    assert mixed[1]["auto"] == "[[0, 2], [1, 3]]"
    assert "ranks 0-1 would be one node, but are on several machines" in mixed[1]["2"]
    unequal = run(4, _chosen, "xxxy")
    assert unequal[0]["auto"] == "[]"
    assert "nodes have different numbers of ranks (ranks 0-2 on x; rank 3 on y)" in unequal[0]["log"]
    assert run(4, _chosen, "xxxx")[0]["auto"] == "[]"
    assert run(4, _chosen, "wxyz")[0]["auto"] == "[]"


def _differs(rank: int, world_size: int, *nodes: int) -> None:
    section = {"sparsity": 0.9, "nodes": nodes[rank // 2]}
    model = DistributedDataParallel(network())
    DCTState({"data_parallel": section}, time_limit=20).register(model)
    model(torch.zeros(2, 100)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(2, 4), (1, 2)])  # with 1 the ranks agree in their first pass
def test_nodes_with_other_configurations_stop_at_start(nodes: tuple[int, int]) -> None:
    for kind, text in launch(4, _differs, *nodes):
        assert kind == "error"
        assert f"dct.data_parallel.nodes differs: {nodes[0]} on ranks 0-1; {nodes[1]} on ranks 2-3" in text
