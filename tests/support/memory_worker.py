"""Training script of the memory tests: what a rank keeps after a few steps of DeepSpeed, torch DDP or FSDP2.

    torchrun --nproc-per-node 2 tests/support/memory_worker.py plan.json results

``plan.json`` holds one run ``{"id", "host", "config", "layers"}``: what is left of another one would count.
Every rank writes ``results/<rank>.json`` with the bytes of all tensors and gradients, without memory that
several processes map.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import given_times
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.fsdp import compress_replicas

WIDTH, STEPS = 1024, 4


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


def under_deepspeed(run: dict[str, Any]) -> Any:
    config, dtype = run["config"], torch.bfloat16 if "bf16" in run["config"] else torch.float32
    model = Net(run["layers"])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(2, WIDTH, dtype=dtype)))
        engine.step()
    return engine


def under_torch(run: dict[str, Any]) -> Any:
    """Train under DDP, or under FSDP2 with replicas of two ranks; the configuration is a ``dct`` section."""
    model: Any = Net(run["layers"])
    if run["host"] == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = None
    if run["config"]:
        if run["host"] == "FSDP2":
            state = compress_replicas(model, run["config"], optimizer=optimizer)
        else:
            state = dct_plugin.attach(model, optimizer, run["config"])
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH)).backward()
        optimizer.step()
    return model, optimizer, state


def main(plan: str, folder: str) -> None:
    torch.set_num_threads(1)
    given_times.exact_updates_are_faster()
    deepspeed.init_distributed()
    (run,) = json.loads(Path(plan).read_text())
    trained = (under_deepspeed if run["host"] == "DeepSpeed" else under_torch)(run)
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps({run["id"]: held()}))
    del trained
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
