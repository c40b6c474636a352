"""Reports of the metrics to a host's monitor, and the summary line at the end of training."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable

from dct_plugin.host_traffic import HostTraffic
from dct_plugin.metrics import Metrics, Sink


def start_reporting(
    metrics: Metrics, monitor: Sink | None = None, *, before_finish: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Count what the host sends by itself and feed a monitor, until the host is done or the process ends.

    Args:
        metrics: The metrics to report.
        monitor: Called with ``[(name, value, step), ...]`` on rank 0.
        before_finish: Called before the metrics are closed, to record what is still missing.

    Returns:
        A function that writes what is left and prints the summary on rank 0; the second call does nothing.
    """

    process = os.getpid()

    def summarize() -> None:
        if os.getpid() != process:  # a forked child, whose exit runs the handlers of its parent
            return
        metrics.close()
        if metrics.rank == 0 and metrics.summary().steps:
            print(metrics.summary_line(), flush=True)

    ends = contextlib.ExitStack()
    ends.callback(summarize)
    ends.enter_context(HostTraffic(metrics))
    if before_finish is not None:
        ends.callback(before_finish)
    if monitor is not None and metrics.rank == 0:
        metrics.add_sink(monitor)
    ends.callback(atexit.unregister, ends.close)
    atexit.register(ends.close)
    return ends.close
