"""A small network under torch DDP, whose ranks may be killed and whose number may change.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 3 --max-restarts 3 examples/elastic_ddp.py --folder checkpoints
    torchrun --nnodes 2:3 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/elastic_ddp.py --folder SHARED

torchrun restarts all ranks when one is lost, or when a node joins. They continue from the last checkpoint,
and every rank gets the mean of the residuals.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dct_plugin


def batch(step, rank, size=32):
    """Return points, others on every rank and in every step, and a function of them."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    points = torch.randn(size, 64, generator=generator)
    return points, points[:, :8].square().sum(1, keepdim=True) / 8


def save(folder, step, model, optimizer, state):
    """Write a checkpoint, complete or not at all: ``latest`` names it when all of it is there."""
    place = folder / f"step{step}"
    state.save(place)  # residuals, on all ranks
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place / "model.pt")
        (folder / "latest.new").write_text(str(step))
        os.replace(folder / "latest.new", folder / "latest")


def load(folder, model, optimizer, state):
    """Load the last checkpoint, of any number of ranks; return its step."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    saved = torch.load(folder / f"step{step}" / "model.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load(folder / f"step{step}")
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints, shared by all ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seconds", type=float, default=0.0, help="least time that a step takes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    section = {"data_parallel": {"warmup_steps": 5, "sparsity_warmup_steps": 10}}
    state = dct_plugin.attach(model, optimizer, section)
    first = load(options.folder, model, optimizer, state)
    for step in range(first, options.steps):
        points, wanted = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(model(points), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.every == 0:
            save(options.folder, step + 1, model, optimizer, state)
        time.sleep(options.seconds)
    digest = sum(p.double().sum().item() for p in model.parameters())
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: steps {first} to {options.steps}, "
        f"loss {loss.item():.3f}, weights {digest!r}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
