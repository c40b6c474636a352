r"""Measure what the start costs a run whose length the plugin is not told: loss and bytes of the whole run.

torch DDP, two ranks, ``adam.py``'s GPT and text, AdamW under ``OneCycleLR`` with its peak at 2e-3, batches of
8 x 64 characters per rank, no clipping. Held-out loss in nats per character, paired with the dense run of the
seed; bytes are all messages of the run, against fp32 gradients.

    python benchmarks/studies/start.py --text wikitext2_valid.txt.gz --steps 300 600 1200 --seeds 0 1 2
    python benchmarks/studies/start.py --text wikitext2_valid.txt.gz --steps 4800 --settings dense default
    python benchmarks/studies/start.py --text wikitext2_valid.txt.gz --settings statistics "81, power 2"
    unshare -rn sh -c 'ip link set lo up
        tc qdisc add dev lo root tbf rate 100mbit burst 128k limit 1m; "$@"' - \
        python benchmarks/studies/start.py --text wikitext2_valid.txt.gz --steps 1200 --seeds 0 1 2 \
        --settings dense "nothing written"

``statistics`` trains dense and gives the steps at which statistics of the gradients have settled. A setting
``N, power P`` has N dense steps, then the density falls with the power P of the step. With "nothing written"
the ranks compare times, so the link has to be a slow one. ``--results`` keeps every run at once.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import adam
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.recommender.links.team import free_port

#: Settings of the start; None trains dense.
SETTINGS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "statistics": None,
    "default": {"sparsity": 0.99, "quality": None},  # the settings, whatever the link
    "nothing written": {},  # those, int8 or dense, as the times of steps say
    "60 + 180": {"sparsity": 0.99, "warmup_steps": 60, "sparsity_warmup_steps": 180},
    "60 + 400": {"sparsity": 0.99, "warmup_steps": 60, "sparsity_warmup_steps": 400},
}
#: Settings of the table.
ROWS = ["dense", "default", "60, power 2", "60, power 1.5", "60 + 180", "60 + 400"]
#: Levels of the statistics below which gradients count as settled.
LEVELS = {"signal": 0.9, "drift": 0.5, "moments": 0.2}


def section_of(setting: str) -> dict[str, Any] | None:
    """The settings of :data:`SETTINGS`, or of ``N, power P``."""
    if setting in SETTINGS:
        return SETTINGS[setting]
    dense, power = setting.split(", power ")
    ramp = round(int(dense) * (100 ** (1 / float(power)) - 1))
    return {
        "sparsity": 0.99,
        "warmup_steps": int(dense),
        "sparsity_warmup_steps": ramp,
        "expert": {"ramp": "power"},
    }


class Statistics:
    """Statistics of dense gradients, each a mean over some steps.

    - ``signal``: the square of the mean gradient of the ranks, relative to the mean square of their own.
    - ``drift``: the square of the mean of about ten steps' gradients, relative to the mean of their squares.
    - ``moments``: the change of the second moments within 20 steps, relative to them.
    """

    def __init__(self) -> None:
        self.settled: dict[str, int] = {}
        """Steps after which the statistics were below their levels."""
        self._step, self._own, self._mean, self._recent_square = 0, 0.0, 0.0, 0.0
        self._recent = self._moments = torch.zeros(())
        self._earlier: list[torch.Tensor] = []

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """See the gradient of this rank and the mean of all, fp32 [parameters]."""
        self._step += 1
        square, squares = float(mean @ mean), own @ own
        dist.all_reduce(squares)
        self._own = 0.95 * self._own + 0.05 * float(squares) / dist.get_world_size()
        self._mean = 0.95 * self._mean + 0.05 * square
        self._recent, self._recent_square = (
            0.9 * self._recent + 0.1 * mean,
            0.9 * self._recent_square + 0.1 * square,
        )
        self._moments = 0.99 * self._moments + 0.01 * mean * mean
        moments = self._moments / (1 - 0.99**self._step)
        self._earlier = [*self._earlier, moments][-21:]
        values = {
            "signal": self._mean / self._own,
            "drift": float(self._recent @ self._recent) / self._recent_square / (1 - 0.9**self._step),
            "moments": float((moments - self._earlier[0]).abs().sum() / moments.sum()),
        }
        for name, value in values.items():
            if self._step > 20 and value < LEVELS[name]:
                self.settled.setdefault(name, self._step)


def train(
    options: argparse.Namespace, setting: str, steps: int, seed: int, data: tuple[Any, Any]
) -> dict[str, Any]:
    """Make one run on this rank; return its loss and bytes."""
    training, held_out = data
    model = adam.model_of(seed)
    ddp, parameters = DistributedDataParallel(model), list(model.parameters())
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    if options.constant:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=2e-3)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    section, state = section_of(setting), None
    if section is not None:
        state = dct_plugin.attach(ddp, optimizer, {"data_parallel": section})
    statistics = Statistics() if setting == "statistics" else None
    generator, offsets = torch.Generator().manual_seed(seed), torch.arange(adam.SEQUENCE)
    for _ in range(steps):
        starts = torch.randint(len(training) - adam.SEQUENCE - 1, (2, adam.BATCH), generator=generator)
        where = starts[dist.get_rank()][:, None] + offsets
        logits = ddp(training[where]).view(-1, adam.SYMBOLS)
        loss = functional.cross_entropy(logits, training[where + 1].view(-1))
        own = None if statistics is None else _flat(torch.autograd.grad(loss, parameters, retain_graph=True))
        loss.backward()
        if statistics is not None and own is not None:
            statistics.observe(own, _flat([each.grad for each in parameters if each.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    model.eval()
    row = {"steps": steps, "seed": seed, "setting": setting, "loss": adam.held_out_loss(model, held_out)}
    if statistics is not None:
        row["settled"] = statistics.settled
    if state is not None:
        classes: dict[str, Any] = state.metrics.summary().classes
        dense = 4 * steps * sum(parameter.numel() for parameter in parameters)
        row["times_fewer"] = dense / sum(part.sent_bytes for part in classes.values())
        dct_plugin.detach(state)
    return row


def _flat(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in gradients])


def _rank(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data = adam.text_of(options.text)
    for steps in options.steps:
        for seed in options.seeds:
            for setting in options.settings:
                row = json.dumps(train(options, setting, steps, seed, data))
                if rank == 0:
                    print(row, flush=True)
                    if options.results is not None:
                        with options.results.open("a") as file:
                            file.write(row + "\n")
    dist.destroy_process_group()


def _setting(name: str) -> str:
    section_of(name)  # raises where there is none
    return name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 600, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--settings", nargs="+", default=ROWS, type=_setting)
    parser.add_argument("--constant", action="store_true", help="Adam at a constant rate of 2e-3")
    parser.add_argument("--results", type=Path)
    mp.spawn(_rank, (free_port(), parser.parse_args()), nprocs=2)


if __name__ == "__main__":
    main()
