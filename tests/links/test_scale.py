"""benchmarks/scale.py counts the same for one rank with looped messages as for ranks that exchange theirs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("triton", reason="the looped transport is beside Triton's stubs")


from benchmarks import scale

PARAMETERS = 2 * scale.UNIT


def _together(count: int, way: str, steps: int) -> list[Any]:
    """Return the costs of the steps of rank 0 of ranks that are threads of this process."""

    one_process = importlib.import_module("one_process")  # benchmarks.scale puts its folder on the path

    def rank(number: int) -> list[Any]:
        def opened(reducer: Any) -> None:
            if reducer.group.node is not None:
                with one_process.apart():
                    _ = reducer.group.exchange.peers.group, reducer.group.node.exchange.peers.group

        options = {"count": count, "way": way, "parameters": PARAMETERS, "steps": steps, "sparsity": 0.9}
        before = one_process.MemoryTransport.posted[number]
        posted = lambda: one_process.MemoryTransport.posted[number] - before  # noqa: E731
        return scale.rank_costs(number, **options, posted=posted, opened=opened)

    return one_process.run(count, rank)[0]


@pytest.mark.parametrize(
    ("count", "way"),
    [
        (2, "direct"),
        pytest.param(8, "two_phase", marks=pytest.mark.long),
        pytest.param(16, "nodes", marks=pytest.mark.long),
    ],
)
def test_looped_messages_have_the_number_and_size_of_real_ones(
    count: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "BEFORE", 3)
    cost = scale.measure(count, way, PARAMETERS, 1, 0.9)
    _, sent, messages, _ = _together(count, way, 1)[-1]
    assert cost.messages == messages
    assert cost.sent == pytest.approx(sent, rel=0.05)


def test_a_rank_keeps_its_residuals_and_a_ring_in_bf16_its_copy() -> None:
    kept = {way: scale.measure(8, way, PARAMETERS, 1, 0.99).memory for way in ("direct", *scale.DENSE)}
    assert 4 * PARAMETERS < kept["direct"] < 4.5 * PARAMETERS
    ahead = scale.measure(8, "direct", PARAMETERS, 1, 0.99, is_adamw=True)
    assert 8 * PARAMETERS < ahead.memory < 9 * PARAMETERS  # and displaced weights
    assert kept["dense fp32"] == 4 * PARAMETERS / 8
    assert kept["dense bf16"] == 2 * PARAMETERS * (1 + 1 / 8)
