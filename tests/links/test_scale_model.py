"""The cost model of benchmarks/scale_model.py: its fit, and its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the looped transport is beside Triton's stubs")

from benchmarks.scale import WAYS, Cost
from benchmarks.scale import draw as draw_costs
from benchmarks.scale_model import LARGE, SMALL, Link, draw, steps_on


def test_the_fit_finds_latency_message_and_byte_of_exchanges_alone() -> None:
    true = Link(latency=0.2, message=0.03, megabyte=1.5)
    times = {
        ranks: tuple(true.step(1, ranks - 1, size * (ranks - 1)) for size in (SMALL, LARGE))
        for ranks in (2, 4, 8)
    }
    found = Link.fitted(times)  # type: ignore[arg-type]
    assert found[:3] == pytest.approx(true[:3], rel=1e-3)
    assert Link.fitted({2: times[2]}).message == 0.0  # type: ignore[dict-item]


def test_a_step_is_its_own_work_latencies_and_the_slower_of_wire_and_system() -> None:
    link = Link(latency=30.0, message=0.1, megabyte=2.0, rate=1e9)
    assert link.step(2, 6, 1_000_000, processor=5.0) == pytest.approx(5.0 + 0.6 + 60.0 + 8.0)
    assert link._replace(rate=1e11).step(0, 0, 1_000_000) == pytest.approx(2.0)


def test_a_ring_waits_for_every_message_and_all_ways_are_drawn(tmp_path: Path) -> None:
    costs = [Cost(8, way, 1.0, 1e6, 14, 1e6, 10_000_000) for way in WAYS]
    link = Link(latency=0.0, message=0.1, megabyte=1.0)
    steps = {cost.way: steps_on(link, cost)["1gbit", 30.0] for cost in costs}
    assert steps["dense fp32"] - steps["two_phase"] == pytest.approx(12 * 30.0)
    draw(link, costs, [8], tmp_path / "model.png")
    draw_costs(costs, tmp_path / "costs.png")
    for path in ("model.png", "costs.png"):
        assert (tmp_path / path).read_bytes().startswith(b"\x89PNG")
