"""Measure held-out loss and bytes of FSDP2 on one mesh, with the GPT and the data of ``tasks.py``.

    torchrun --nproc-per-node 4 benchmarks/studies/shards.py \\
        --text wikitext2_valid.txt.gz --results runs.jsonl
    torchrun --nproc-per-node 4 benchmarks/studies/shards.py --text tinyshakespeare.txt.gz \\
        --pretrained wikitext2_valid.txt.gz --lr 1e-5 --steps 300 --results runs.jsonl

Two nodes have half of the ranks each; ``--nodes 1`` makes every rank a node. ``--pretrained`` trains the GPT
on a text before, and fine-tunes it at a constant rate. Bytes are those that the ranks of a node send to other
nodes in a step, by parameter, after the first ten steps. The end is the table of all runs in ``--results``.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import tasks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dct_plugin.config import MetricsConfig
from dct_plugin.data_parallel import exact_updates
from dct_plugin.fsdp import compress_shards
from dct_plugin.metrics import Metrics

#: None is plain FSDP2.
SETTINGS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "int8": {},
    "log4": {"value_dtype": "log4"},
    "fp32 gradients": {"value_dtype": "fp32", "parameters": "exact"},
    "int8 gradients alone": {"parameters": None},
}


@functools.cache
def pretrained(task: tasks.Gpt, seed: int) -> dict[str, torch.Tensor]:
    """The weights after 600 steps on one process, which the others get."""
    weights = [_trained(task, seed) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(weights)
    return weights[0]


def _trained(task: tasks.Gpt, seed: int) -> dict[str, torch.Tensor]:
    model = task.model(seed)
    optimizer = task.optimizer(model.parameters())
    for loss, rate in task.losses(tasks.Run("gpt", "", 1, 1, seed, 600), 0, 1):
        optimizer.param_groups[0]["lr"] = rate
        loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(args: argparse.Namespace, task: tasks.Gpt, setting: str, seed: int) -> dict[str, Any]:
    """One run on this rank."""
    model, section, ranks = task.model(seed), SETTINGS[setting], dist.get_world_size()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (ranks,)), "mp_policy": mixed}
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, reshard_after_forward=True, **options)
    optimizer = task.optimizer(model.parameters())
    metrics = Metrics(MetricsConfig(), rank=dist.get_rank(), world_size=ranks)
    if section is not None:
        per_node = ranks // 2 if args.nodes == 2 else 1
        config = {"data_parallel": {"nodes": per_node, **section}}
        compress_shards(model, config, optimizer=optimizer, metrics=metrics)
    sent = {}
    for step, (loss, rate) in enumerate(
        task.losses(tasks.Run("gpt", setting, ranks, 1, seed, args.steps), dist.get_rank(), ranks)
    ):
        optimizer.param_groups[0]["lr"] = args.lr if args.pretrained else rate
        loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step == 9:
            sent = {name: each.sent_bytes for name, each in metrics.summary().classes.items()}
    found = metrics.summary().classes
    numel = sum(p.numel() for p in model.parameters())
    whole = task.model(seed)
    with torch.no_grad():
        for target, source in zip(whole.parameters(), model.parameters(), strict=True):
            target.copy_(source.full_tensor())  # type: ignore[attr-defined]
    own = {n: (each.sent_bytes - sent.get(n, 0.0)) / (args.steps - 10) for n, each in found.items()}
    weights, gradients = (
        sum(v for n, v in own.items() if n.startswith(kind) and "/" not in n)
        for kind in ("parameter", "gradient")
    )
    bytes_ = torch.tensor([weights, gradients]) / numel
    dist.all_reduce(bytes_)
    return {
        "text": args.text.name, "lr": args.lr, "ranks": ranks, "nodes": args.nodes, "setting": setting,
        "seed": seed, "steps": args.steps, "width": args.width, "loss": task.score(whole),
        "weights": float(bytes_[0]) / args.nodes_in_all, "gradients": float(bytes_[1]) / args.nodes_in_all,
    }  # fmt: skip


#: What tells runs apart, beside setting and seed.
KEYS = ("text", "lr", "width", "ranks", "nodes", "steps")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: losses beside the dense run of the same seed, and bytes."""
    found = {(tuple(row[key] for key in KEYS), row["setting"], row["seed"]): row for row in rows}
    lines = [
        f"| {', '.join(KEYS)} | setting | loss - dense by seed | mean | bytes of weights | of gradients |",
        "|---|---|---|--:|--:|--:|",
    ]
    for run, setting in dict.fromkeys(key[:2] for key in found):
        dense = {key[2]: row["loss"] for key, row in found.items() if key[:2] == (run, "dense")}
        own = {key[2]: row for key, row in found.items() if key[:2] == (run, setting)}
        losses = [row["loss"] - dense[seed] for seed, row in sorted(own.items()) if seed in dense]
        each, mean = ", ".join(f"{loss:+.4f}" for loss in losses), sum(losses) / max(1, len(losses))
        sent = next(iter(own.values()))
        figures = f"{each} | {mean:+.4f} | {sent['weights']:.3f} | {sent['gradients']:.3f}"
        lines.append(f"| {', '.join(map(str, run))} | {setting} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Train every setting and seed that has no result yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="plain or gzip")
    parser.add_argument("--pretrained", type=Path, help="text on which the GPT is trained before")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=["dense", "int8", "log4"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=2, help="1: every rank is a node")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines of every run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    exact_updates.clock = lambda: 0.0  # as on a link where exact updates are the faster way
    dist.init_process_group("gloo")
    args.nodes_in_all = 2 if args.nodes == 2 else dist.get_world_size()
    before = None
    if args.pretrained is not None:
        before = functools.partial(pretrained, tasks.Gpt([args.pretrained], args.width))
    task = tasks.Gpt([args.text], args.width, args.lr, before, args.pretrained)

    def rows() -> list[dict[str, Any]]:
        lines = args.results.read_text(encoding="utf-8").splitlines() if args.results.exists() else []
        return [json.loads(line) for line in lines]

    done = {tuple(row[key] for key in (*KEYS, "setting", "seed")) for row in rows()}
    facts = (args.text.name, args.lr, args.width, dist.get_world_size(), args.nodes, args.steps)
    dist.barrier()
    for seed in args.seeds:
        for setting in args.settings:
            if (*facts, setting, seed) in done:
                continue
            result = train(args, task, setting, seed)
            if dist.get_rank() == 0:
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
    if dist.get_rank() == 0:
        print(table(rows()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
