"""Compare methods of exchange each at its own best learning rate: a GPT of 0.41M parameters, torch DDP.

The job, the processes and the bytes are those of ``updates.py``. Every method trains 600 steps at each of
three highest learning rates. Thresholds have a start of 40 dense steps and 180 of rising sparsity; PowerSGD
is dense for a tenth of the steps, as torch's page recommends. Muon is compared with dense Muon.

    unshare --net sh -c 'ip link set lo up; exec "$@"' sh python benchmarks/studies/tuned.py \\
        --text wikitext2_valid.txt.gz --results FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import updates
from many_streams import rows_of
from tasks import Gpt, Run
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.recommender.links.team import free_port

WIDTH, STEPS = 128, 600
#: Highest learning rates, the best one in the middle where three suffice to see that.
MUON, LOW, HIGH = (1e-3, 2e-3, 4e-3), (2e-3, 4e-3, 8e-3), (4e-3, 8e-3, 16e-3)
_START = {"warmup_steps": 40, "sparsity_warmup_steps": 180}
POWERSGD = "PowerSGD, rank 4"
SECTIONS: dict[str, dict[str, Any]] = {
    "0.99, step-ahead": {"sparsity": 0.99, **_START},
    "0.9, local": {"sparsity": 0.9, "feedback": "local", **_START},
    "int8 of all": {"sparsity": 0, "value_dtype": "int8"},
    "4-bit levels of all": {"sparsity": 0, "value_dtype": "log4"},
    "updates": {"exchange_of": "updates"},
}
METHODS: dict[str, dict[str, tuple[float, ...]]] = {
    "adamw": {
        **dict.fromkeys(["dense", "0.99, step-ahead", "int8 of all", "4-bit levels of all"], HIGH),
        **dict.fromkeys(["0.9, local", "updates", POWERSGD], LOW),
    },
    "muon": dict.fromkeys(["dense", "int8 of all", "updates"], MUON),
}


def attach(ddp: DistributedDataParallel, optimizers: Sequence[Any], method: str) -> Any:
    """Have a model's gradients exchanged by a method; return the plugin's state, if it is its."""
    if method in SECTIONS:
        return dct_plugin.attach(ddp, optimizers, {"data_parallel": SECTIONS[method]}, total_steps=STEPS)
    if method == POWERSGD:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=STEPS // 10
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def train(optimizer: str, method: str, rate: float, task: Gpt) -> dict[str, Any]:
    """Train one run on this rank, and return its figures."""
    model = task.model(0)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e6 if method == POWERSGD else 25)
    optimizers = updates.optimizers_of(model, optimizer, method)
    state = attach(ddp, optimizers, method)
    dist.barrier()
    before = updates.sent_bytes()
    run = Run("gpt", method, dist.get_world_size(), 1, 0, STEPS)
    for loss, now in task.losses(run, dist.get_rank(), dist.get_world_size()):
        for each in optimizers:
            is_muon = optimizer == "muon" and each is not optimizers[-1]
            each.param_groups[0]["lr"] = now * (updates.RATES["muon"] if is_muon else 1.0)
        loss(ddp).backward()
        if optimizer != "muon":
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        for each in optimizers:
            each.step()
            each.zero_grad()
    if state is not None:
        state.detach()
    dist.barrier()
    sent = (updates.sent_bytes() - before) / dist.get_world_size()
    found = {"optimizer": optimizer, "method": method, "rate": rate, "loss": task.score(model), "sent": sent}
    dist.barrier()
    return found


def rank_main(rank: int, port: int, args: argparse.Namespace, runs: Sequence[Any]) -> None:
    """Make runs on one of two ranks."""
    updates.join(rank, 2, port)
    for optimizer, method, rate in runs:
        row = train(optimizer, method, rate, Gpt([args.text], WIDTH, rate, None, None))
        if rank == 0:
            updates.keep(row, args.results)
    dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a CSV table: a method's losses by rate, and its best beside the best dense run."""
    yield "method,by learning rate (nats),best rate,minus the best dense run (nats),fewer bytes"
    for optimizer, methods in METHODS.items():
        found = {
            method: [r for r in rows if (r["optimizer"], r["method"]) == (optimizer, method)]
            for method in methods
        }
        for method, own in found.items():
            if not own or not found["dense"]:
                continue
            best, dense = (min(each, key=lambda row: row["loss"]) for each in (own, found["dense"]))
            by_rate = sorted(own, key=lambda row: row["rate"])
            losses = ", ".join(f"{row['loss']:.4f} at {row['rate']:g}" for row in by_rate)
            name = f"{method} (Muon)" if optimizer == "muon" else method
            figures = f'"{losses}",{best["rate"]:g},{best["loss"] - dense["loss"]:+.4f}'
            yield f'"{name}",{figures},{dense["sent"] / best["sent"]:.1f}x'


def main() -> None:
    """Train what has no result yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="plain or gzip")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines of every run")
    args = parser.parse_args()
    done = {(row["optimizer"], row["method"], row["rate"]) for row in rows_of(args.results)}
    every = [
        (kind, name, rate)
        for kind, methods in METHODS.items()
        for name, rates in methods.items()
        for rate in rates
    ]
    if todo := [run for run in every if run not in done]:
        mp.spawn(rank_main, (free_port(), args, todo), nprocs=2)
    print("\n".join(table(rows_of(args.results))))


if __name__ == "__main__":
    main()
