"""Measurements for the automatic mode: reductions, codings, the link. All ranks use those of the slowest."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...codecs.copies import Stopwatch
from ...codecs.message import MessageWriter
from ...codecs.stats import read_stats
from ...compression.stream import Compressor
from ...policy.rules import Setting
from ...transport import lost_ranks
from ..step_units import StepUnit
from ..stream_group import StreamGroup
from .cost_model import Coding, Link

#: Bytes of a large message of the link's probe.
PROBE_BYTES = 1 << 17
#: Repetitions of each measurement; the least time counts.
REPEATS = 3
#: Tensors of the buckets on which a setting is timed; entries of a tensor in the small bucket, and at most in
#: the large one.
TENSORS, FEW_ENTRIES, MOST_ENTRIES = 8, 1 << 11, 1 << 20
#: A stream measures its threshold in its first steps, and then seldom: these are not timed.
FIRST_ENCODES = 4


class Cost(NamedTuple):
    """The time of some work on the tensors of a model, in seconds."""

    per_tensor: float
    per_entry: float


def unmeasured(device: str) -> str:
    """Return what is not known about predictions on a type of device, as a clause; empty on CPUs."""
    why = "predictions were not checked on a GPU"
    return "" if device == "cpu" else why


def reduction_seconds(group: StreamGroup) -> float:
    """Return the seconds of all dense sums so far, without the waits for slower ranks, which every setting
    has.
    """
    watch = group.dense_sums_watch
    return 0.0 if watch is None else watch.seconds() - 1e-3 * group.exchange.counters()[1]


def largest(group: StreamGroup, figures: Sequence[float]) -> list[float]:
    """Return the largest value of each figure over the ranks; a collective of the host's group."""
    agreed = torch.tensor(figures, dtype=torch.float64, device=group.device)
    with lost_ranks.reported("comparison of times", group.process_group, group.step):
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group.process_group)
        return lost_ranks.received(agreed, group.process_group).tolist()


def gradient_sizes(group: StreamGroup, tensors: Mapping[str, tuple[int, int]]) -> tuple[int, int, int, float]:
    """Return the number of the tensors that are thresholded, their entries, the bytes of the other tensors,
    and the bytes of a thresholded entry.

    Args:
        group: Says which tensors are thresholded.
        tensors: Entries and bytes by name.
    """
    large = [size for name, size in tensors.items() if not group.is_small(name, size[0])]
    entries, nbytes = (sum(column) for column in zip((0, 0), *large, strict=True))
    small_bytes = sum(nbytes for _, nbytes in tensors.values()) - nbytes
    return len(large), entries, small_bytes, nbytes / entries if entries else 4.0


def probe_link(group: StreamGroup) -> Link:
    """Time small and large messages in the job's own exchange; a collective."""
    small, large = (torch.zeros(n, dtype=torch.uint8, device=group.device) for n in (1, PROBE_BYTES))
    # The first round waits for other ranks.
    found = [
        timeit.repeat(partial(group.exchange.all_gather, message), number=1, repeat=REPEATS + 1)[1:]
        for message in (small, large)
    ]
    latency, seconds = largest(group, [min(each) for each in found])
    return Link(latency, max(seconds - latency, 0.0) / PROBE_BYTES)


def time_codings(group: StreamGroup, settings: Iterable[Setting]) -> dict[Setting, Coding]:
    """Time the coding and decoding of random entries with each setting; a collective."""
    timed = {setting: _time_coding(group, setting) for setting in settings}
    agreed = largest(group, [figure for coding in timed.values() for figure in coding])
    width = len(Coding._fields)
    return {setting: Coding(*agreed[width * i :][:width]) for i, setting in enumerate(timed)}


