"""The places that reports of the metrics go to: the JSON lines file, TensorBoard, monitors of hosts.

The training goes on without a place that fails.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..config import MetricsConfig
from ..config.validation_errors import faulty
from ..console import logger

Event = tuple[str, float, int]  # name, value, step
Sink = Callable[[list[Event]], object]


class ReportSinks:
    """The places of one rank's reports.

    Args:
        config: The ``dct.metrics`` section.
        rank: Rank 0 has all of them, another one only those whose path holds ``{rank}``.

    Raises:
        ConfigError: The file or directory cannot be written, or TensorBoard is asked for and not installed.
    """

    def __init__(self, config: MetricsConfig, rank: int) -> None:
        self._sinks: list[Sink] = []
        path, directory = (_own_path(each, rank) for each in (config.path, config.tensorboard))
        self._file: TextIO | None = None if path is None else _opened("path", path, rank)
        self._lock = threading.Lock()
        self._writer: Any = None
        if directory is not None:
            self._writer = _opened("tensorboard", directory, rank)
            self._sinks.append(partial(write_scalars, self._writer))

    @property
    def has_file(self) -> bool:
        """True if this rank writes lines."""
        return self._file is not None

    def add(self, sink: Sink) -> None:
        """Report to one more monitor, a callable that takes ``[(name, value, step), ...]``."""
        self._sinks.append(sink)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write lines to this rank's file, if it has one."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.writelines(json.dumps(line) + "\n" for line in lines)
                self._file.flush()
            except OSError as error:  # a full disk must not end the training
                logger.warning("dct: metrics are no longer written to %s: %s", self._file.name, error)
                self._file = None

    def report(self, events: list[Event]) -> None:
        """Hand figures to the monitors."""
        for sink in list(self._sinks):
            try:
                sink(events)
            except Exception as error:  # whatever a monitor raises, the training goes on without it
                logger.warning("dct: a monitor failed and gets no more metrics: %r", error)
                self._sinks.remove(sink)

    def close(self) -> None:
        """Close what is open; may be called again."""
        outputs = self._file, self._writer
        self._file = self._writer = None
        self._sinks.clear()
        for output in filter(None, outputs):
            try:
                output.close()
            except OSError as error:
                logger.warning("dct: metrics could not be written to the end: %s", error)


def write_scalars(writer: Any, events: list[Event]) -> None:
    """Hand a report to a ``SummaryWriter`` of TensorBoard."""
    for event in events:
        writer.add_scalar(*event)


def _own_path(path: str | None, rank: int) -> str | None:
    """Return the path that a rank writes to; None if it does not."""
    if path is not None and "{rank}" in path:
        return path.replace("{rank}", str(rank))
    return path if rank == 0 else None


def _opened(key: str, value: str, rank: int) -> Any:
    """Return the file, or the writer of TensorBoard, of an option."""
    try:
        Path(value).parent.mkdir(parents=True, exist_ok=True)
        if key == "path":
            return open(value, "a", encoding="utf-8")
        from torch.utils.tensorboard import SummaryWriter

        os.makedirs(value, exist_ok=True)
        return SummaryWriter(value)
    except ImportError as error:
        cause: Exception = error
        reason = "needs TensorBoard, which is not installed: pip install tensorboard"
    except OSError as error:
        cause, kind = error, "file" if key == "path" else "directory"
        reason = f"must be a {kind} that can be written ({error.strerror or error})"
    fault = f"dct.metrics.{key} = {json.dumps(value)}: {reason}"
    raise faulty([fault], f"dct configuration on rank {rank}") from cause
