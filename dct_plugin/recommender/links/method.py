"""The methods of a workload that a rank is asked to measure, each with a step of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from dct_plugin.metrics import Metrics


@dataclass
class Method:
    """One way to communicate, ready to train.

    Attributes:
        name: For the tables.
        step: One optimizer step; it returns when the step is over on this rank.
        metrics: What the plugin records in these steps; none for methods that are not the plugin's.
        around: Entered before, and left after, a block of steps; not part of their time.
        warmup: Steps before the first one that counts.
    """

    name: str
    step: Callable[[], object]
    metrics: Sequence[Metrics] = ()
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    warmup: int = 3


class Workload(Protocol):
    """A model and its data; made on every rank with the options of the launch, group and rank set up."""

    def __init__(self, options: Mapping[str, Any]) -> None: ...

    def open(self, variant: str) -> list[Method]:
        """The methods of a variant, in the same order on all ranks; a collective."""

    def close(self) -> None:
        """Free what :meth:`open` made; a collective."""


def totals_of(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Return the totals so far of what metrics time and count, by name (``select_ms``, ``sent_bytes``)."""
    totals: dict[str, float] = {}
    for source in metrics:
        summary = source.summary()
        for part in ("select", "encode", "exchange", "decode", "waited"):
            name = f"{part}_ms"
            totals[name] = totals.get(name, 0.0) + getattr(summary, name) * summary.steps
        for name in ("dense_bytes", "sent_bytes"):
            totals[name] = totals.get(name, 0.0) + getattr(summary, name)
    return totals
