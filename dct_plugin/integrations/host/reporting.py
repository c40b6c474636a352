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
        self._before_finish = before_finish
        self._host_traffic = contextlib.ExitStack()
        self._host_traffic.enter_context(HostTraffic(metrics))
        self._finished = False
        if monitor is not None and metrics.rank == 0:
            metrics.add_sink(monitor)
        atexit.register(self.finish)

    def finish(self) -> None:
        """Write what is left and print the summary on rank 0; the second call does nothing."""
        if self._finished:
            return
        self._finished = True
        atexit.unregister(self.finish)
        if self._before_finish is not None:
            self._before_finish()
        self._host_traffic.close()
        self.metrics.close()
        if self.metrics.rank == 0 and self.metrics.summary().steps:
            print(self.metrics.summary_line(), flush=True)
