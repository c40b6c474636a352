"""Times and bytes of one exchange, for its metrics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from ..metrics import Record
from ..transport.exchange import Exchange


class ExchangeTimer:
    """Measures the phases of one exchange, and counts the bytes that it sends.

    Args:
        exchange: The transport.
        phases: Of ``select``, ``encode``, ``exchange`` and ``decode`` those that :meth:`lap` ends, in order.
    """

    def __init__(self, exchange: Exchange, phases: Sequence[str] = ("encode", "exchange", "decode")) -> None:
        self._exchange, self._phases = exchange, phases
        self._sent, self._waited = exchange.sent_bytes, exchange.waited_ms
        self._times = [time.perf_counter()]

    def lap(self) -> None:
        """End a phase."""
        self._times.append(time.perf_counter())

    @property
    def sent_bytes(self) -> int:
        """Bytes sent since the timer was made."""
        return self._exchange.sent_bytes - self._sent

    @property
    def last_seconds(self) -> float:
        """Seconds of the phase that has just ended."""
        return self._times[-1] - self._times[-2]

    def record(self, cls: str, **figures: Any) -> Record:
        """Return the record of the exchange, with ``figures`` in place of its own where both exist."""
        spans = zip(self._phases, itertools.pairwise(self._times), strict=False)
        own = {f"{phase}_ms": 1e3 * (end - begin) for phase, (begin, end) in spans}
        own["sent_bytes"] = self.sent_bytes
        own["waited_ms"] = self._exchange.waited_ms - self._waited
        return Record(cls, **{**own, **figures})
