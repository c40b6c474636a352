"""How long the other ranks take to name a lost one, by a clock that stands still but for who waits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dct_plugin.errors import DesyncError
from dct_plugin.transport import lost_ranks
from dct_plugin.transport.lost_ranks import _LOST, _REPORT, _lost, key_of


class Clock:
    """Moves for those who sleep alone; ``at`` has what others write into the store meanwhile."""

    def __init__(self) -> None:
        self.now, self.at, self.store = 1000.0, dict[float, tuple[str, str]](), dist.HashStore()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [each for each in self.at if each <= self.now]:
            self.store.set(*self.at.pop(due))

    @property
    def waited(self) -> float:
        return self.now - 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lost_ranks, "time", clock)
    monkeypatch.setattr(lost_ranks, "default_store", lambda: clock.store)
    return clock


def test_a_read_from_a_device_ends_before_the_time_limit_of_its_group(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_ranks, "queued", lambda device: lambda: False)
    monkeypatch.setattr(lost_ranks, "time_limit", lambda group, device: 10.0)
    monkeypatch.setattr(lost_ranks, "_PAUSE", 0.05)
    with pytest.raises(RuntimeError, match=r"^Operation timed out after 9 s$") as raised:
        lost_ranks.received(torch.zeros(3), None)
    assert lost_ranks.of_transport(raised.value)
    assert clock.waited == pytest.approx(9.0, abs=0.1)


def test_ranks_that_do_not_report_are_named_when_the_time_for_reports_is_over(clock: Clock) -> None:
    clock.at = {1001.0: (key_of("alive", 2), "1")}
    assert _lost([0, 1, 2, 3], own=0, look=False, calls={0: "1"}) == [1, 3]
    assert _REPORT <= clock.waited < _REPORT + 0.1
    assert json.loads(clock.store.get(_LOST)) == [1, 3]


def test_what_another_rank_has_found_out_holds_at_once(clock: Clock) -> None:
    clock.store.set(_LOST, "[3]")
    assert _lost([0, 1, 2, 3], own=0, look=False, calls={0: "1"}) == [3]
    assert clock.waited == 0


def test_a_rank_that_reports_late_but_in_time_is_not_lost(clock: Clock) -> None:
    clock.at = {1000.0 + _REPORT - 0.1: (key_of("alive", 1), "1")}
    assert _lost([0, 1], own=0, look=False, calls={0: "1"}) == []
    assert not clock.store.check([_LOST])


@pytest.mark.parametrize(
    ("at", "text"),
    [
        # The rank that failed waited for one of another group, which finds that out a moment later.
        (
            {1001.0: (key_of("alive", 1), "sum"), 1003.5: (_LOST, "[3]")},
            "rank(s) [3] gave no sign of life since",
        ),
        (
            {1001.0: (key_of("alive", 1), "sum of residuals")},
            "others failed in another call (rank 1 in the sum of residuals); decide on all ranks",
        ),
        ({1001.0: (key_of("alive", 1), "sum in step 7")}, "the other ranks report the same"),
    ],
)
def test_of_a_group_in_which_all_live(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, at: dict[float, tuple[str, str]], text: str
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(lost_ranks, "in_time", lambda function, seconds: function())
    clock.at = at
    group: Any = object()
    said = lost_ranks.describe_failure("sum", RuntimeError("Timed out"), group, step=7)
    assert said.startswith("rank 0: the sum in step 7 failed: " + text)


@pytest.mark.parametrize(
    ("error", "is_transports"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:60650"), True),
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (dist.DistNetworkError("rank 1 closed its connection"), True),
        (RuntimeError("Operation timed out!"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (MemoryError(), False),
    ],
)
def test_only_an_error_of_the_transport_names_ranks(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_transports: bool
) -> None:
    monkeypatch.setattr(lost_ranks, "describe_failure", lambda *_: "rank(s) [1]")
    failed: list[bool] = []
    with (
        pytest.raises(DesyncError if is_transports else type(error)) as raised,
        lost_ranks.reported("exchange", failed=lambda: failed.append(True)),
    ):
        raise error
    assert (raised.value is error) != is_transports
    assert failed == [True]  # what the transport still holds of this message is not read as the next one


def test_a_store_that_does_not_answer_is_not_waited_for_beyond_the_reports(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(lost_ranks, "in_time", lambda function, seconds: limits.append(seconds))
    text = lost_ranks.describe_failure("exchange", RuntimeError("Timed out after 8 s"), object())  # type: ignore[arg-type]
    assert "the key-value store does not answer" in text
    assert limits == [_REPORT + 2.0]
