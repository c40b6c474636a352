"""Replicas that drift apart, gradients that are not finite, and residuals of a single rank."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.processes import launch, logged, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin import DCTState, dct_hook
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.checksums import checksum
from dct_plugin.errors import DesyncError
from dct_plugin.integrations.host.replica_checksums import ReplicaChecksums


@pytest.mark.parametrize("numel", [1000, 9000])  # without and with whole rows of words
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_checksum_sees_every_bit(dtype: torch.dtype, numel: int) -> None:
    for first in (0, 1):  # aligned to words, and not
        weight = torch.randn(numel + 1).to(dtype)[first : first + numel]
        own = int(checksum(weight))
        bits = weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
        for at, bit in ((0, 0), (numel - 1, 7), (numel // 2, 8 * weight.element_size() - 2)):
            bits[at] ^= 1 << bit
            assert int(checksum(weight)) != own
            bits[at] ^= 1 << bit
        assert int(checksum(weight)) == own == int(checksum(weight.clone()))
        assert int(checksum(weight.flip(0))) != own
    assert int(checksum(torch.empty(0))) == 0


def _drifts(rank: int, world_size: int, action: str, ahead: bool) -> tuple[list[str], torch.Tensor]:
    """One bit of one parameter changes on rank 1 after the third step."""
    with logged() as lines:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 1))
        ddp = DistributedDataParallel(model)
        keys: dict[str, Any] = {"sparsity": 0.9, "min_numel": 100, "verify": {"every": 2, "action": action}}
        if ahead:
            keys["feedback"] = "step_ahead"
        state = DCTState({"data_parallel": keys}, named_parameters=model.named_parameters())
        ddp.register_comm_hook(state, dct_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if ahead:
            state.step_ahead(model, optimizer)
        for step in range(6):
            x = torch.randn(8, 60, generator=torch.Generator().manual_seed(10 * rank + step))
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
            if step == 2 and rank == 1:
                with torch.no_grad():
                    model[2].weight.view(torch.int32)[0, 5] ^= 1
    return lines, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 1))


KEYS: dict[str, Any] = {"sparsity": 0.9, "min_numel": 10, "verify": {"every": 2, "action": "stop"}}


class _MomentumEncoder(nn.Module):
    """A frozen copy and a mean that follow the weights in the forward pass; and figures of each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(16, 64), nn.Linear(16, 64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("spectrum", torch.zeros(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, followed in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.lerp_(followed, 0.1)
            self.mean.lerp_(self.query.weight.mean(1), 0.1)
        return self.norm(self.query(x))


def _follows_displaced_weights(rank: int, world_size: int) -> list[str]:
    model = _MomentumEncoder()
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    section = {"sparsity": 0.9, "min_numel": 10, "warmup_steps": 2, "sparsity_warmup_steps": 0}
    with logged() as lines:
        state = dct_plugin.attach(ddp, optimizer, {"data_parallel": {**section, "feedback": "step_ahead"}})
        for step in range(105):
            if step == 20 and rank:
                with torch.no_grad():
                    model.norm.weight += 1.0
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    assert state is not None
    assert sum(each.seconds for each in state.steps.replicas) > 0
    return [line for line in lines if "tensors differ" in line]


@pytest.mark.slow
def test_by_default_all_that_was_equal_is_compared_and_named_once() -> None:
    (first, second), others = run(2, _follows_displaced_weights)
    assert not others
    assert "tensors differ between the ranks after step 12: key.weight on" in first
    assert all(name in first for name in ("key.bias", "mean", "with dct_plugin.data_parallel.weights(model)"))
    assert not any(name in first for name in ("norm", "spectrum", "query"))
    assert "after step 102: norm.weight on" in second


def _under_ddp(rank: int) -> None:
    """DDP reduces nothing of a layer that is trained only after it was wrapped: the ranks drift apart."""
    model = _backbone()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    dct_plugin.attach(ddp, optimizer, {"data_parallel": KEYS})
    for step in range(6):
        if step == 2:
            model[0].requires_grad_()
            optimizer.add_param_group({"params": model[0].parameters()})
        optimizer.zero_grad()
        ddp(torch.ones(8, 60) * (rank + 1)).square().mean().backward()
        optimizer.step()


def _under_fsdp(rank: int) -> None:
    """FSDP ignores a layer, which every rank trains by itself."""
    model, mesh = _backbone(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, ignored_params=set(model[0].parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    dct_plugin.attach(model, optimizer, {"data_parallel": KEYS})
    for step in range(6):
        if step == 2:
            model[0].requires_grad_()
        optimizer.zero_grad()
        model(torch.ones(8, 60) * (rank + 1)).square().mean().backward()
        optimizer.step()


def _under_deepspeed(rank: int) -> None:
    """DeepSpeed's optimizer does not have a layer, which the script trains by itself."""
    import deepspeed

    model = _backbone()
    configuration = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 1},
        "dct": {"data_parallel": {**KEYS, "feedback": "local"}},
    }
    own = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=own, config=configuration, dist_init_required=False)[
        0
    ]
    for step in range(6):
        engine.backward(engine(torch.ones(8, 60) * (rank + 1)).square().mean())
        engine.step()
        with torch.no_grad():
            for parameter in model[0].parameters() if step == 2 else ():
                parameter += rank


def _unknown_layers(rank: int, world_size: int) -> list[str]:
    found = []
    for trains in (_under_ddp, _under_fsdp, _under_deepspeed):
        with pytest.raises(DesyncError) as error:
            trains(rank)
        found.append(str(error.value))
    return found


@pytest.mark.slow
def test_a_layer_that_the_framework_does_not_reduce_is_named() -> None:
    for found in run(2, _unknown_layers):
        for text in found:
            assert "parameters differ between the ranks after step 4" in text
            assert "0.bias on ranks 0, 1 (no majority)" in text
            assert "0.weight" in text


def _taken_over(lines: list[str]) -> list[str]:
    return [line for line in lines if "took over" in line]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_drifted_parameter_stops_all_ranks(ahead: bool) -> None:
    for rank, (kind, text) in enumerate(launch(3, _drifts, "stop", ahead)):
        assert kind == "error"
        words = "parameters differ between the ranks after step 4: 2.weight on rank(s) 1"
        assert f"DesyncError: rank {rank}: {words}" in text


@pytest.mark.slow
def test_a_drifted_parameter_is_taken_over_from_the_first_rank() -> None:
    results = run(3, _drifts, "resync", False)
    assert all(torch.equal(weights, results[0][1]) for _, weights in results)
    (line,) = _taken_over(results[0][0])
    assert "2.weight on rank(s) 1; all took over those of rank 0" in line
    assert not _taken_over(results[1][0])


def _view_with_gaps(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight is some columns of a matrix, whose other columns are of each rank."""
    matrix = torch.arange(32.0).view(4, 8) + 100 * rank
    config = DataParallelConfig.of({"verify": {"every": 1, "action": "resync"}})
    ReplicaChecksums(config, lambda: [("columns", matrix[:, :3])]).check(5)
    return matrix[:, :3], matrix[:, 3:]


@pytest.mark.slow
def test_a_view_with_gaps_is_taken_over_and_nothing_beside_it() -> None:
    first, second = run(2, _view_with_gaps)
    assert torch.equal(second[0], first[0])
    assert torch.equal(second[1], first[1] + 100)


def _drifts_in_megatron(rank: int, world_size: int, job: Any, master: bool) -> tuple[str, list[str]]:
    """One bit changes on rank 1 after the third step: of a weight, or of what a weight is rounded from; or of
    a layer that is trained only then.
    """
    from support.megatron_gpt import train

    from dct_plugin.integrations.megatron import hooks
    from dct_plugin.integrations.megatron.buckets import ranks_of
    from dct_plugin.integrations.megatron.data import replicated

    def flip(training: Any, step: int) -> None:
        if step == 2 and (rank == 1 or job.prepare is not None):
            session = hooks.current()
            assert session is not None
            hook: Any = session.hooks[0]
            if job.prepare is not None:
                (model,) = hook.models
                weight = next(p for p in model.parameters() if not p.requires_grad)
                weight.data.view(torch.int32)[0, 3] ^= rank
                weight.requires_grad_()
                return
            (ranks,) = {ranks_of(group) for group in hook.models.groups()}
            weights = dict(replicated(hook.models, ranks))
            name = "final_layernorm.weight (fp32 copy)" if master else "final_layernorm.weight"
            (weight,) = (weight for key, weight in weights.items() if key.endswith(name))
            weight.view(torch.int32 if weight.element_size() == 4 else torch.int16)[3] ^= 1

    torch.set_num_threads(1)
    with logged() as lines:
        return train(replace(job, after_step=flip)).parameters, lines


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_a_drifted_parameter_of_megatron() -> None:
    from support.megatron_gpt import Job, freeze_linears

    data = {"sparsity": 0.9, "min_numel": 256, "verify": {"every": 2}}
    section = {"data_parallel": data}
    job = Job(layers=1, steps=6)
    for rank, (kind, text) in enumerate(launch(2, _drifts_in_megatron, job.with_dct(section), False)):
        assert kind == "error"
        words = "parameters differ between the ranks after step 4: 0.decoder.final_layernorm.weight on"
        assert f"DesyncError: rank {rank}: {words}" in text
    unfrozen = replace(job.with_dct(section), prepare=freeze_linears)
    for kind, text in launch(2, _drifts_in_megatron, unfrozen, False):
        assert kind == "error"
        assert "parameters differ between the ranks after step 4: 0.decoder.layers.0." in text
    resync = {**section, "data_parallel": {**data, "verify": {"every": 2, "action": "resync"}}}
    first, second = run(2, _drifts_in_megatron, job.with_dct(resync, bf16=True), True)
    assert first[0] == second[0]
    (line,) = _taken_over(first[1])
    assert "0.module.decoder.final_layernorm.weight (fp32 copy) on ranks 0, 1 (no majority)" in line
    assert not _taken_over(second[1])
    # Under the distributed optimizer every rank has its own part of the masters.
    sharded = job.with_dct(resync, bf16=True, distributed_optimizer=True)
    first, second = run(2, _drifts_in_megatron, sharded, False)
    assert first[0] == second[0]


def _poisons(rank: int, world_size: int, exchange: str) -> list[str]:
    with logged() as lines:
        reducer = GradientReducer(DataParallelConfig(sparsity=0.9, exchange=exchange))
        for step in range(3):
            gradients = {"fc.weight": torch.ones(40_000), "fc.bias": torch.ones(10)}
            if rank == 1 and step > 0:
                gradients["fc.weight"][7] = float("nan")
            reducer.all_reduce(list(gradients.items()))
            reducer.end_step()
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
def test_a_gradient_that_is_not_finite_is_named_once_where_it_was(exchange: str) -> None:
    first, second, third = run(3, _poisons, exchange)
    assert first == third == []
    (line,) = second
    assert line.startswith("dct: rank 1: the gradient of fc.weight is not finite in step 1 and reaches all")


def _alone(rank: int, world_size: int) -> list[torch.Tensor]:
    """A single rank that goes on where two had residuals; its first step is skipped, the scale halves."""
    reducer = GradientReducer(DataParallelConfig(sparsity=0.9), transactional=True, loss_scale=4.0)
    stream = {
        "threshold": {"tau": 0.0, "step": 1, "age": 0, "refreshes": 0, "density": 0.1, "out_of_band": False},
        "residual": torch.full((5000,), 8.0),
        "shape": None,
    }
    reducer.load_state_dict({"step": 3, "loss_scale": 4.0, "streams": {"weight": stream}})
    seen = []
    for step in range(4):
        gradient = torch.ones(5000)
        reducer.all_reduce([("weight", gradient)])
        seen.append(gradient)
        reducer.end_step(skipped=step == 0, loss_scale=2.0)
    return seen


@pytest.mark.slow
def test_a_single_rank_applies_its_residual_once() -> None:
    (seen,) = run(1, _alone)
    assert [float(gradient.unique()) for gradient in seen] == [9.0, 5.0, 1.0, 1.0]
