"""Progress bars of the demo's runs, fed by the training script's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["RunProgress"]

Follow = Callable[[dict[str, Any]], None]

_STARTING = "starting (the first time, DeepSpeed compiles a part of itself)"


class RunProgress:
    """A context manager; :meth:`follow` adds the bar of one run."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:>5}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )

    def __enter__(self) -> RunProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def follow(self, name: str) -> Follow:
        """Add a bar; returns the function that takes the run's events."""
        task = self._bars.add_task(name, total=None, state=_STARTING)
        mean: float | None = None

        def on_event(event: dict[str, Any]) -> None:
            nonlocal mean
            kind = event["event"]
            if kind == "start":
                self._bars.update(task, total=event["steps"], state="")
            elif kind == "step":
                mean = event["loss"] if mean is None else 0.95 * mean + 0.05 * event["loss"]
                self._bars.update(task, completed=event["step"], state=f"loss {mean:.4f}")
            elif kind == "evaluate":
                self._bars.update(task, state="evaluating")
            elif kind == "result":
                self._bars.update(task, state=f"AUC {event['auc']:.4f}, log loss {event['log_loss']:.4f}")
                self._bars.stop_task(task)

        return on_event
