"""Measure the loss of thresholded gradients in a GPT of 124 million parameters, with real ranks.

Every rank is a process with torch DDP over nccl, and has a GPU of its own where there are enough. nccl 2.30
and newer take several ranks on one GPU, but these take turns: eight need 1.7 s for a dense step on an H100,
two 0.1 s. Training is with AdamW, gradient clipping, bf16 autocast, learning-rate warm-up and cosine. The
settings start from the same weights and see the same batches. The text is the source of Python's standard
library; words are its identifiers, numbers, spaces and other characters. The figure is the held-out loss in
nats per word, at the weights themselves; bytes are the messages of a rank after the start, against fp32
gradients.

    python benchmarks/studies/gpu_quality.py --results FILE
    python benchmarks/studies/gpu_quality.py --results FILE --settings dense default
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dct_plugin

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu import GPT, VOCABULARY, sent_bytes
from no_gpu import DEVICE, DRY, device_ids

SEQUENCE = 16 if DRY else 256
LR, LR_WARMUP, WEIGHT_DECAY, CLIP = 4e-4, 60, 0.1, 1.0
#: The start of every setting, short beside the run: dense steps, then steps in which the density falls.
DENSE_AND_RAMP = {"warmup_steps": 2 if DRY else 60, "sparsity_warmup_steps": 2 if DRY else 180}
START = sum(DENSE_AND_RAMP.values())
SETTINGS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "default": {**DENSE_AND_RAMP},
    "ahead-0.99": {"feedback": "step_ahead", "sparsity": 0.99, **DENSE_AND_RAMP},
    "local-0.9": {"feedback": "local", "sparsity": 0.9, **DENSE_AND_RAMP},
    "local-0.99": {"feedback": "local", "sparsity": 0.99, **DENSE_AND_RAMP},
}


def words_of(folder: Path) -> tuple[Tensor, Tensor]:
    """Return training and held-out part (each twentieth file) of a folder's Python files, int64."""
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    split = re.compile(r"\w+| +|\n+|[^\w\s]")
    pieces = [split.findall(text) for text in texts]
    counts = Counter(word for piece in pieces for word in piece)
    numbers = {word: i + 1 for i, (word, _) in enumerate(counts.most_common(VOCABULARY - 1))}
    parts: list[list[int]] = [[], []]
    for at, piece in enumerate(pieces):
        parts[at % 20 == 7].extend(numbers.get(word, 0) for word in piece)
    return torch.tensor(parts[0]), torch.tensor(parts[1])


def batch_of(words: Tensor, sequences: int, seed: int) -> Tensor:
    """Return sequences from random places, int64 [sequences, SEQUENCE + 1] on the device."""
    starts = torch.randint(
        len(words) - SEQUENCE - 1, (sequences,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([words[start : start + SEQUENCE + 1] for start in starts.tolist()]).cuda()


def train(
    rank: int, options: argparse.Namespace, setting: str, words: Tensor, held_out: Tensor
) -> dict[str, Any]:
    """Train this rank's replica, and return held-out losses, times and bytes."""
    torch.manual_seed(options.seed)
    model = GPT().cuda()
    ddp = DistributedDataParallel(model, device_ids=device_ids(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    section, state = SETTINGS[setting], None
    if section is not None:
        state = dct_plugin.attach(ddp, optimizer, {"data_parallel": section})
    losses, evaluations, sent_at_start = [], {}, 0.0
    begin = time.monotonic()
    for step in range(options.steps):
        fall = 0.05 + 0.475 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / LR_WARMUP) * fall
        x = batch_of(words, options.sequences, 1_000_000 * options.seed + options.ranks * step + rank)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = ddp(x[:, :-1], x[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step + 1 == START and state is not None:
            sent_at_start = sent_bytes(state)
        if (step + 1) % 100 == 0 or step + 1 == options.steps:
            model.eval()
            with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
                tests = [batch_of(held_out, 16, 77 + 100 * rank + i) for i in range(4)]
                found = [model(test[:, :-1], test[:, 1:]) for test in tests]
            mean = torch.stack(found).mean()
            dist.all_reduce(mean)
            evaluations[step + 1] = float(mean) / options.ranks
            model.train()
            if rank == 0:
                print(
                    f"{setting} {step + 1}: {evaluations[step + 1]:.4f}, {time.monotonic() - begin:.0f} s",
                    flush=True,
                )
    after = max(1, options.steps - START)
    numel = sum(parameter.numel() for parameter in model.parameters())
    sums = torch.stack([p.detach().double().sum() for p in model.parameters()])
    ends = [torch.empty_like(sums) for _ in range(options.ranks)]
    dist.all_gather(ends, sums)
    return {
        "setting": setting,
        "seed": options.seed,
        "ranks": options.ranks,
        "steps": options.steps,
        "parameters": numel,
        "device": torch.cuda.get_device_name(),
        "held_out": evaluations,
        "training": [round(float(each), 4) for each in losses[::20]],
        "seconds": time.monotonic() - begin,
        "ranks_equal": all(torch.equal(each, sums) for each in ends),
        "times_fewer_than_fp32": None
        if state is None
        else 4 * numel * after / (sent_bytes(state) - sent_at_start),
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
    }


def _rank(rank: int, folder: str, options: argparse.Namespace, words: Tensor, held_out: Tensor) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(options.ranks), LOCAL_RANK="0", NCCL_MULTI_RANK_GPU_ENABLE="1"
    )
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("gloo" if DRY else "nccl", store=store, rank=rank, world_size=options.ranks)
    for setting in options.settings:
        row = json.dumps(train(rank, options, setting, words, held_out))
        torch.cuda.empty_cache()
        if rank == 0:
            print(row, flush=True)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(row + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings", nargs="+", default=["dense", "default", "local-0.9", "ahead-0.99"], choices=SETTINGS
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sequences", type=int, default=4, help=f"of {SEQUENCE} words, of a rank's step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--results", type=Path, help="file to which every run's line is added at once")
    options = parser.parse_args()
    words, held_out = (part.share_memory_() for part in words_of(options.text))
    print(f"{len(words):,} words to train on, {len(held_out):,} held out", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, options, words, held_out), nprocs=options.ranks)


if __name__ == "__main__":
    main()
