"""Measure the loss of an exchange of updates: torch DDP in real processes, dense and int8 beside it.

``many_streams.py``'s GPT and texts; runs of a seed share initial weights and batches, and are paired with the
dense run between as many ranks. Gradients are clipped by ``clip_grad_norm_``, under Muon not at all. The loss
is that after ``detach()``, in nats per held-out character. Bytes are all that the ranks send in the run, the
end included: those of the loopback interface, so give the command a network of its own.

- ``--pretrained TEXT``: fine-tuning of a model that was trained on another text for 1,200 steps.
- ``--optimizer``: Muon, Lion, Adafactor and schedule-free Adam train the matrices of the blocks, AdamW the
  embeddings. The plugin refuses updates of the last three: here they are told as AdamW, whose factors come
  from gradients, or with ``by steps`` in the setting as Muon, whose factors come from steps.
- several ``--text``: ranks have different ones.

    unshare --net sh -c 'ip link set lo up; exec "$@"' sh python benchmarks/studies/updates.py \\
        --text tinyshakespeare.txt.gz --pretrained wikitext2_valid.txt.gz --lr 1e-5 --results FILE

A setting is ``dense``, ``int8``, ``updates`` (the default for the optimizer), or ``updates`` with a share and
a type, such as ``updates 1/4 int4`` and ``updates 1 sign``, or with a type of the unsent progress, too, such
as ``updates 1/16 int4 int8``; ``local 30`` is local steps, ``local 30 3 3``
with 3 fragments and a delay of 3. ``+ N`` behind it has N dense steps at the start. ``--results`` keeps every
run: the command can be given again, with more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from many_streams import rows_of
from muon import MUON_LR
from tasks import LR, WEIGHT_DECAY, WIDTH, Gpt, Run, trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from unknown_optimizers import Lion, ScheduleFree

import dct_plugin
from dct_plugin.recommender.intervals import paired
from dct_plugin.recommender.links.team import free_port

#: Learning rates as multiples of AdamW's.
RATES = {"adamw": 1.0, "muon": MUON_LR, "lion": 0.05, "adafactor": 5.0, "schedule-free": 1.0}
BY_STEPS = " by steps"
#: Those whose step the plugin does not know.
UNKNOWN = {"lion": Lion, "adafactor": torch.optim.Adafactor, "schedule-free": ScheduleFree}


def section_of(setting: str) -> dict[str, Any] | None:
    """Return the section of a setting; None trains dense."""
    name, _, start = setting.removesuffix(BY_STEPS).partition(" + ")
    kind, *words = name.split()
    section: dict[str, Any] = {"verify": {"every": 100, "action": "stop"}}
    if start:
        section["warmup_steps"] = int(start)
    if kind == "dense":
        return None
    if kind == "int8":
        return {**section, "sparsity": 0, "value_dtype": "int8", "quality": None}
    if kind == "local":
        numbers = map(int, words)
        return {**section, "local_steps": dict(zip(("every", "fragments", "delay"), numbers, strict=False))}
    section["exchange_of"] = "updates"
    if words:
        values = float(1 - Fraction(words[0])), *words[1:]
        section |= dict(zip(("sparsity", "value_dtype", "residual_dtype"), values, strict=False))
    return section


def sent_bytes() -> int:
    """Return the bytes that the loopback interface has sent so far."""
    line = next(
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    )
    return int(line.split()[9])


def optimizers_of(model: nn.Module, kind: str, setting: str) -> list[torch.optim.Optimizer]:
    """Return the optimizers, AdamW last."""
    named = dict(model.named_parameters())
    others = [p for name, p in named.items() if kind == "adamw" or "blocks" not in name]
    adamw = torch.optim.AdamW(others, lr=LR, weight_decay=WEIGHT_DECAY)
    if kind == "adamw":
        return [adamw]
    blocks = [p for name, p in named.items() if "blocks" in name]
    rate = {"lr": LR * RATES[kind], "weight_decay": WEIGHT_DECAY}
    if kind == "muon":
        return [torch.optim.Muon(blocks, **rate, adjust_lr_fn="match_rms_adamw"), adamw]
    told = type("Muon" if setting.endswith(BY_STEPS) else "AdamW", (UNKNOWN[kind],), {})
    return [told(blocks, **rate | ({"weight_decay": 0.0} if kind == "schedule-free" else {})), adamw]


def train(args: argparse.Namespace, run: Run, task: Gpt) -> dict[str, Any]:
    """Train one run on this rank, and return its figures."""
    model = task.model(run.seed)
    ddp, optimizers = DistributedDataParallel(model), optimizers_of(model, args.optimizer, run.setting)
    for optimizer in optimizers:  # the rates say what kind of training this is
        optimizer.param_groups[0]["lr"] *= args.lr / LR
    section = section_of(run.setting)
    state = None
    if section is not None:
        state = dct_plugin.attach(ddp, optimizers, {"data_parallel": section}, total_steps=run.steps)
    dist.barrier()
    before = sent_bytes()
    for loss, rate in task.losses(run, dist.get_rank(), dist.get_world_size()):
        for optimizer in optimizers:
            multiple = RATES[args.optimizer] if optimizer is not optimizers[-1] else 1.0
            optimizer.param_groups[0]["lr"] = rate * multiple
        loss(ddp).backward()
        if args.optimizer != "muon":
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if state is not None:
        state.detach()
    dist.barrier()
    sent = sent_bytes() - before
    for optimizer in optimizers:
        if isinstance(optimizer, ScheduleFree):
            optimizer.finish()
    figure = task.score(model) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    return {**run._asdict(), "loss": figure, "sent": sent / dist.get_world_size()}


def runs_of(args: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs that have no result."""
    parts = [
        args.optimizer,
        f"{args.lr:g}",
        *(text.name.split(".")[0] for text in args.text),
    ]
    if args.width != WIDTH:
        parts.append(f"width {args.width}")
    done = [{name: row[name] for name in Run._fields} for row in rows_of(args.results)]
    for seed, ranks in itertools.product(args.seeds, args.ranks):
        for setting in ["dense", *args.settings]:
            run = Run(", ".join(parts), setting, ranks, 1, seed, args.steps)
            if run._asdict() not in done:
                yield run


