"""Advice on what to try next: one table of rules over the figures of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..metrics import HOST
from .run import Run


class Advice(NamedTuple):
    """Something to try, and why."""

    try_this: str
    because: str


def _slower(run: Run) -> Advice | None:
    step, dense = run.step_ms, run.dense_step_ms
    if step is None or dense is None or step <= 1.03 * dense:
        return None
    own = sum(run.part(key) for key in ("select_ms", "encode_ms", "decode_ms"))
    return Advice(
        'Leave the plugin off on this link: "enabled": false.',
        f"A step takes {step:.1f} ms, the dense steps at the start took {dense:.1f} ms; selecting, encoding "
        f"and decoding take {own:.1f} ms.",
    )


def _waiting(run: Run) -> Advice | None:
    waited, rest = run.part("waited_ms"), run.part("exchange_ms")
    if waited < 1 or waited <= rest or waited <= 0.1 * (run.step_ms or 0):
        return None
    because = f"{waited:.1f} of {waited + rest:.1f} ms of the exchange pass until the slowest rank is ready."
    if len(run.ranks) == 1:
        return Advice(
            "Look for the slow rank; {rank} in dct.metrics.path gives a file for each, and dct report takes "
            "them all.",
            f"{because} Fewer bytes do not shorten that.",
        )
    by_rank = run.waited()
    slow = min(by_rank, key=by_rank.__getitem__)
    return Advice(
        f"Look at rank {slow}: its data loading, its processor, its share of the batch.",
        f"{because} It waits least, {by_rank[slow]:.1f} ms, so the others wait for it.",
    )


def _gathers(run: Run) -> Advice | None:
    share = run.share(f"{HOST}all_gather", "parameter_full")
    if share <= 0.5:
        return None
    return Advice(
        'Threshold updated weights, too: "parameters" in dct.data_parallel (ZeRO-1 and 2, Megatron\'s '
        "distributed optimizer).",
        f"{100 * share:.0f} % of what is sent after the start are gathers of whole weights.",
    )


def _host(run: Run) -> Advice | None:
    share = run.share(HOST) - run.share(f"{HOST}all_gather")
    if share <= 0.5:
        return None
    return Advice(
        "Look at which of the framework's own collectives are left; docs/support.md says what is compressed.",
        f"{100 * share:.0f} % of what is sent after the start are theirs, not gradients of the plugin.",
    )


def _small(run: Run) -> Advice | None:
    share = run.share("gradient_small", "parameter_small")
    if share <= 0.3:
        return None
    return Advice(
        "Lower min_numel, so that small tensors are thresholded, too.",
        f"{100 * share:.0f} % of what is sent after the start are tensors below it, which are sent dense.",
    )


def _start(run: Run) -> Advice | None:
    steady, all_steps = run.ratio(run.steady), run.ratio(run.windows)
    if run.steady is run.windows or steady is None or all_steps is None or steady < 2 * all_steps:
        return None
    return Advice(
        "Judge a longer run, or shorten the start: warmup_steps, sparsity_warmup_steps.",
        f"After the start {steady:.3g}x fewer bytes cross, in the whole run {all_steps:.3g}x.",
    )


def _density(run: Run) -> Advice | None:
    for cls in run.thresholded:
        if (pair := run.density(cls)) is None:
            continue
        density, target = pair
        says = f"The density of {cls} is {density:.3g}, its target {target:.3g}."
        if density > 1.5 * target and run.part("exchange_ms") > 0.2 * (run.step_ms or float("inf")):
            return Advice("Measure thresholds more often: a shorter expert.threshold_lifespan.", says)
        if density < 0.5 * target:
            return Advice("Wait for the thresholds, or shorten expert.threshold_lifespan.", says)
    return None


def _tensor(run: Run) -> Advice | None:
    if not run.tensors or run.tensors[0].miss < 4:
        return None
    worst = run.tensors[0]
    return Advice(
        f"Look at the gradient of {worst.name}: is it zero, or of very few large entries?",
        f"Its density is {worst.density:.3g}, its target {worst.target:.3g}.",
    )


def _network(run: Run) -> Advice | None:
    exchange, step = run.part("exchange_ms"), run.step_ms
    if step is None or exchange <= 0.4 * step or run.share(*run.thresholded) < 0.5:
        return None
    return Advice(
        'Send less: a higher sparsity, or "value_dtype": "int8"; dct config suggest says what keeps quality.',
        f"{exchange:.1f} of {step:.1f} ms are the exchange, without the wait for slow ranks.",
    )


def _cheap(run: Run) -> Advice | None:
    exchange, step = run.part("exchange_ms") + run.part("waited_ms"), run.step_ms
    if step is None or not run.thresholded or exchange >= 0.05 * step:
        return None
    return Advice(
        "Send more, for quality: a lower sparsity costs little time here.",
        f"The exchange takes {exchange:.1f} of {step:.1f} ms of a step.",
    )


def _unmeasured(run: Run) -> Advice | None:
    if run.dense_step_ms is not None:
        return None
    return Advice(
        'Have some dense steps at the start to compare with: "warmup_steps": 10.',
        "Without them this page cannot say whether steps are faster.",
    )


#: The rules, most important first. Only the first rule of a row that holds gives advice.
RULES: tuple[tuple[Callable[[Run], Advice | None], ...], ...] = (
    (_slower,),
    (_waiting,),
    (_gathers, _host, _small),
    (_density, _network, _cheap),
    (_tensor,),
    (_start,),
    (_unmeasured,),
)


def advice(run: Run) -> list[Advice]:
    """Return what to try next: for each row of :data:`RULES`, the advice of the first rule that holds."""
    found = (next((said for rule in row if (said := rule(run)) is not None), None) for row in RULES)
    return [said for said in found if said is not None]
