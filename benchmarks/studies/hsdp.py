"""Measure the loss of thresholded gradients between nodes under FSDP2, with the GPT and data of ``adam.py``.

Two nodes of one rank are two ranks of torch DDP (bitwise, ``tests/fsdp/test_fsdp.py``). Two nodes of two
ranks are as many compressors on the same sequences: each rank takes half of its node's.

    torchrun --nproc-per-node 2 benchmarks/studies/hsdp.py --text wikitext2_valid.txt.gz --results runs.jsonl
    torchrun --nproc-per-node 4 benchmarks/studies/hsdp.py --text wikitext2_valid.txt.gz --results runs.jsonl

``--results`` keeps every run at once; the last command prints the table of all runs in it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adam import BATCH, SEQUENCE, SETTINGS, SYMBOLS, held_out_loss, model_of, text_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from dct_plugin.config import MetricsConfig
from dct_plugin.fsdp import compress_replicas
from dct_plugin.metrics import Metrics

NODES = 2


def sharded(seed: int) -> torch.nn.Module:
    """The GPT, over all ranks as nodes and ranks in a node."""
    shape = (NODES, dist.get_world_size() // NODES)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = model_of(seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ratio_of(classes: dict[str, Any]) -> float:
    """How many times fewer bytes crossed between nodes than FSDP's all-reduce sends, of the whole run."""
    crossed = [each for name, each in classes.items() if name.startswith("gradient") and "/" not in name]
    return sum(each.dense_bytes for each in crossed) / sum(each.sent_bytes for each in crossed)


def train(args: argparse.Namespace, setting: str, seed: int, data: Any) -> dict[str, Any]:
    """One run on this rank."""
    training, held_out = data
    model, section = sharded(seed), SETTINGS[setting]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    compression = None
    if section is not None:
        metrics = Metrics(MetricsConfig(), rank=dist.get_rank(), world_size=NODES)
        compression = compress_replicas(
            model, {"data_parallel": section}, optimizer=optimizer, metrics=metrics
        )
    ranks = dist.get_world_size() // NODES
    node, rank = divmod(dist.get_rank(), ranks)
    generator, offsets = torch.Generator().manual_seed(seed), torch.arange(SEQUENCE)
    for step in range(args.steps):
        rate = args.lr * min(1.0, (step + 1) / args.lr_warmup)
        rate *= max(0.05, 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(training) - SEQUENCE - 1, (NODES, BATCH), generator=generator)[node]
        where = starts.chunk(ranks)[rank][:, None] + offsets
        logits = model(training[where]).view(-1, SYMBOLS)
        functional.cross_entropy(logits, training[where + 1].view(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return {
        "setting": setting,
        "seed": seed,
        "ranks": ranks,
        "steps": args.steps,
        "loss": held_out_loss(model, held_out),
        "fewer": 1.0 if compression is None else ratio_of(compression.metrics.summary().classes),
    }


def table(rows: list[dict[str, Any]], steps: int) -> str:
    """Markdown: losses beside the dense run of the same seed and mesh."""
    found = {(row["ranks"], row["setting"], row["seed"]): row for row in rows if row["steps"] == steps}
    lines = [
        "| nodes x ranks | setting | seed | held-out loss | - dense | fewer bytes |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for (ranks, setting, seed), row in sorted(found.items()):
        dense = found.get((ranks, "dense", seed))
        difference = "" if dense is None or setting == "dense" else f"{row['loss'] - dense['loss']:+.4f}"
        figures = f"{row['loss']:.4f} | {difference} | {row['fewer']:.1f}x"
        lines.append(f"| {NODES} x {ranks} | {setting} | {seed} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Train every setting and seed that has no result yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="plain or gzip")
    parser.add_argument(
        "--settings", nargs="+", choices=list(SETTINGS), default=["dense", "ahead-0.99-ramp180"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lr-warmup", type=int, default=60)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines of every run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = text_of(args.text)

    def rows() -> list[dict[str, Any]]:
        lines = args.results.read_text(encoding="utf-8").splitlines() if args.results.exists() else []
        return [json.loads(line) for line in lines]

    ranks = dist.get_world_size() // NODES
    done = {(row["ranks"], row["setting"], row["seed"]) for row in rows() if row["steps"] == args.steps}
    dist.barrier()
    for seed in args.seeds:
        for setting in args.settings:
            if (ranks, setting, seed) in done:
                continue
            result = train(args, setting, seed, data)
            if dist.get_rank() == 0:
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
    if dist.get_rank() == 0:
        print(table(rows(), args.steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