def join(rank: int, ranks: int, port: int) -> None:
    """Be one of the ranks, which talk over the loopback interface."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def keep(row: dict[str, Any], results: Path) -> None:
    """Print the figures of a run, and append them to the file of results."""
    print(json.dumps(row), flush=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def rank_main(rank: int, port: int, args: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Make runs between as many ranks on one of them."""
    join(rank, runs[0].ranks, port)

    def pretrained(seed: int) -> dict[str, torch.Tensor]:
        path = args.results.with_name(f"{args.pretrained.name.split('.')[0]}-{args.width}-{seed}.pt")
        if rank == 0 and not path.exists():
            torch.save(trained(args.pretrained, args.width, seed), path)
        dist.barrier()
        return torch.load(path, weights_only=True)

    before = None if args.pretrained is None else pretrained
    task = Gpt(args.text, args.width, args.lr, before, args.pretrained)
    for run in runs:
        row = train(args, run, task)
        if rank == 0:
            keep(row, args.results)
    dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: loss minus that of the dense run of the seed, and bytes."""
    keys = ("model", "ranks", "steps")
    rows = list({tuple(row[name] for name in Run._fields): row for row in rows}.values())
    dense = {(*(row[key] for key in keys), row["seed"]): row for row in rows if row["setting"] == "dense"}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["setting"] != "dense" and (*(row[key] for key in keys), row["seed"]) in dense:
            groups.setdefault((*(row[key] for key in keys), row["setting"]), []).append(row)
    yield "| job | ranks, steps | setting | - dense (95 %) | by seed | fewer |"
    yield "|---|---|---|--:|---|--:|"
    for (model, ranks, steps, setting), those in sorted(groups.items()):
        pairs = [(row, dense[model, ranks, steps, row["seed"]]) for row in those]
        differences = [row["loss"] - other["loss"] for row, other in pairs]
        fewer = sum(other["sent"] for _, other in pairs) / sum(row["sent"] for row, _ in pairs)
        by_seed = ", ".join(f"{each:+.4f}" for each in differences)
        yield f"| {model} | {ranks}, {steps} | {setting} | {paired(differences)} | {by_seed} | {fewer:.1f}x |"


def main() -> None:
    """Train what has no result yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain or gzip")
    parser.add_argument("--pretrained", type=Path, help="text on which the model is trained before")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--lr", type=float, default=LR, help="highest learning rate of AdamW")
    parser.add_argument("--optimizer", choices=RATES, default="adamw", help="of the blocks' matrices")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="*", default=["int8", "updates"])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines of every run")
    args = parser.parse_args()
    todo = list(runs_of(args))
    for ranks in args.ranks:
        if runs := [run for run in todo if run.ranks == ranks]:
            mp.spawn(rank_main, (free_port(), args, runs), nprocs=ranks)
    print("\n".join(table(rows_of(args.results))))


if __name__ == "__main__":
    main()
