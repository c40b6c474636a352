"""FSDP2 with replicas (HSDP): nodes exchange thresholded gradients, and the ranks of a node shard as before.

    torchrun --nproc-per-node 4 examples/hsdp.py
    torchrun --nproc-per-node 4 examples/hsdp.py --resume --folder checkpoint

Here four processes stand for two nodes of two ranks. Checkpoints hold the residuals, and another mesh
can load them.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dct_plugin.fsdp import compress_replicas


def batch(step, size=32):
    """Points and the sum of some of their coordinates, squared."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    points = torch.randn(size, 64, generator=generator)
    return points, points[:, :8].square().sum(1, keepdim=True) / 8


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="for a checkpoint at the end")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    shape = (options.nodes, dist.get_world_size() // options.nodes)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    section = {"data_parallel": {"sparsity": options.sparsity, "feedback": "step_ahead", "warmup_steps": 6}}
    compression = compress_replicas(model, section, optimizer=optimizer)

    if options.resume:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=options.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        compression.load(options.folder)

    losses = []
    for step in range(compression.steps.step, compression.steps.step + options.steps):
        points, wanted = (each.to(device) for each in batch(step))
        loss = nn.functional.mse_loss(model(points), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    if dist.get_rank() == 0:
        first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
        print(f"loss {first:.4f} in the first steps, {last:.4f} in the last")

    if options.folder:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states, "dct": compression}, checkpoint_id=options.folder)
    return compression, losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
