"""The settings that users get, on a GPU: step-ahead with AdamW, nodes, FSDP2, ZeRO, over gloo and over nccl.

All ranks share one device. nccl allows that from version 2.30 on; with an older one its cases are skipped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gpu import DEVICE, NCCL, NEEDS_GPU, run_on_gpu
from torch import nn

pytest.importorskip("triton", reason="needs triton")

import dct_plugin
from benchmarks.no_gpu import device_ids
from dct_plugin.data_parallel import pending_exchanges

pytestmark = [pytest.mark.slow, NEEDS_GPU]

#: A start of four dense steps, then four in which the density falls.
START = {"min_numel": 1000, "warmup_steps": 4, "sparsity_warmup_steps": 4}
STEPS = 24


BACKENDS = ["gloo", NCCL]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)]
    return nn.Sequential(*layers).cuda()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()


def _ddp(rank: int, world_size: int, section: Any) -> tuple[list[torch.Tensor], list[float], float]:
    """Return parameters, losses, and the largest displacement of a weight."""
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=device_ids())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if section is not None:
        dct_plugin.attach(wrapped, optimizer, {"data_parallel": section})
    losses, distance = [], 0.0
    for step in range(STEPS):
        kept, x = model[2].weight.detach().clone(), batch(step, rank)
        loss = (wrapped(x) - x.sin()).square().mean()
        distance = max(distance, float((model[2].weight.detach() - kept).abs().max()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return [p.detach().cpu() for p in model.parameters()], losses, distance


def assert_trained(outcomes: list[Any]) -> None:
    for parameters, losses, *_ in outcomes:
        assert all(torch.equal(*pair) for pair in zip(parameters, outcomes[0][0], strict=True))
        assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_with_adamw(backend: str, ranks: int) -> None:
    outcomes = run_on_gpu(backend, ranks, _ddp, {**START, "sparsity": 0.95})
    assert_trained(outcomes)
    assert all(0 < distance < 1 for _, _, distance in outcomes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ddp_at_sparsity_0_is_dense(backend: str) -> None:
    everything = {"sparsity": 0.0, "value_dtype": "fp32", "min_numel": 0}
    ((dense, *_), _), ((found, *_), _) = (run_on_gpu(backend, 2, _ddp, each) for each in (None, everything))
    assert all(torch.allclose(*pair, rtol=0, atol=1e-6) for pair in zip(dense, found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_nodes_of_two_ranks(backend: str) -> None:
    outcomes = run_on_gpu(backend, 4, _ddp, {**START, "sparsity": 0.95, "nodes": 2})
    assert_trained(outcomes)
    assert all(0 < distance < 1 for _, _, distance in outcomes)


def _ddp_that_waits_nowhere_else(rank: int, world_size: int) -> list[int]:
    """Return the reads of figures in each step; whatever else makes the host wait raises."""
    wrapped = nn.parallel.DistributedDataParallel(network(), device_ids=device_ids())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3, foreach=True)
    section = {"min_numel": 1000, "sparsity": 0.95, "warmup_steps": 0, "sparsity_warmup_steps": 0}
    dct_plugin.attach(wrapped, optimizer, {"data_parallel": section})
    reads, read_figures = [], pending_exchanges.read_figures

    def read(*arguments: Any) -> Any:
        reads[-1] += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read_figures(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("error" if len(reads) > 3 else "default")

    pending_exchanges.read_figures = read
    inputs = [batch(step, rank) for step in range(8)]
    for x in inputs:
        reads.append(0)
        if len(reads) > 3:  # the first steps exchange sizes, measure thresholds, and compile
            torch.cuda.set_sync_debug_mode("error")
        (wrapped(x) - x.sin()).square().mean().backward()
        torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        optimizer.zero_grad()
    return reads[3:]


@pytest.mark.parametrize("backend", [NCCL])  # gloo's messages go through the host
def test_ddp_waits_for_the_device_once_in_a_backward_pass(backend: str) -> None:
    assert run_on_gpu(backend, 2, _ddp_that_waits_nowhere_else) == [[1] * 5] * 2


def _fsdp(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dct_plugin.attach(model, optimizer, {"data_parallel": {**START, "sparsity": 0.95}})
    losses = []
    for step in range(STEPS):
        x = batch(step, rank)
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return [p.full_tensor().detach().cpu() for p in model.parameters()], losses


@pytest.mark.parametrize("backend", [NCCL])
def test_fsdp2_with_adamw(backend: str) -> None:
    assert_trained(run_on_gpu(backend, 4, _fsdp))


def _deepspeed(rank: int, world_size: int, stage: int, dct: Any, precision: str = "bf16") -> tuple[Any, ...]:
    """Return parameters, losses, the number of skipped steps and the loss scales."""
    import deepspeed

    from dct_plugin.integrations.autoload import autoload

    autoload()  # an installation calls it at `import torch`; these tests do without one
    model = network()
    # The scale is too large at first.
    scaling = {"initial_scale_power": 32, "hysteresis": 1} if precision == "fp16" else {}
    section = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        precision: {"enabled": True, **scaling},
        "zero_optimization": {"stage": stage},
        "dct": {"data_parallel": dct},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=section)
    losses, scales = [], []
    for step in range(STEPS + 16 * (precision == "fp16")):
        x = batch(step, rank).to(next(model.parameters()).dtype)
        loss = (engine(x) - x.sin()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        scales.append(float(getattr(engine.optimizer, "loss_scale", 1.0)))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        parameters = [p.detach().cpu().clone() for p in model.parameters()]
    return parameters, losses, int(engine.skipped_steps), scales


@pytest.mark.parametrize("backend", [NCCL])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_with_adamw(backend: str, stage: int) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    assert_trained(run_on_gpu(backend, 2, _deepspeed, stage, {**START, "sparsity": 0.95}))


@pytest.mark.parametrize("backend", [NCCL])
def test_deepspeed_in_fp16_skips_steps_until_the_loss_scale_fits(backend: str) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    outcomes = run_on_gpu(backend, 2, _deepspeed, 1, {**START, "sparsity": 0.95}, "fp16")
    assert_trained(outcomes)
    for _, _, skipped, scales in outcomes:
        assert skipped > 0
        assert scales[-1] < scales[0]


@pytest.mark.parametrize("backend", [NCCL])
def test_deepspeed_with_updates_of_weights(backend: str) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    outcomes = run_on_gpu(
        backend, 2, _deepspeed, 2, {**START, "sparsity": 0.95, "parameters": {"sparsity": 0.9}}
    )
    assert_trained(outcomes)


def _megatron(rank: int, world_size: int, distributed_optimizer: bool) -> Any:
    from support.megatron_gpt import Job, train_all

    job = Job(
        bf16=True, overlap_grad_reduce=True, distributed_optimizer=distributed_optimizer, steps=STEPS,
        device=DEVICE,
    )  # fmt: skip
    (outcome,) = train_all(
        rank, world_size, [replace(job, dct={"data_parallel": {**START, "sparsity": 0.9}})]
    )
    return outcome


@pytest.mark.parametrize("backend", [NCCL])  # gloo has no coalesced collectives of CUDA tensors
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_megatron_with_adam(backend: str, distributed_optimizer: bool) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    outcomes = run_on_gpu(backend, 2, _megatron, distributed_optimizer)
    assert outcomes[0].losses[-1] < outcomes[0].losses[0]
    assert outcomes[0].parameters == outcomes[1].parameters or distributed_optimizer
