"""Measure the loss of a GPT of 10.7 million parameters on source code, with torch DDP and two ranks.

The text is the source and documentation of the packages that ``locks/dev.lock`` installs, some 280 MB; each
fiftieth file is held out. A character is a byte; the 94 most common ones have a symbol each, all others share
one. A step has 8 sequences of 128 bytes in all. Training is with AdamW, clipping to 1, learning-rate warm-up
and cosine. First runs of 300 steps find the best of three rates, for dense training and for the settings that
nothing written gives; then runs of 2,400 steps measure the held-out loss. ``start`` is a start of 40 dense
steps and 180 of rising sparsity, beside nothing else written. Bytes are what the loopback interface carried.

    python benchmarks/studies/ten_million.py --folder FOLDER

A run keeps its state in the folder every 100 steps, so that the command can be stopped and given again; it
takes some four hours of two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from adam import SYMBOLS, model_of
from many_streams import rows_of
from packaging.requirements import Requirement
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.metrics.network_counters import InterfaceCounter

WIDTH, LAYERS, SEQUENCE, BATCH = 384, 6, 128, 8
WEIGHT_DECAY, CLIP, LR_WARMUP = 0.1, 1.0, 60
RATES, SHORT, LONG = (2.5e-4, 5e-4, 1e-3), 300, 2400
SETTINGS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "start": {"quality": None, "warmup_steps": 40, "sparsity_warmup_steps": 180},
    "int8": {"sparsity": 0, "value_dtype": "int8", "feedback": "local"},
}
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
#: A run keeps its state after so many steps.
KEPT_EVERY = 100


class Run(NamedTuple):
    """The name of a run."""

    setting: str
    lr: float
    steps: int
    seed: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def locked_files() -> Iterator[Path]:
    """Yield the text files of torch and of the packages that ``locks/dev.lock`` installs, sorted by name.

    Raises:
        PackageNotFoundError: One of them is not installed: the text would be another one.
    """
    lock = (Path(__file__).resolve().parents[2] / "locks" / "dev.lock").read_text(encoding="utf-8")
    names = {"torch"}
    for line in re.findall(r"^[A-Za-z0-9_.-]+==[^\\\n]*", lock, re.MULTILINE):
        wanted = Requirement(line.partition(" --hash")[0])
        if wanted.marker is None or wanted.marker.evaluate():
            names.add(wanted.name)
    for name in sorted({name.lower().replace("_", "-") for name in names}):
        for file in sorted(metadata.files(name) or (), key=str):
            path = Path(str(file.locate()))
            if file.suffix in SUFFIXES and path.is_file():
                yield path


def prepare(folder: Path) -> None:
    """Write the two parts of the text as symbols, uint8, and the hash of the text, where they are missing."""
    if (folder / "text.sha256").exists():
        return
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(locked_files()):
        parts[number % 50 == 49].append(path.read_bytes())
    training, held_out = (b"".join(part) for part in parts)
    common = np.bincount(np.frombuffer(training, np.uint8), minlength=256).argsort()[::-1]
    symbols = np.full(256, SYMBOLS - 1, np.uint8)
    symbols[common[: SYMBOLS - 1]] = np.arange(SYMBOLS - 1)
    for name, part in (("training", training), ("held_out", held_out)):
        np.save(folder / f"{name}.npy", symbols[np.frombuffer(part, np.uint8)])
    (folder / "text.sha256").write_text(hashlib.sha256(training + held_out).hexdigest(), encoding="utf-8")


def batch_of(data: Any, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 [rows, SEQUENCE]."""
    rows = torch.from_numpy(
        np.stack([data[start : start + SEQUENCE + 1] for start in starts.tolist()])
    ).long()
    return rows[:, :-1], rows[:, 1:].reshape(-1)


