"""Times of whole gathers and of exact updates that a test gives: no clock decides between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dct_plugin.data_parallel import exact_updates
from dct_plugin.data_parallel.autotune import measurements
from dct_plugin.data_parallel.exact_updates import PERIOD, GatherChoice

_TIMED = GatherChoice.timed


def give(seconds: Callable[[bool], float], period: int = PERIOD) -> None:
    """In this process, gathers (True) and exact updates (False) take so many seconds from now on, and the
    next trial begins ``period`` steps after a decision.
    """
    now = [0.0]

    @contextmanager
    def timed(choice: GatherChoice, weights: int, *, whole: bool) -> Iterator[bool]:
        with _TIMED(choice, weights, whole=whole) as measured:
            yield measured
            now[0] += seconds(whole)

    exact_updates.clock = lambda: now[0]
    exact_updates.PERIOD = period
    GatherChoice.timed = timed  # type: ignore[method-assign]


def exact_updates_are_faster() -> None:
    """Gathers take two seconds, exact updates one."""
    give(lambda whole: 1.0 + whole)


def whole_gathers_are_faster() -> None:
    """Gathers take one second, exact updates two, and the next trial of both begins after one step."""
    give(lambda whole: 2.0 - whole, period=1)


def time_codings_briefly() -> None:
    """Time codings once and on few entries, for tests that hold whatever codings cost."""
    measurements.REPEATS, measurements.MOST_ENTRIES = 1, 0
