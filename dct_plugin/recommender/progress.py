"""Progress of a launch, fed by the trainer's events."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Where no bar is drawn, a line tells about the steps after so many seconds.
QUIET_SECONDS = 15.0


class LaunchProgress:
    """A context manager: one bar for all runs of a launch, and a line for each finished epoch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._runs = self._run = 0
        self._name = ""
        self._loss: float | None = None
        self._said = time.monotonic()
        self._bars = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        starting = "starting the ranks (the first time, DeepSpeed compiles a part of itself)"
        self._task = self._bars.add_task(starting, total=None)

    def __enter__(self) -> LaunchProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def follow(self, event: dict[str, Any]) -> None:
        """Take an event of the launch."""
        kind = event["event"]
        if kind == "slow_start":
            for advice in event["advice"]:
                self._say(f"Still starting, {advice}")
        elif kind == "start":
            self._runs = event["runs"]
            self._bars.update(self._task, total=event["steps"])
            for line in event["roles"]:
                self._say(line)
        elif kind == "initialize":
            self._run += 1
            self._loss = None
            self._name = f"{event['config']}, seed {event['seed']}"
            self._describe("")
        elif kind == "step":
            loss = event["loss"]
            self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
            self._bars.advance(self._task)
            self._describe(f", loss {self._loss:.4f}")
            if not self._console.is_terminal and time.monotonic() - self._said > QUIET_SECONDS:
                self._said = time.monotonic()
                task = self._bars.tasks[self._task]
                self._say(
                    f"{self._name}: step {task.completed:.0f} of {task.total:.0f}, loss {self._loss:.4f}"
                )
        elif kind == "evaluate":
            self._describe(", evaluating")
        elif kind == "epoch":
            self._say(
                f"{self._name}, epoch {event['epoch'] + 1}: "
                f"AUC {event['auc']:.4f}, log loss {event['log_loss']:.4f}"
            )
        elif kind == "result":
            self._bars.update(self._task, description="done")

    def _describe(self, state: str) -> None:
        run = f"{self._run}/{self._runs} {self._name}{state}"
        self._bars.update(self._task, description=run)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
