"""Measure DiLoCo of torchft with thresholded pseudo-gradients beside dense ones: held-out loss and bytes.

The replicas are threads of this process, with torchft's own lighthouse, managers and DiLoCo, and the GPT and
data of ``adam.py``. Inside AdamW, outside SGD with Nesterov momentum, or plain SGD where the name says so;
else the settings differ in the ``dct`` section alone.

    python benchmarks/studies/diloco.py --text wikitext2_valid.txt.gz --results diloco.jsonl

``--results`` keeps every run at once; the last command prints the table of all runs in it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")  # which torchft reads when it is imported

import torch
import torch.distributed as dist
import torchft
from adam import BATCH, SEQUENCE, SYMBOLS, held_out_loss, model_of, text_of
from torch.nn import functional
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from dct_plugin.torchft import ProcessGroupGloo

DENSE = {"sparsity": 0, "value_dtype": "fp32"}
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "0.9 bf16": {"sparsity": 0.9},
    "0.99 bf16": {"sparsity": 0.99},
    "0.97 int2": {"sparsity": 0.97, "value_dtype": "int2"},
    "0.97 int2, plain outer SGD": {"sparsity": 0.97, "value_dtype": "int2"},
    "0.99 int2, plain outer SGD": {"sparsity": 0.99, "value_dtype": "int2"},
}
LIMIT = timedelta(seconds=300)


def replica(
    rank: int, model: torch.nn.Module, setting: str, seed: int, data: Any, address: str, args: Any
) -> dict[str, Any]:
    """Train one replica to the last outer step."""
    section = {"data_parallel": {"feedback": "local", "exchange": "direct", **SETTINGS[setting]}}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pg = ProcessGroupGloo(section, timeout=LIMIT)
    manager = torchft.Manager(
        pg=pg,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=args.replicas,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        replica_id=str(rank),
        store_addr="127.0.0.1",
        store_port=server.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname="127.0.0.1",
        init_sync=False,
    )
    pg.follow(manager)
    inner = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    if "plain" in setting:  # as SparseLoCo has it: the residual is momentum enough
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
    else:
        outer = torch.optim.SGD(model.parameters(), lr=args.outer_lr, momentum=0.9, nesterov=True)
    generator, offsets = torch.Generator().manual_seed(1000 * seed + rank), torch.arange(SEQUENCE)
    with DiLoCo(manager, [model], inner, outer, sync_every=args.every, use_bucketization=True):
        for step in range(args.steps):
            for group in inner.param_groups:
                group["lr"] = args.lr * min(1.0, (step + 1) / 20)
            starts = torch.randint(len(data) - SEQUENCE - 1, (args.batch,), generator=generator)
            where = starts[:, None] + offsets
            logits = model(data[where]).view(-1, SYMBOLS)
            functional.cross_entropy(logits, data[where + 1].view(-1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            inner.zero_grad()
    pg.shutdown()
    manager.shutdown(wait=False)
    assert pg.metrics is not None
    summary = pg.metrics.summary()
    return {"dense": summary.dense_bytes, "sent": summary.sent_bytes, "outer_steps": summary.steps}


def train(args: argparse.Namespace, setting: str, seed: int, data: Any) -> dict[str, Any]:
    """One run of all replicas."""
    training, held_out = data
    first = model_of(seed)
    models = [copy.deepcopy(first) for _ in range(args.replicas)]
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=args.replicas, join_timeout_ms=1000)
    with ThreadPoolExecutor(args.replicas) as pool:
        runs = [
            pool.submit(replica, rank, model, setting, seed, training, lighthouse.address(), args)
            for rank, model in enumerate(models)
        ]
        found = runs[0].result()
        for run in runs:
            run.result()
    lighthouse.shutdown()
    models[0].eval()
    job = {key: getattr(args, key) for key in ("replicas", "steps", "every", "batch", "lr", "outer_lr")}
    loss = held_out_loss(models[0], held_out)
    return {"setting": setting, "seed": seed, "loss": loss, **found, **job}


def table(rows: list[dict[str, Any]]) -> str:
    """The runs by setting, with the loss beside that of the dense run of the seed."""
    dense = {row["seed"]: row["loss"] for row in rows if row["setting"] == "dense"}
    lines = [
        "| pseudo-gradients | held-out loss minus dense, by seed | bytes per outer step, replica | fewer |",
        "|---|---|--:|--:|",
    ]
    for setting in SETTINGS:
        own = [row for row in rows if row["setting"] == setting and row["seed"] in dense]
        if own:
            losses = ", ".join(f"{row['loss'] - dense[row['seed']]:+.3f}" for row in own)
            sent = own[0]["dense" if setting == "dense" else "sent"]
            ratio, per_step = own[0]["dense"] / sent, sent / own[0]["outer_steps"]
            lines.append(f"| {setting} | {losses} | {per_step:,.0f} | {ratio:.3g}x |")
    lines.append(f"dense: {', '.join(f'{loss:.3f}' for loss in dense.values())} nats per character")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="gzipped text")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600, help="inner steps")
    parser.add_argument("--every", type=int, default=30, help="inner steps of an outer one")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences of a replica")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = text_of(args.text)
    for seed in args.seeds:
        for setting in args.settings:
            row = train(args, setting, seed, data)
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    print(table([json.loads(line) for line in args.results.read_text().splitlines()]), flush=True)
    sys.stdout.flush()
    os._exit(0)  # torchft's threads need not end


if __name__ == "__main__":
    main()