def loss_of(model: nn.Module, data: Any, starts: Tensor) -> Tensor:
    """Return the mean loss in nats per byte."""
    x, y = batch_of(data, starts)
    return functional.cross_entropy(model(x).view(-1, SYMBOLS), y)


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Any) -> float:
    """Return the held-out loss of 4,096 sequences, of which this rank computes its part; a collective."""
    starts = torch.randint(len(data) - SEQUENCE - 1, (4096,), generator=torch.Generator().manual_seed(7))
    mine = starts.chunk(dist.get_world_size())[dist.get_rank()].split(32)
    total = torch.stack([loss_of(model, data, part) for part in mine]).mean()
    dist.all_reduce(total, dist.ReduceOp.SUM)
    return float(total) / dist.get_world_size()


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Train one run from its state in the folder, if any; a collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = np.load(folder / "training.npy", mmap_mode="r")
    model = DistributedDataParallel(model_of(run.seed, WIDTH, LAYERS, SEQUENCE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=WEIGHT_DECAY, fused=True)
    section = SETTINGS[run.setting]
    attached = None
    if section is not None:
        attached = dct_plugin.attach(model, optimizer, {"data_parallel": section})
    generator, first, sent = torch.Generator().manual_seed(run.seed), 0, 0
    kept = folder / f"{run}.rank{rank}.pt"
    if kept.exists():
        state = torch.load(kept, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if attached is not None:
            attached.load_state_dict(state["dct"])
        generator.set_state(state["generator"])
        first, sent = state["step"], state["sent"]
    counter = InterfaceCounter(["lo"])
    dist.barrier()
    counter.start()
    for step in range(first, run.steps):
        rate = run.lr * min(1.0, (step + 1) / LR_WARMUP)
        optimizer.param_groups[0]["lr"] = rate * max(0.05, 0.5 * (1 + math.cos(math.pi * step / run.steps)))
        starts = torch.randint(len(training) - SEQUENCE - 1, (BATCH,), generator=generator).chunk(ranks)[rank]
        optimizer.zero_grad()
        loss_of(model, training, starts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if (step + 1) % KEPT_EVERY == 0 and step + 1 < run.steps:
            counter.stop()
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "dct": None if attached is None else attached.state_dict(),
                "generator": generator.get_state(),
                "step": step + 1,
                "sent": sent + counter.tx,
            }
            torch.save(state, kept.with_suffix(".new"))
            dist.barrier()
            os.replace(kept.with_suffix(".new"), kept)
            dist.barrier()
    dist.barrier()
    counter.stop()
    if attached is not None:
        attached.detach()
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(ranks)]
    dist.all_gather(everyone, weights)
    loss = held_out_loss(model.module, np.load(folder / "held_out.npy", mmap_mode="r"))
    kept.unlink(missing_ok=True)
    return {
        **run._asdict(),
        "loss": loss,
        "bytes": sent + counter.tx,
        "ranks_identical": all(torch.equal(weights, other) for other in everyone),
        "parameters": weights.numel(),
        "text": (folder / "text.sha256").read_text(encoding="utf-8")[:12],
        "torch": torch.__version__,
    }


def results_of(folder: Path) -> dict[Run, dict[str, Any]]:
    """Return the results so far by run."""
    rows = rows_of(folder / "results.jsonl")
    return {Run(*(row[name] for name in Run._fields)): row for row in rows}


def next_run(folder: Path) -> Run | None:
    """Return the next run without a result: short ones of every rate, then long ones at the best rate."""
    done = results_of(folder)
    short = [Run(setting, lr, SHORT, 0) for setting in ("dense", "start") for lr in RATES]
    for run in short:
        if run not in done:
            return run
    best = {
        setting: min(RATES, key=lambda lr: done[Run(setting, lr, SHORT, 0)]["loss"])
        for setting in ("dense", "start")
    }
    long = [Run(setting, best["dense" if setting == "int8" else setting], LONG, 0) for setting in SETTINGS]
    if all(run in done for run in long) and abs(done[long[1]]["loss"] - done[long[0]]["loss"]) > 0.01:
        long += [run._replace(seed=1) for run in long[:2]]
    return next((run for run in long if run not in done), None)


def worker(folder: Path) -> None:
    """Train the next runs, one after another, in this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while (run := next_run(folder)) is not None:
        row = train(run, folder)
        if dist.get_rank() == 0:
            with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Prepare the text, train what has no result yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="keeps text, states and results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    prepare(args.folder)
    if next_run(args.folder) is not None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*launcher, __file__, "--worker", "--folder", str(args.folder)]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    rows = results_of(args.folder)
    print("text", (args.folder / "text.sha256").read_text(encoding="utf-8"))
    dense = {
        run.seed: row["loss"] for run, row in rows.items() if run.setting == "dense" and run.steps == LONG
    }
    sent = {run.steps: row["bytes"] for run, row in rows.items() if run.setting == "dense"}
    print("| setting | rate | steps | seed | held-out loss | - dense | fewer bytes, whole run | ranks |")
    print("|---|--:|--:|--:|--:|--:|--:|---|")
    for run, row in rows.items():
        difference = f"{row['loss'] - dense[run.seed]:+.4f}" if run.steps == LONG else ""
        same = "identical" if row["ranks_identical"] else "DIFFERENT"
        fewer = f"{sent[run.steps] / row['bytes']:.1f}x"
        print("|", " | ".join([*map(str, run), f"{row['loss']:.4f}", difference, fewer, same]), "|")


if __name__ == "__main__":
    main()
