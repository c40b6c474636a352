"""One rank of the soak: trains with checkpoints, goes on from the last one.

The environment names rank, world size and address, as torchrun's does. The last line is JSON: a digest of the
parameters, and resident memory in MiB after the first and the last quarter of the steps.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from failing_rank import Loss
from torch import nn

from dct_plugin.config import DCTConfig

SECTION = {"data_parallel": {"sparsity": 0.95, "min_numel": 100, "warmup_steps": 2, "verify": {"every": 5}}}
#: Model, first step, what makes a step and what saves under a tag.
Run = tuple[nn.Module, int, Callable[[int], None], Callable[[str], None]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 64), nn.Tanh(), nn.Linear(64, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def prepare(host: str) -> None:
    """What a host needs beyond its modules, in the process that ranks are forked from."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if host == "megatron":
        from support import megatron_cpu

        megatron_cpu.install()
        megatron_cpu.patch_megatron()


def deepspeed_run(stage: int, folder: Path, limit: timedelta | None) -> Run:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "dct": SECTION,
    }
    model = network()
    deepspeed.init_distributed(**({"timeout": limit} if limit else {}))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if (folder / "latest").exists():
        assert engine.load_checkpoint(str(folder))[0] is not None

    def step(number: int) -> None:
        engine.backward(engine(batch(number, dist.get_rank())).square().mean())
        engine.step()

    return engine.module, engine.global_steps, step, lambda tag: engine.save_checkpoint(str(folder), tag)


def ddp_run(folder: Path, *, per_node: int) -> Run:
    from dct_plugin import DCTState

    dist.init_process_group("gloo")
    model = network()
    ddp = nn.parallel.DistributedDataParallel(model)
    section = {"data_parallel": {**SECTION["data_parallel"], "nodes": per_node}}
    state = DCTState(section, named_parameters=model.named_parameters())
    state.register(ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    latest, first = folder / "latest", 0
    if latest.exists():
        tag = folder / latest.read_text()
        saved = torch.load(tag / "model.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert state.load(tag)
        first = saved["step"]
    done = first

    def step(number: int) -> None:
        nonlocal done
        optimizer.zero_grad()
        ddp(batch(number, dist.get_rank())).square().mean().backward()
        optimizer.step()
        done = number + 1

    def save(tag: str) -> None:
        state.save(folder / tag)
        if dist.get_rank() == 0:
            content: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**content, "step": done}, folder / tag / "model.pt")
            name(tag, folder)
        dist.barrier()

    return model, first, step, save


def megatron_run(folder: Path) -> Run:
    """Data-parallel ranks; of four, two and two share a part of every layer (tensor parallelism)."""
    from megatron.core import parallel_state, tensor_parallel

    from benchmarks import megatron_gpt
    from dct_plugin.integrations.megatron import hooks

    dist.init_process_group("gloo")
    hooks.install(DCTConfig.parse(SECTION))
    parallel_state.initialize_model_parallel(dist.get_world_size() // 2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = megatron_gpt.transformer_config(layers=1, hidden=32, heads=2)
    model, optimizer, train = megatron_gpt.training(config, 1, 4, length=16, vocabulary=64)
    latest, first = folder / "latest", 0
    own = f"rank{dist.get_rank()}.pt"
    if latest.exists():
        tag = folder / latest.read_text()
        saved = torch.load(tag / own, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert hooks.load_checkpoint(tag)
        first = saved["step"]
    done = first

    def step(number: int) -> None:
        nonlocal done
        generator = torch.Generator().manual_seed(1000 * number + parallel_state.get_data_parallel_rank())
        tokens = torch.randint(64, (4, 17), generator=generator)
        train(iter([tokens]))
        done = number + 1

    def save(tag: str) -> None:
        hooks.save_checkpoint(folder / tag)
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        torch.save(content, folder / tag / own)
        dist.barrier()
        if dist.get_rank() == 0:
            name(tag, folder)
        dist.barrier()

    return model, first, step, save


def name(tag: str, folder: Path) -> None:
    """The checkpoint to go on from is the one under ``tag``."""
    (folder / "latest.new").write_text(tag)
    (folder / "latest.new").replace(folder / "latest")


def run(host: str, folder: Path, steps: int) -> None:
    """Train as one rank until ``steps`` have been made."""
    loss = Loss(folder)
    if host in ("ddp", "nodes"):
        made = ddp_run(folder, per_node=2 if host == "nodes" else 1)
    elif host == "megatron":
        made = megatron_run(folder)
    else:
        made = deepspeed_run(int(host.removeprefix("zero")), folder, loss.limit)
    model, first, step, save = made
    memory: list[float] = []
    for number in range(first, steps):
        loss.step = number
        step(number)
        (folder / "alive").touch()
        if number % 3 == 2:
            save(f"tag{number // 3 % 2}")  # written over again and again, but never the one that is named
        if number in (first + (steps - first) // 4, steps - 1):
            memory.append(psutil.Process().memory_info().rss / 2**20)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    part = 0
    if host == "megatron":
        from megatron.core import parallel_state

        part = parallel_state.get_tensor_model_parallel_rank()
    used = [round(value, 1) for value in memory]
    print(json.dumps({"digest": digest, "part": part, "memory": used}), flush=True)
    dist.barrier()
