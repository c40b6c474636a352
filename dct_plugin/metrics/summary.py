"""The summary of a run: totals and averages of its tensor classes, and the line that says them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal


def ratio_of(numerator: float, denominator: float) -> float | None:
    """Return a quotient; None for a denominator of zero."""
    return numerator / denominator if denominator else None


@dataclass(frozen=True)
class ClassSummary:
    """Totals of one tensor class (or of all) over a run.

    Bytes are totals; ``ratio`` is dense over sent bytes, ``None`` when nothing was sent.  ``density`` and
    ``density_target`` cover the thresholded messages (target below 1), ``None`` when there were none.
    ``tau`` is the mean over entries.  Milliseconds are averages per step.  ``intra_node`` are bytes between
    ranks of one node, in totals; they are not in ``sent_bytes``.
    """

    steps: int
    dense_bytes: int
    sent_bytes: int
    ratio: float | None
    density: float | None
    density_target: float | None
    tau: float | None
    refreshes: int
    held_back: int
    select_ms: float
    encode_ms: float
    exchange_ms: float
    decode_ms: float
    waited_ms: float
    intra_node: int


@dataclass(frozen=True)
class Summary(ClassSummary):
    """Totals over all tensor classes, and each class by itself in ``classes``.

    ``start_steps`` is the number of first steps that were dense or had a rising sparsity.  ``steady`` and
    ``steady_classes`` are the same totals and classes after these steps, or of the whole run if they did not
    end.  ``step_ms`` is the median duration of a step after the start, all of it; ``None`` for a run of one
    step.
    """

    classes: dict[str, ClassSummary]
    steady: ClassSummary
    steady_classes: dict[str, ClassSummary]
    step_ms: float | None
    start_steps: int

    @property
    def largest(self) -> tuple[str, float] | None:
        """The class that sends most after the start, and its share of what is sent."""
        sent = {cls: part.sent_bytes for cls, part in self.steady_classes.items() if "/" not in cls}
        most = max(sent, key=sent.__getitem__, default=None)
        return (most, sent[most] / sum(sent.values())) if most is not None and sent[most] > 0 else None


#: A class without bytes. Its density is the share of step-ahead's tensors whose gradients were taken at
#: displaced weights.
DISPLACED = "gradient/displaced"

#: Prefix of classes that count what is sent dense although its kind is compressed. The classes of ``HOST``
#: count these bytes, too.
UNCOMPRESSED = "uncompressed/"

#: The reason of steps that the ranks decided to make dense; the decision has a line of its own.
FASTER = "faster"
#: Reasons why tensors of a kind that is compressed cross dense.
REASONS = {
    "experts": "experts (dct.model_parallel.expert_gradients is off)",
    "unknown_group": "group of ranks not known",
    "unknown_bucket": "bucket not known",
    "unknown_tensors": "gradients of no parameter of the model",
    "sparse": "sparse gradients",
    FASTER: "dense steps, timed for the decision or faster",
    "other_types": "integers, sparse tensors and other results than sums",
    "shared_weights": "weights that pipeline stages share",
    "skipped_layers": "layers that the configuration skips",
    "inputs": "inputs of column-parallel layers (dct.model_parallel.tensor.gather is off)",
    "input_gradients": "gradients of the inputs of column-parallel layers",
    "other_layers": "layers outside transformer layers",
    "other_tensors": "embeddings, losses and norms",
    "small": "small tensors, integers and masks",
}

#: Kinds of tensors in words, by the class of their compressed messages.
KINDS = {"gradient": "gradient", "tensor": "tensor-parallel", "pipeline": "pipeline"}

#: Tensor classes as the summary names them.
_CLASS_NAMES = {
    "gradient": "thresholded gradients",
    "gradient_answer": "thresholded sums of gradients",
    "gradient_small": "tensors below min_numel",
    "gradient_warmup": "dense gradients",
    "gradient_local": "gradients that stay on their rank",
    "parameter": "thresholded updates of weights",
    "parameter_exact": "weights that changed",
    "parameter_small": "weights below min_numel",
    "parameter_full": "gathers of all weights",
    "embedding_forward": "embedding vectors",
    "embedding_backward": "gradients of embedding vectors",
    "embedding_ids": "requests for embedding rows",
    "pipeline": "activations between stages",
    "pipeline_gradient": "gradients between stages",
    "plugin": "checks and averages of the plugin",
    "host_all_reduce": "the framework's own all-reduces",
    "host_all_gather": "the framework's own all-gathers",
    "host_reduce_scatter": "the framework's own reduce-scatters",
    "host_all_to_all": "the framework's own all-to-alls",
    "host_broadcast": "the framework's own broadcasts",
    "host_send": "tensors that the framework sends between ranks",
}


def _shares(total: Summary) -> Iterator[str]:
    """Yield the shares of entries that were sent, of weights that changed, and of tensors displaced."""
    # The share of weights that change is no density that was aimed at.
    aimed = total.classes.get("gradient") if "parameter_exact" in total.classes else total
    if aimed is not None and aimed.density is not None and aimed.density_target is not None:
        yield f"density {aimed.density:#.3g} (target {aimed.density_target:#.3g})"
    if "parameter_exact" in total.classes:
        exact, full = total.classes["parameter_exact"], total.classes.get("parameter_full")
        whole = ""
        if full is not None:
            share = full.dense_bytes / (full.dense_bytes + exact.dense_bytes)
            whole = f", {_percent(share)} of their gathers are whole"
        yield f"{_percent(exact.density or 0.0)} of the weights change in a step{whole}"
    if (displaced := total.classes.get(DISPLACED)) is not None and displaced.density is not None:
        yield f"{_percent(displaced.density)} of the tensors displaced by step-ahead"


def in_words(total: Summary, *, rank: int, world_size: int, counts_host: bool) -> str:
    """Return a run in one line, for the end of training.

    Args:
        total: The run of this rank.
        rank, world_size: Of this process.
        counts_host: Whether the collectives of the host framework are among the classes.
    """
    steps = _counted(total.steps, "step")
    if total.ratio is None:
        return f"dct: {steps}, nothing sent ({_counted(world_size, 'rank')})"
    parts = [
        f"dct: {steps}, rank {rank} sent {format_bytes(total.sent_bytes)} in place of "
        f"{format_bytes(total.dense_bytes)} ({fewer(total.ratio)})"
    ]
    if 0 < total.start_steps < total.steps:
        first = _counted(total.start_steps, "step")
        parts.append(f"{fewer(total.steady.ratio)} after the first {first}")
    elif total.start_steps:
        parts.append("all steps are the start, dense or with rising sparsity")
    parts += [words for _, words in uncompressed(total.classes, total.classes)]
    if (largest := total.largest) is not None:
        name = _CLASS_NAMES.get(largest[0], largest[0])
        if name.startswith("thresholded ") and total.classes[largest[0]].density is None:
            name = name.removeprefix("thresholded ") + ", all entries"
        parts.append(f"{100 * largest[1]:.0f} % of it {name}")
    parts += _shares(total)
    if total.intra_node:
        parts.append(f"{format_bytes(total.intra_node)} inside its node")
    steady, step = total.steady, total.step_ms
    times = f"exchange {steady.exchange_ms:.1f}"
    if steady.waited_ms >= 0.05:
        times += f" ({steady.waited_ms:.1f} waiting for other ranks)"
    plugin = steady.select_ms + steady.encode_ms + steady.exchange_ms + steady.decode_ms
    took = f"{plugin:.1f} ms per step" if step is None else f"{plugin:.1f} of {step:.1f} ms per step"
    if step is not None and plugin > step:  # the plugin works in few of the steps
        took = f"{plugin:.1f} ms per step on average (the median step takes {step:.1f} ms)"
    coding = f"select {steady.select_ms:.1f}, encode {steady.encode_ms:.1f}"
    parts.append(f"plugin {took}: {coding}, {times}, decode {steady.decode_ms:.1f}")
    if not counts_host:
        parts.append("not counted: what the framework sends by itself")
    return "; ".join(parts)


def uncompressed(
    found: Mapping[str, Any],
    totals: Mapping[str, Any],
    steps: int = 1,
    *,
    least: float = 0.0,
    without: Container[str] = (),
) -> Iterator[tuple[str, str]]:
    """Yield each kind of tensors that was partly sent uncompressed, and the share of these bytes in words.

    Args:
        found: Summaries or sums by class, whose uncompressed bytes are counted.
        totals: Summaries or sums of all ``steps`` by class; the share is that of a mean step.
        least: Kinds with this share or a smaller one are left out.
        without: Kinds that are left out, too.
    """
    for kind in KINDS:
        if kind in without:
            continue
        prefix = f"{UNCOMPRESSED}{kind}/"
        passed = {c.removeprefix(prefix): x.sent_bytes for c, x in found.items() if c.startswith(prefix)}
        if not (total := sum(passed.values())):
            continue
        dense = sum(x.dense_bytes for c, x in totals.items() if c.startswith(kind) and "/" not in c)
        if (share := total / (total + dense / steps)) <= least:
            continue
        most = sorted(passed, key=passed.__getitem__, reverse=True)
        each = [f"{_percent(share * passed[key] / total)} {REASONS[key]}" for key in most]
        words = REASONS[most[0]] if len(most) == 1 else ", ".join(each)
        yield kind, f"{_percent(share)} of {KINDS[kind]} bytes went uncompressed: {words}"


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.01 else 2}f} %"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def fewer(ratio: float | None) -> str:
    """Return dense over sent bytes in words."""
    if not ratio:
        return "nothing sent" if ratio is None else "only extra"
    if 0.99 < ratio < 1.01:
        return "as many"
    return f"{ratio:.3g}x fewer" if ratio >= 1 else f"{1 / ratio:.3g}x more"


def format_bytes(count: float) -> str:
    """Return a number of bytes in decimal units, e.g. ``1.9 MB``."""
    return decimal(round(count))
