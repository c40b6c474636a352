"""Advice on what to try next: rules over the figures of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..metrics import HOST
from .run import Run


class Advice(NamedTuple):
    """Something to try, and why."""

    try_this: str
    because: str


def _time(run: Run) -> Iterator[Advice]:
    step, dense = run.step_ms, run.dense_step_ms
    if step is not None and dense is not None and step > 1.03 * dense:
        own = sum(run.part(key) for key in ("select_ms", "encode_ms", "decode_ms"))
        yield Advice(
            'Leave the plugin off on this link: "enabled": false.',
            f"A step takes {step:.1f} ms, the dense steps at the start took {dense:.1f} ms; selecting, "
            f"encoding and decoding take {own:.1f} ms.",
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
    gathers = run.share(f"{HOST}all_gather", "parameter_full")
    if gathers > 0.5 and "parameter_exact" not in run.classes:  # else they were chosen
        yield Advice(
            'Send updated weights where they changed, or threshold them: "parameters": "exact" or {} in '
            "dct.data_parallel (ZeRO-1 and 2, Megatron's distributed optimizer).",
            f"{100 * gathers:.0f} % of what is sent after the start are gathers of whole weights.",
        )
    host = run.share(HOST) - run.share(f"{HOST}all_gather")
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


def _exchange(run: Run) -> Iterator[Advice]:
    exchange, step = run.part("exchange_ms"), run.step_ms
    for cls in run.thresholded:
        density, target = run.density(cls) or (1.0, 1.0)
        says = f"The density of {cls} is {density:.3g}, its target {target:.3g}."
        if density > 1.5 * target and exchange > 0.2 * (step or float("inf")):
            yield Advice("Measure thresholds more often: a shorter expert.threshold_lifespan.", says)
        if density < 0.5 * target:
            yield Advice("Wait for the thresholds, or shorten expert.threshold_lifespan.", says)
    if step is None:
        return
    if exchange > 0.4 * step and run.share(*run.thresholded) >= 0.5:
        yield Advice(
            'Send less: a higher sparsity, or "value_dtype": "int8"; dct config suggest says what keeps '
            "quality.",
            f"{exchange:.1f} of {step:.1f} ms are the exchange, without the wait for slow ranks.",
        )
    whole = exchange + run.part("waited_ms")
    if run.thresholded and whole < 0.05 * step:
        yield Advice(
            "Send more, for quality: a lower sparsity costs little time here.",
            f"The exchange takes {whole:.1f} of {step:.1f} ms of a step.",
        )


def _tensor(run: Run) -> Iterator[Advice]:
    for worst in run.tensors[:1]:
        if worst.miss >= 4:
            yield Advice(
                f"Look at the gradient of {worst.name}: is it zero, or of very few large entries?",
                f"Its density is {worst.density:.3g}, its target {worst.target:.3g}.",
            )


def _start(run: Run) -> Iterator[Advice]:
    steady, all_steps = run.ratio(run.steady), run.ratio(run.windows)
    if run.steady is not run.windows and steady and all_steps and steady >= 2 * all_steps:
        yield Advice(
            "Judge a longer run, or shorten the start: warmup_steps, sparsity_warmup_steps.",
            f"After the start {steady:.3g}x fewer bytes cross, in the whole run {all_steps:.3g}x.",
        )


def _unmeasured(run: Run) -> Iterator[Advice]:
    if run.dense_step_ms is None:
        yield Advice(
            'Have some dense steps at the start to compare with: "warmup_steps": 10.',
            "Without them this page cannot say whether steps are faster.",
        )


def advice(run: Run) -> list[Advice]:
    """Return what to try next, most important first: of each kind of advice the first that holds."""
    kinds = (_time, _waiting, _classes, _exchange, _tensor, _start, _unmeasured)
    return [said for kind in kinds if (said := next(kind(run), None)) is not None]
