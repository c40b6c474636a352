"""Reports of the metrics to a host's monitor, and the summary line at the end of training."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable

from dct_plugin.host_traffic import HostTraffic
from dct_plugin.metrics import Metrics, Sink


class Reporting:
    """Counts what the host sends by itself, feeds a monitor, and closes the metrics once: when the host is
    done, or the process ends.

    Args:
        metrics: The metrics to report.
        monitor: Called with ``[(name, value, step), ...]`` on rank 0.
        before_finish: Called before the metrics are closed, to record what is still missing.
    """

    def __init__(
        self,
        metrics: Metrics,
        monitor: Sink | None = None,
        *,
        before_finish: Callable[[], None] | None = None,
    ) -> None:
        self.metrics = metrics
        self._ends = contextlib.ExitStack()
        self._ends.callback(self._summarize)
        self._ends.enter_context(HostTraffic(metrics))
        if before_finish is not None:
            self._ends.callback(before_finish)
        if monitor is not None and metrics.rank == 0:
            metrics.add_sink(monitor)
        atexit.register(self.finish)

    def finish(self) -> None:
        """Write what is left and print the summary on rank 0; the second call does nothing."""
        atexit.unregister(self.finish)
        self._ends.close()

    def _summarize(self) -> None:
        self.metrics.close()
        if self.metrics.rank == 0 and self.metrics.summary().steps:
            print(self.metrics.summary_line(), flush=True)
