"""A replica of torchft, for processes that are killed: trains a small model to a given step."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchft
from torch import nn

from dct_plugin.integrations.torchft import process_groups
from dct_plugin.torchft import ProcessGroupGloo
from support.torchft_replicas import LIMIT, manager_of


@dataclass
class Job:
    """The work of one replica.

    Attributes:
        name: Its id.
        lighthouse: Address of the lighthouse.
        out: File for its results.
        replicas: It ends when so many replicas have committed five steps in a row.
        die_at: Step in whose backward pass it kills itself; -1 for never.
        section: The ``dct`` section.
        seconds: Least time that a step takes.
        stop: File that says after how many steps and with how many replicas to end at the earliest; until it
            is there, replicas go on. Each writes its steps so far beside ``out``.
        version: Version of the plugin that it states; empty for the installed one.
    """

    name: str
    lighthouse: str
    out: str
    replicas: int = 3
    die_at: int = -1
    section: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    stop: str = ""
    version: str = ""
    steps: int = field(default=0, init=False)

    def follow_orders(self, step: int) -> None:
        """Write where this replica is, and look when it is to end."""
        if self.stop:
            Path(f"{self.out}.at").write_text(str(step))
            os.replace(f"{self.out}.at", f"{self.out}.step")
            if Path(self.stop).exists():
                self.steps, self.replicas = map(int, Path(self.stop).read_text().split())
                self.stop = ""


torch.manual_seed(0)
_MODEL = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 8))


def model_of() -> nn.Module:
    """The same model in every process and thread, which share a generator of random numbers."""
    return copy.deepcopy(_MODEL)


def batch(step: int, seed: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of a fixed function, other ones for each step and replica."""
    points = torch.randn(size, 32, generator=torch.Generator().manual_seed(1000 * step + seed))
    return points, points[:, :8].sin() + points[:, 8:16] * points[:, 16:24]


@torch.no_grad()
def test_loss(model: nn.Module) -> float:
    points, wanted = batch(0, 999, 2048)
    return float(F.mse_loss(model(points), wanted))


def run(job: Job) -> dict[str, Any]:
    """Train to the last step and return figures, and the weights."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pg = ProcessGroupGloo(job.section, timeout=LIMIT)
    state = {"model": model, "optimizer": optimizer}
    manager = manager_of(pg, job.name, job.lighthouse, state=state, quorum_timeout=timedelta(seconds=60))
    wrapped = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=0.1)
    stepper = torchft.Optimizer(manager, optimizer)
    dying = [False]

    def die(*_: Any) -> None:
        if dying[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    list(model.parameters())[1].register_post_accumulate_grad_hook(die)  # other buckets have left by then
    tries = together = 0
    while job.stop or manager.current_step() < job.steps or together < 5:
        stepper.zero_grad()
        step = manager.current_step()
        dying[0] = step == job.die_at
        points, wanted = batch(step, sum(map(ord, job.name)))
        F.mse_loss(wrapped(points), wanted).backward()
        stepper.step()
        tries += 1
        job.follow_orders(manager.current_step())
        complete = manager.current_step() > step and manager.num_participants() == job.replicas
        together = together + 1 if complete and manager.is_participating() else 0
        time.sleep(job.seconds)
    classes = pg.metrics.summary().classes
    result = {
        "weights": [p.detach().clone() for p in model.parameters()],
        "loss": test_loss(model),
        "tries": tries,
        "step": manager.current_step(),
        "counts": vars(pg.counts),
        "rank": pg.metrics.rank,
        "classes": {name: (each.dense_bytes, each.sent_bytes) for name, each in classes.items()},
    }
    manager.shutdown(wait=False)
    pg.shutdown()
    return result


def work(job: Job) -> None:
    """Run a replica in this process, which ends with it."""
    torch.set_num_threads(1)
    process_groups.__version__ = job.version or process_groups.__version__
    outcome = run(job)
    torch.save(outcome, job.out + ".tmp")
    os.replace(job.out + ".tmp", job.out)
    sys.stdout.flush()
    os._exit(0)  # torchft's threads need not end
