"""Measurements for the automatic mode: reductions, codings, the link. All ranks use those of the slowest."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...codecs.message import MessageWriter
from ...compression.stream import Compressor
from ...policy.settings import Setting
from ..step_units import StepUnit
from ..stream_group import StreamGroup
from .cost_model import Coding, Link

#: Entries on which a setting is timed, and bytes of a large message of the link's probe.
ENTRIES, PROBE_BYTES = 1 << 17, 1 << 17
#: Repetitions of each measurement; the least time counts. A stream measures its threshold in its first three
#: steps, and then seldom: it encodes as often as it takes to see the others.
REPEATS, ENCODES = 3, 8


def unmeasured(device: str) -> str:
    """Return what is not known about predictions on a type of device, as a clause; empty on CPUs."""
    why = "predictions were not checked on a GPU, where timing few entries favours dense steps"
    return "" if device == "cpu" else why


def reduction_seconds(group: StreamGroup) -> float:
    """Return the seconds of all reductions so far, without the waits for slower ranks, which every setting
    has.
    """
    return group.reduce_seconds - 1e-3 * group.exchange.counters()[1]


def largest(group: StreamGroup, figures: Sequence[float]) -> list[float]:
    """Return the largest value of each figure over the ranks; a collective of the host's group."""
    agreed = torch.tensor(figures, dtype=torch.float64, device=group.device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group.group)
    return agreed.tolist()


def gradient_sizes(group: StreamGroup, tensors: Mapping[str, tuple[int, int]]) -> tuple[int, int, float]:
    """Return the entries that are thresholded, the bytes of tensors that never are, and the bytes of a
    thresholded entry.

    Args:
        group: Says which tensors are never thresholded.
        tensors: Entries and bytes of each tensor.
    """
    sizes = [(group.is_small(name, numel), numel, nbytes) for name, (numel, nbytes) in tensors.items()]
    small = sum(nbytes for is_small, _, nbytes in sizes if is_small)
    large = sum(numel for is_small, numel, _ in sizes if not is_small)
    return large, small, (sum(nbytes for *_, nbytes in sizes) - small) / large if large else 4.0


def probe_link(group: StreamGroup) -> Link:
    """Time small and large messages in the job's own exchange; a collective."""
    small, large = (torch.zeros(n, dtype=torch.uint8, device=group.device) for n in (1, PROBE_BYTES))
    # The first round waits for other ranks.
    found = [_seconds(partial(group.exchange.all_gather, each), REPEATS + 1)[1:] for each in (small, large)]
    latency, seconds = largest(group, [min(each) for each in found])
    return Link(latency, max(seconds - latency, 0.0) / PROBE_BYTES)


def time_codings(group: StreamGroup, settings: Iterable[Setting]) -> dict[Setting, Coding]:
    """Time the coding and decoding of random entries with each setting; a collective."""
    timed = {setting: _time_coding(group, setting) for setting in settings}
    agreed = largest(group, [figure for coding in timed.values() for figure in coding])
    return {setting: Coding(*agreed[3 * i : 3 * i + 3]) for i, setting in enumerate(timed)}


def time_step_ahead(group: StreamGroup) -> float:
    """Return the seconds per entry that step-ahead takes in a step, on the slowest rank; a collective."""
    from ..step_ahead.add_on import StepAhead, Unsent

    parameter = torch.nn.Parameter(torch.randn(256, ENTRIES // 256, device=group.device))
    gradient, residual = (torch.randn(ENTRIES, device=group.device) for _ in range(2))
    ahead = StepAhead(
        [("weight", parameter)],
        lambda _: StepUnit(1e-3, preconditioned=True, decay=0.999),
        Unsent(lambda _: residual, lasting=True),
        world_size=group.world_size,
        coefficient=1.0,
        kernels=group.backend,
    )

    def step() -> None:
        ahead.observe([("weight", gradient)])
        ahead.displace()
        ahead.restore()
        ahead.end_step(skipped=False)
        ahead.restore()
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    return largest(group, [min(_seconds(step, ENCODES))])[0] / ENTRIES


def _time_coding(group: StreamGroup, setting: Setting) -> Coding:
    data = torch.randn(ENTRIES, device=group.device)
    stream = Compressor(
        group.settings,
        sparsity=setting.sparsity,
        value_dtype=setting.value_dtype,
        kernels=group.streams.kernels,
    )
    total = torch.zeros_like(data)

    def encode() -> Tensor:
        writer = MessageWriter(group.device)
        stream.observe(stream.encode(data, writer, 1.0 - setting.sparsity))
        return writer.message

    def decode(message: Tensor) -> None:
        group.backend.decode_add(message, total)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    encode_seconds, message = min(_seconds(encode, ENCODES)), encode()
    figures = encode_seconds, min(_seconds(partial(decode, message), REPEATS)), message.numel()
    return Coding(*(each / ENTRIES for each in figures))


def _seconds(function: Callable[[], object], times: int) -> list[float]:
    return timeit.repeat(function, number=1, repeat=times)
