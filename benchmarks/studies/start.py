"""Measure what the start costs a run whose length the plugin is not told: loss and bytes of the whole run.

torch DDP, two ranks, ``adam.py``'s GPT and text, AdamW under ``OneCycleLR`` with its peak at 2e-3, batches of
8 x 64 characters per rank, no clipping. Held-out loss in nats per character, paired with the dense run of the
seed; bytes are all messages of the run, against fp32 gradients.

    python benchmarks/studies/start.py --text wikitext2_valid.txt.gz --steps 300 600 1200 --seeds 0 1 2
    python benchmarks/studies/start.py --text wikitext2_valid.txt.gz --steps 4800 --seeds 0

``--results`` keeps every run at once.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import adam
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.links.team import free_port

#: Settings of the start; None trains dense.
SETTINGS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "default": {},
    "60 + 180": {"warmup_steps": 60, "sparsity_warmup_steps": 180},
    "power 1.5": {
        "warmup_steps": 60,
        "sparsity_warmup_steps": 1232,
        "expert": {"ramp": "power"},
    },
    "60 + 400": {"warmup_steps": 60, "sparsity_warmup_steps": 400},
}


def train(setting: str, steps: int, seed: int, data: tuple[Any, Any]) -> dict[str, Any]:
    """Make one run on this rank; return its loss and bytes."""
    training, held_out = data
    model = adam.model_of(seed)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    section, state = SETTINGS[setting], None
    if section is not None:
        state = dct_plugin.attach(ddp, optimizer, {"data_parallel": {"sparsity": 0.99, **section}})
    generator, offsets = torch.Generator().manual_seed(seed), torch.arange(adam.SEQUENCE)
    for _ in range(steps):
        starts = torch.randint(len(training) - adam.SEQUENCE - 1, (2, adam.BATCH), generator=generator)
        where = starts[dist.get_rank()][:, None] + offsets
        logits = ddp(training[where]).view(-1, adam.SYMBOLS)
        functional.cross_entropy(logits, training[where + 1].view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    row = {"steps": steps, "seed": seed, "setting": setting, "loss": adam.held_out_loss(model, held_out)}
    if state is not None:
        classes: dict[str, Any] = state.metrics.summary().classes
        dense = 4 * steps * sum(parameter.numel() for parameter in model.parameters())
        row["times_fewer"] = dense / sum(part.sent_bytes for part in classes.values())
        dct_plugin.detach(state)
    return row


def _rank(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data = adam.text_of(options.text)
    for steps in options.steps:
        for seed in options.seeds:
            for setting in options.settings:
                row = json.dumps(train(setting, steps, seed, data))
                if rank == 0:
                    print(row, flush=True)
                    if options.results is not None:
                        with options.results.open("a") as file:
                            file.write(row + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 600, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--results", type=Path)
    mp.spawn(_rank, (free_port(), parser.parse_args()), nprocs=2)


if __name__ == "__main__":
    main()
