"""Metrics to DeepSpeed's monitor, and one line at the end of training."""

from __future__ import annotations

import atexit
from types import MethodType
from typing import Any

from dct_plugin.metrics import Event, Metrics


class Reporting:
    """Feeds an engine's monitor and prints the summary, once: when the engine is destroyed or the process
    ends.

    Args:
        engine: DeepSpeed's engine.
        metrics: Filled by the reducer.
    """

    def __init__(self, engine: Any, metrics: Metrics) -> None:
        self.metrics = metrics
        self._print = engine.global_rank == 0
        self._finished = False
        # No reference to the engine itself: one that is dropped must not live until the process ends.
        self._monitor = engine.monitor
        if self._print and engine.monitor.enabled:
            metrics.add_sink(self._write_events)

    def install(self, engine: Any) -> None:
        """Patch the engine instance."""
        destroy = engine.destroy

        def destroy_(_: Any) -> None:
            self.finish()
            destroy()

        engine.destroy = MethodType(destroy_, engine)
        atexit.register(self.finish)

    def finish(self) -> None:
        """Write what is left and print the summary; the second call does nothing."""
        if self._finished:
            return
        self._finished = True
        atexit.unregister(self.finish)
        self.metrics.close()
        if self._print and self.metrics.summary().steps:
            print(self.metrics.summary_line(), flush=True)

    def _write_events(self, events: list[Event]) -> None:
        self._monitor.write_events(list(events))
