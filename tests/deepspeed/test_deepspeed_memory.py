"""The memory that ``dct advise --memory`` prints, beside what ranks of real engines keep between steps.

Engines of torch's DDP and FSDP2 are here, too: the comparison is one.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import deepspeed_launch, given_times, with_local_feedback
from support.deepspeed_launch import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.fsdp import compress_replicas
from dct_plugin.policy.memory import Job, memory

deepspeed = pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

WIDTH, STEPS = 1024, 4
AHEAD = {"sparsity": 0.99, "feedback": "step_ahead", "warmup_steps": 1}
EXACT, INT8 = AHEAD | {"parameters": "exact"}, {"sparsity": 0.99, "residual_dtype": "int8"}
HPZ = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100}
#: Ranks, stage, keys of ``zero_optimization``, the training as the table has it, tensors of scratch.
CASES: dict[str, tuple[int, int, dict[str, Any], Job, int]] = {
    "DDP": (2, 0, {}, Job("", AHEAD, 2, weight_bytes=4.0, in_slots=False), 0),
    "FSDP2": (4, 0, {}, Job("", AHEAD, 2, 2, 4.0, 2, in_slots=False), 0),
    "ZeRO-0": (2, 0, {}, Job("", AHEAD, 2, weight_bytes=4.0, in_slots=False), 0),
    "ZeRO-1, exact updates": (2, 1, {}, Job("", EXACT, 2, shards=2, in_slots=False), 1),
    "ZeRO-2, int8 residuals": (2, 2, {}, Job("", EXACT | INT8, 2, shards=2, in_slots=False), 2),
    "ZeRO-3": (2, 3, {}, Job("", INT8 | {"feedback": "local"}, 2, shards=2, in_slots=False), 2),
    "ZeRO-3, copies in nodes": (
        *(4, 3, HPZ),
        Job("", EXACT | INT8 | {"nodes": 2}, 2, 2, 2.0, 2, shards=2, copies=True, in_slots=False),
        2,
    ),
}


def settings(host: str, stage: int, zero: dict[str, Any], dct: dict[str, Any] | None) -> dict[str, Any]:
    sizes = {"reduce_bucket_size": 6_553_600, **zero}
    section = None if dct is None else {"data_parallel": dct}
    if host != "DeepSpeed":
        return section or {}
    return deepspeed_launch.config(
        stage, "bf16" if stage else "fp32", dct=with_local_feedback(section), optimizer="AdamW", zero=sizes
    )


class Net(nn.Module):
    """Square matrices, and nothing else."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def held() -> int:
    """Return the bytes of all tensors and gradients."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    gradients = [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = [each.untyped_storage() for each in tensors + gradients]
    maps = [line.split(maxsplit=2) for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = [tuple(int(end, 16) for end in span.split("-")) for span, kind, _ in maps if kind.endswith("s")]
    sizes = {each.data_ptr(): each.nbytes() for each in storages}
    return sum(n for at, n in sizes.items() if not any(start <= at < stop for start, stop in shared))


def under_deepspeed(layers: int, config: dict[str, Any]) -> Any:
    model, dtype = Net(layers), torch.bfloat16 if "bf16" in config else torch.float32
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(2, WIDTH, dtype=dtype)))
        engine.step()
    return engine


def under_torch(host: str, layers: int, config: dict[str, Any]) -> Any:
    """Train under DDP, or under FSDP2 with replicas of two ranks; the configuration is a ``dct`` section."""
    model: Any = Net(layers)
    if host == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = None
    if config:
        if host == "FSDP2":
            state = compress_replicas(model, config, optimizer=optimizer)
        else:
            state = dct_plugin.attach(model, optimizer, config)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH)).backward()
        optimizer.step()
    return model, optimizer, state


def _held_after_training(host: str, layers: int, config: dict[str, Any]) -> int:
    """Return the bytes of all tensors and gradients, without memory that several processes map. One training
    a process: what is left of another one would count.
    """
    torch.set_num_threads(1)
    given_times.exact_updates_are_faster()
    deepspeed.init_distributed()
    trained = under_deepspeed(layers, config) if host == "DeepSpeed" else under_torch(host, layers, config)
    kept = held()
    del trained
    return kept


@pytest.mark.long
@pytest.mark.parametrize("layers", [24, 96])
@pytest.mark.parametrize("name", CASES)
def test_memory_is_what_a_rank_keeps(name: str, layers: int, tmp_path: Path) -> None:
    ranks, stage, zero, job, tensors = CASES[name]
    host = "DeepSpeed" if name.startswith("ZeRO") else name
    kept = []
    for kind, section in (("plain", None), ("dct", job.section)):
        config = settings(host, stage, zero, section)
        kept.append(run_ranks(ranks, _held_after_training, tmp_path / kind, host, layers, config))
    found = max(with_it - without for without, with_it in zip(*kept, strict=True))
    expected = memory(job, layers * WIDTH**2, width=WIDTH)
    del expected["updates"]  # they are there during a step
    # Beside the sums lies scratch memory: step-ahead's two parts, ten bytes for each entry of a record of
    # changes, and fp32 copies of the largest tensor.
    scratch = (8 << 20) + (10 << 20) * (job.section.get("parameters") == "exact") + 4 * tensors * WIDTH**2
    total = sum(expected.values())
    print(f"{name}: {found / 1e6:.1f} MB; {total / 1e6:.1f} MB, scratch {scratch / 1e6:.1f} MB")
    assert 0.95 * total < found < 1.05 * total + scratch, expected