def time_step_ahead(group: StreamGroup) -> Cost:
    """Return the time that step-ahead takes in a step, on the slowest rank; a collective."""
    from ..step_ahead.add_on import StepAhead, Unsent

    def steps(entries: int) -> Callable[[], object]:
        named = [(str(i), torch.nn.Parameter(_random(group, entries))) for i in range(TENSORS)]
        gradients = [(name, _random(group, entries)) for name, _ in named]
        residual = _random(group, entries)
        ahead = StepAhead(
            named,
            lambda _: StepUnit(1e-3, preconditioned=True, decay=0.999),
            Unsent(lambda _: residual, lasting=True),
            world_size=group.world_size,
            coefficient=1.0,
            kernels=group.backend,
        )

        def step() -> None:
            ahead.observe(gradients)
            ahead.displace()
            ahead.restore()
            ahead.end_step(skipped=False)
            ahead.restore()

        return step

    return Cost(*largest(group, _cost(group, steps)))


def _time_coding(group: StreamGroup, setting: Setting) -> Coding:
    buckets: dict[int, _Bucket] = {}

    def bucket(entries: int) -> _Bucket:
        if entries not in buckets:
            buckets[entries] = _Bucket(group, setting, entries)
        return buckets[entries]

    encode = _cost(group, lambda entries: bucket(entries).encode)
    decode = _cost(group, lambda entries: bucket(entries).decode)
    most = max(buckets)
    nbytes = buckets[most].writer.message.numel() / (TENSORS * most)
    return Coding(encode.per_entry, decode.per_entry, nbytes, encode.per_tensor + decode.per_tensor)


class _Bucket:
    """A bucket of random gradients of as many entries each, and its message with a setting."""

    def __init__(self, group: StreamGroup, setting: Setting, entries: int) -> None:
        self._group, self._density = group, 1.0 - setting.sparsity
        self._gradients = [_random(group, entries) for _ in range(TENSORS)]
        self._sums = [torch.zeros_like(gradient) for gradient in self._gradients]
        self.writer = MessageWriter(group.device)
        overrides: Any = {"sparsity": setting.sparsity, "value_dtype": setting.value_dtype}
        self._streams = [
            Compressor(group.settings, name=str(i), kernels=group.streams.kernels, **overrides)
            for i in range(TENSORS)
        ]
        for _ in range(FIRST_ENCODES):
            self.encode()

    def encode(self) -> None:
        self.writer.clear()
        pairs = list(zip(self._streams, self._gradients, strict=True))
        with self._group.backend.batched():
            written = [stream.encode(grad, self.writer, self._density) for stream, grad in pairs]
        read_stats(stats for encoded in written for stats in encoded.stats)
        for stream, encoded in zip(self._streams, written, strict=True):
            stream.observe(encoded)

    def decode(self) -> None:
        self._group.backend.sum_messages([self.writer.message], self._sums)


def _random(group: StreamGroup, entries: int) -> Tensor:
    """Return random entries, without the random numbers of the script: ranks may draw other numbers here."""
    generator = torch.Generator(group.device).manual_seed(0)
    return torch.randn(entries, dtype=torch.float32, device=group.device, generator=generator)


def _cost(group: StreamGroup, work: Callable[[int], Callable[[], object]]) -> Cost:
    """Return the cost of work on the tensors of a bucket, from two sizes of them. The larger one grows until
    its entries take most of the time, and not what every tensor takes (on a device, launches).

    Args:
        group: Says on which device the work runs.
        work: Makes the work on tensors of so many entries.
    """

    def seconds(entries: int) -> float:
        function = work(entries)

        def timed() -> float:
            with (watch := Stopwatch(group.device)):
                function()
            return watch.seconds()

        return min(timed() for _ in range(REPEATS)) / TENSORS

    few, many = FEW_ENTRIES, 8 * FEW_ENTRIES
    least = seconds(few)
    while (most := seconds(many)) < 3.0 * least and 8 * many <= MOST_ENTRIES:
        many *= 8
    per_entry = max(most - least, 0.0) / (many - few)
    return Cost(max(least - few * per_entry, 0.0), per_entry)
