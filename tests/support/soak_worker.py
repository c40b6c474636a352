"""One rank of the soak: trains with checkpoints, goes on from the last one. HOST FOLDER STEPS.

The environment names rank, world size and address, as torchrun's does. The last line is JSON: a digest of the
parameters, and resident memory in MiB after the first and the last quarter of the steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

SECTION = {"data_parallel": {"sparsity": 0.95, "min_numel": 100, "warmup_steps": 2, "verify_every": 5}}
#: Model, first step, what makes a step and what saves under a tag.
Run = tuple[nn.Module, int, Callable[[int], None], Callable[[str], None]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 64), nn.Tanh(), nn.Linear(64, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def deepspeed_run(
    stage: int, folder: Path
) -> tuple[nn.Module, int, Callable[[int], None], Callable[[str], None]]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "dct": SECTION,
    }
    model = network()
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if (folder / "latest").exists():
        assert engine.load_checkpoint(str(folder))[0] is not None

    def step(number: int) -> None:
        engine.backward(engine(batch(number, dist.get_rank())).square().mean())
        engine.step()

    return engine.module, engine.global_steps, step, lambda tag: engine.save_checkpoint(str(folder), tag)


def ddp_run(folder: Path) -> Run:
    from dct_plugin.data_parallel import DCTState, dct_hook

    dist.init_process_group("gloo")
    model = network()
    ddp = nn.parallel.DistributedDataParallel(model)
    state = DCTState(SECTION, named_parameters=model.named_parameters())
    ddp.register_comm_hook(state, dct_hook)
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
            (folder / "latest.new").write_text(tag)
            (folder / "latest.new").replace(latest)
        dist.barrier()

    return model, first, step, save


def main(host: str, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    run = ddp_run(folder) if host == "ddp" else deepspeed_run(int(host.removeprefix("zero")), folder)
    model, first, step, save = run
    memory: list[float] = []
    for number in range(first, steps):
        step(number)
        (folder / "alive").touch()
        if number % 3 == 2:
            save(f"tag{number // 3 % 2}")  # written over again and again, but never the one that is named
        if number in (first + (steps - first) // 4, steps - 1):
            memory.append(psutil.Process().memory_info().rss / 2**20)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    print(json.dumps({"digest": digest, "memory": [round(value, 1) for value in memory]}), flush=True)
    dist.barrier()
    os._exit(0)  # ranks that take down their connections while others still use them can abort them


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
