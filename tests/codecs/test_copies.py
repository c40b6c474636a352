"""Copies to the host: made again only when what was copied has changed."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.host_reads import HostReads

from dct_plugin.codecs import copies
from dct_plugin.codecs.copies import Mirror, start_to_host, to_device, to_host
from dct_plugin.kernels.reference import has_overflow, overflow_flags


def test_a_mirror_looks_at_a_tensor_only_after_it_was_written_or_replaced() -> None:
    mirror, tensor = Mirror(), torch.tensor([1.0, 2.0])
    with HostReads() as reads:
        assert mirror.of(tensor).tolist() == mirror.of(tensor).tolist() == [1.0, 2.0]
    assert len([place for place in reads.places if place.endswith(":to")]) == 1
    tensor[1] = 3.0
    assert mirror.of(tensor).tolist() == [1.0, 3.0]
    assert mirror.of(torch.tensor([7.0])).tolist() == [7.0]
    tensor += 1
    known = torch.tensor([2.0, 4.0])
    mirror.keep(tensor, lambda: known)
    with HostReads() as reads:
        assert mirror.of(tensor) is known
    assert reads.places == []


def test_a_copy_is_of_what_there_was_when_it_was_started() -> None:
    tensor = torch.arange(3)
    copied = start_to_host(tensor)
    tensor += 1
    assert copied().tolist() == [0, 1, 2]
    assert to_host(tensor).tolist() == to_device(tensor, torch.device("cpu")).tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -(2.0**126), 1.0])
def test_flags_of_what_is_not_finite(bad: float) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    tensors = [torch.randn(size, dtype=dtype) for size, dtype in zip((5, 70, 9, 0), dtypes, strict=True)]
    tensors[1][3], tensors[2][8] = bad, bad
    with HostReads() as reads:
        flags = overflow_flags(tensors)
    assert reads.places == []
    assert flags.tolist() == [has_overflow(tensor) for tensor in tensors]


def test_a_stopwatch_adds_up_the_times_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is told."""
    ticks = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(copies.time, "perf_counter", lambda: next(ticks))
    watch = copies.Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch:
            pass
    assert watch.seconds() == watch.seconds() == 2.5


def test_a_stopwatch_of_a_device_waits_for_its_events_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device reaches one event in a second."""
    reached, waited = itertools.count(), []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(reached)

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = copies.Stopwatch(torch.device("cuda"))
    for _ in range(2):
        with watch:
            next(reached)
    assert waited == []
    assert watch.seconds() == watch.seconds() == 4.0
    assert waited == [2, 5]
