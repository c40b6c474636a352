"""Advice on what to try next: rules over the figures of a run.

Settings are chosen by :func:`..policy.resolve` and by measurement, so the page advises none: it says whether
the plugin pays, and what holds the run up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..metrics import HOST
from .run import Run


class Advice(NamedTuple):
    """Something to try, and why."""

    try_this: str
    because: str


def _decision(run: Run) -> Iterator[Advice]:
    step, dense = run.step_ms, run.dense_step_ms
    if run.decisions and run.decisions[-1].setting == "dense":
        yield Advice(
            "Leave the plugin out on this link.",
            f"The ranks measured it in step {run.decisions[-1].step}: dense steps are as fast.",
        )
    elif dense is None:
        yield Advice(
            "Ask whether it pays: dct advise -- LAUNCH LINE.",
            "There are no dense steps here to compare with.",
        )
    elif step is not None and step > 1.03 * dense:
        own = sum(run.part(key) for key in ("select_ms", "encode_ms", "decode_ms"))
        yield Advice(
            'Leave the plugin out on this link: "enabled": false.',
            f"A step takes {step:.1f} ms, a dense step {dense:.1f} ms; selecting, encoding and decoding take "
            f"{own:.1f} ms.",
        )


def _waiting(run: Run) -> Iterator[Advice]:
    waited, rest = run.part("waited_ms"), run.part("exchange_ms")
    if waited < 1 or waited <= rest or waited <= 0.1 * (run.step_ms or 0):
        return
    because = f"{waited:.1f} of {waited + rest:.1f} ms of the exchange pass until the slowest rank is ready."
    if len(run.ranks) == 1:
        yield Advice(
            "Look for the slow rank; {rank} in dct.metrics.path gives a file for each, and dct report takes "
            "them all.",
            f"{because} Fewer bytes do not shorten that.",
        )
        return
    by_rank = run.waited()
    slow = min(by_rank, key=by_rank.__getitem__)
    yield Advice(
        f"Look at rank {slow}: its data loading, its processor, its share of the batch.",
        f"{because} It waits least, {by_rank[slow]:.1f} ms, so the others wait for it.",
    )


def _classes(run: Run) -> Iterator[Advice]:
    host = run.share(HOST)
    if host > 0.5:
        yield Advice(
            "Look at which of the framework's own collectives are left; docs/support.md says what is "
            "compressed.",
            f"{100 * host:.0f} % of what is sent after the start are theirs, not gradients of the plugin.",
        )
    small = run.share("gradient_small", "parameter_small")
    if small > 0.3:
        yield Advice(
            "Lower min_numel, so that small tensors are thresholded, too.",
            f"{100 * small:.0f} % of what is sent after the start are tensors below it, which are sent "
            "dense.",
        )


def _tensor(run: Run) -> Iterator[Advice]:
    for worst in run.tensors[:1]:
        if worst.miss >= 4:
            yield Advice(
                f"Look at the gradient of {worst.name}: is it zero, or of very few large entries?",
                f"Its density is {worst.density:.3g}, its target {worst.target:.3g}.",
            )


def advice(run: Run) -> list[Advice]:
    """Return what to try next, most important first: of each kind of advice the first that holds."""
    kinds = (_decision, _waiting, _classes, _tensor)
    return [said for kind in kinds if (said := next(kind(run), None)) is not None]
