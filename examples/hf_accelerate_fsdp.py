"""A training loop with Accelerate's FSDP2, replicated over two nodes, and compressed gradients between them.

    torchrun --nproc-per-node 4 examples/hf_accelerate_fsdp.py

``dp_replicate_size`` is the number of nodes, ``dp_shard_size`` that of the ranks in a node.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn

from dct_plugin.fsdp import compress_replicas


def batches(steps, size=32):
    """Points and the sum of some of their coordinates, squared."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(steps * size * 4, 64, generator=generator)
    data = torch.utils.data.TensorDataset(points, points[:, :8].square().sum(1, keepdim=True) / 8)
    return torch.utils.data.DataLoader(data, batch_size=size)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)

    ranks = int(os.environ["WORLD_SIZE"]) // options.nodes
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="size_based_wrap",
            min_num_params=10_000,
            cpu_ram_efficient_loading=False,
        ),
        parallelism_config=ParallelismConfig(dp_replicate_size=options.nodes, dp_shard_size=ranks),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(options.steps))
    section = {"data_parallel": {"sparsity": options.sparsity, "feedback": "step_ahead", "warmup_steps": 6}}
    compression = compress_replicas(model, section, optimizer=optimizer)

    losses = []
    for points, wanted in loader:
        loss = nn.functional.mse_loss(model(points), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(
        f"loss {sum(losses[:5]) / 5:.4f} in the first steps, {sum(losses[-5:]) / 5:.4f} in the last"
    )
    return compression, losses


if __name__ == "__main__":
    main()
