"""The host's work for a bucket on a GPU, as benchmarks/host_work.py counts it: numbers that may fall only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from support import ROOT

pytest.importorskip("triton", reason="triton is for Linux only")

from benchmarks import host_work
from dct_plugin.codecs.message import order_of
from dct_plugin.data_parallel import pending_exchanges
from dct_plugin.data_parallel.plan import shards_of
from dct_plugin.kernels.triton import backend, batch, messages
from dct_plugin.transport import lost_ranks

#: Launches of kernels, torch's operations, and uploads. The host waits once in a step.
EXPECTED = {
    "2 ranks, direct": (9, 3, 1),
    "2 ranks, two_phase": (18, 5, 2),
    "8 ranks, direct": (9, 3, 1),
    "8 ranks, two_phase": (18, 5, 2),
    "64 ranks, direct": (9, 3, 1),
    "64 ranks, two_phase": (18, 5, 2),
    "2 ranks, direct, sampled thresholds": (11, 5, 1),
    "step-ahead with AdamW, 200 tensors": (15, 15, 3),
    "2 ranks, exact updates": (25, 13, 2),
    "8 ranks, exact updates": (25, 13, 2),
}
#: Calls of functions with 8 tensors in 64 parts each: fewer than ten for each part.
MOST_CALLS = 10 * 8 * 64


@pytest.mark.parametrize("row", EXPECTED)
def test_launches_uploads_and_waits(row: str) -> None:
    work = host_work.ROWS[row](steps=1)
    assert work[:4] == (*EXPECTED[row], 1), work.kernels
    assert work.calls < MOST_CALLS or "step-ahead" in row


def test_the_table_has_these_rows() -> None:
    assert EXPECTED.keys() == host_work.ROWS.keys()
    lines = (ROOT / "docs" / "results" / "host_work.csv").read_text().splitlines()[2:]
    for line, numbers in zip(lines, EXPECTED.values(), strict=True):
        assert line.endswith(f",{','.join(map(str, numbers))},1")


@pytest.mark.parametrize("numel", [32_768, 100_001, 10**9 + 7])
@pytest.mark.parametrize("count", [2, 3, 64])
def test_parts_begin_where_16_bytes_are_read_at_once(numel: int, count: int) -> None:
    shards = shards_of("a", numel, count)
    assert [each.start % 64 for each in shards] == [0] * len(shards)
    assert (shards[0].start, shards[-1].stop) == (0, numel)
    assert all(one.stop == other.start for one, other in itertools.pairwise(shards))
    assert max(s.stop - s.start for s in shards) - min(s.stop - s.start for s in shards) <= 128


def test_a_wait_for_slots_is_a_wait_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl returns before messages are there. The host waits where it reads the figures: a rank that waits
    there for long says so, and names the ranks that do something else.
    """
    said: list[str] = []
    read_figures = pending_exchanges.read_figures

    def read(*arguments: Any) -> Any:
        said.extend(wait.call for wait in lost_ranks.waits.values())
        return read_figures(*arguments)

    def guard(
        peers: host_work.LoopedPeers, what: str, step: int | None, failed: Callable[[], None]
    ) -> AbstractContextManager[None]:
        return lost_ranks.reported(what, None, step, failed)

    monkeypatch.setattr(host_work.LoopedPeers, "guard", guard)
    monkeypatch.setattr(pending_exchanges, "read_figures", read)
    reducer = host_work.reducer_of(2, feedback="local", warmup_steps=0, expert={"threshold": "fixed"})
    gradients = [("layer", torch.zeros(1 << 16))]
    with host_work.counted():
        for _ in range(3):
            reducer.begin(gradients).finish()
            reducer.finish()
            reducer.end_step()
    call = "exchange of messages of 1 tensors, layer, in step"
    assert said == [f"{call} 0", f"{call} 1", f"{call} 2"]


def test_tables_of_many_buckets_are_made_once() -> None:
    """A model of 7 billion parameters has some 226 buckets, with two tables each in two phases."""
    options = {"feedback": "local", "exchange": "direct", "expert": {"threshold": "fixed"}}
    reducer = host_work.reducer_of(8, warmup_steps=0, **options)
    buckets = [[(f"layer {i}", torch.zeros(16_384 + 64 * i))] for i in range(300)]
    caches = [batch._layout, messages._layout, backend._slots_of, order_of]

    def step() -> list[int]:
        for bucket in buckets:
            reducer.begin(bucket).finish()
        reducer.finish()
        reducer.end_step()
        return [cache.cache_info().misses for cache in caches]

    with host_work.counted():
        assert step() == step()
