"""A recommender: embedding tables sharded over the ranks, MLPs in DistributedDataParallel, both compressed.

    torchrun --nproc-per-node 2 examples/sharded_tables.py --export recommender.pt

It trains on made-up clicks. ``--export`` writes whole tables and MLPs to one file, for a single process.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.config import DCTConfig
from dct_plugin.embedding import ShardedTables

ROWS, DENSE, WIDTH, BATCH = [20_000, 3_000, 200, 50], 8, 16, 256
SECTION = {
    "data_parallel": {"sparsity": 0.99},  # gradients of the MLPs; the rest follows from the optimizer
    "embedding": {"error_bound": 0.01, "gradient_bound": 0.1},  # vectors of the tables and their gradients
}
UNCOMPRESSED = {"data_parallel": {"sparsity": 0.0, "value_dtype": "fp32"}, "embedding": {"enabled": False}}


class MLPs(nn.Module):
    """Dense features and one vector per table to a logit."""

    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 128), nn.ReLU(), nn.Linear(128, WIDTH), nn.ReLU())
        inputs = (len(ROWS) + 1) * WIDTH
        self.top = nn.Sequential(
            nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense, vectors):
        return self.top(torch.cat([self.bottom(dense), vectors.flatten(1)], dim=1)).squeeze(1)


class Clicks:
    """Made-up data: what a row likes, and what the dense features say, decide about a click."""

    def __init__(self, seed):
        shared = torch.Generator().manual_seed(1)
        self.likes = [torch.randn(rows, generator=shared) for rows in ROWS]
        self.weights = torch.randn(DENSE, generator=shared)
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size=BATCH):
        dense = torch.randn(size, DENSE, generator=self.generator)
        # Few rows are asked for often, as in real logs.
        ids = [(torch.rand(size, generator=self.generator) ** 4 * rows).long() for rows in ROWS]
        score = dense @ self.weights / 2 + sum(like[i] for like, i in zip(self.likes, ids, strict=True))
        return dense, torch.stack(ids, dim=1), (score > 0).float()


def load(file):
    """The exported model in one process."""
    saved = torch.load(file)
    mlps = MLPs()
    mlps.load_state_dict(saved["mlps"])
    tables = nn.ModuleList(nn.Embedding.from_pretrained(table) for table in saved["tables"])
    return lambda dense, ids: mlps(dense, torch.stack([t(ids[:, i]) for i, t in enumerate(tables)], dim=1))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--dense", action="store_true", help="send everything, to compare")
    parser.add_argument("--export", help="file for the trained model")
    options = parser.parse_args(arguments)

    section = UNCOMPRESSED if options.dense else SECTION
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank draws the same model, and keeps its own tables
    tables = ShardedTables(ROWS, WIDTH, config=DCTConfig.parse(section).embedding)  # int [B, 4] -> [B, 4, 16]
    mlps = DistributedDataParallel(MLPs())
    of_tables = torch.optim.Adagrad(
        tables.parameters(), lr=0.1
    )  # their gradients are complete at their owner
    of_mlps = torch.optim.Adam(mlps.parameters(), lr=3e-3)
    state = dct_plugin.attach(mlps, of_mlps, section, total_steps=options.steps)
    tables.metrics = state.metrics  # one summary for both
    tables.follow(of_tables)

    clicks = Clicks(seed=2 + dist.get_rank())
    for step in range(options.steps):
        dense, ids, clicked = clicks.batch()
        loss = binary_cross_entropy_with_logits(mlps(dense, tables(ids)), clicked)
        for optimizer in (of_tables, of_mlps):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (of_tables, of_mlps):
            optimizer.step()
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    whole = tables.gather_tables()  # a collective; None except on rank 0
    if whole is not None and options.export:
        torch.save({"tables": whole["tables"], "mlps": mlps.module.state_dict()}, options.export)
        dense, ids, clicked = Clicks(seed=0).batch(20_000)
        loss = binary_cross_entropy_with_logits(load(options.export)(dense, ids), clicked)
        print(f"{options.export}: loss {loss.item():.3f} on clicks that it has not seen")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
