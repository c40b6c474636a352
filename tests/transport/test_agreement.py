"""Start-up agreement over a real store; the whole of it with engines is in test_deepspeed_startup.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from dct_plugin import DesyncError
from dct_plugin.transport.agreement import Agreement, describe, differences


def on_ranks(count: int, act: Callable[[Agreement, int], Any], limit: float = 5.0) -> list[Any]:
    """What ``act`` returns or raises on every rank; threads that share a store, as ranks do."""
    store = dist.HashStore()
    outcomes: list[Any] = [None] * count

    def work(rank: int) -> None:
        agreement = Agreement(store, "topic", rank=rank, world_size=count, limit=limit)
        try:
            outcomes[rank] = act(agreement, rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_equal_facts_pass() -> None:
    facts = {"dct.data_parallel.sparsity": 0.99, "band": (0.5, 2.0), "path": None}
    assert on_ranks(4, lambda agreement, _: agreement.confirm(facts)) == [None] * 4


def test_one_rank_passes_alone() -> None:
    assert on_ranks(1, lambda agreement, _: agreement.confirm({"a": 1})) == [None]


def test_all_ranks_hear_who_differs_in_what() -> None:
    def act(agreement: Agreement, rank: int) -> None:
        agreement.confirm({"same": 1, "a": 2 if rank == 1 else 1, "b": rank // 2})

    for rank, error in enumerate(on_ranks(4, act)):
        assert isinstance(error, DesyncError)
        assert str(error) == (
            f"rank {rank}: a differs: 1 on ranks 0, 2-3; 2 on rank 1; "
            "b differs: 0 on ranks 0-1; 1 on ranks 2-3"
        )


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_never_comes_is_named_after_the_limit(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dct_plugin.transport.agreement._FAREWELL", 0.5)
    outcomes = on_ranks(
        3, lambda agreement, rank: None if rank == silent else agreement.confirm({"a": 1}), limit=0.3
    )
    for rank in {0, 1, 2} - {silent}:
        assert f"rank {silent} did not report within 0.3 s" in str(outcomes[rank])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_passed_on_at_once(failing: int) -> None:
    def act(agreement: Agreement, rank: int) -> None:
        if rank == failing:
            with agreement:
                raise ValueError("no such key")
        time.sleep(0.2)  # the failing rank is usually the first
        agreement.confirm({"a": 1})

    outcomes = on_ranks(3, act, limit=60)
    assert isinstance(outcomes[failing], ValueError)
    for rank in {0, 1, 2} - {failing}:
        assert isinstance(outcomes[rank], DesyncError)
        assert f"rank {failing} failed at start-up: ValueError: no such key" in str(outcomes[rank])


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_takes_no_part_is_named_at_once(absent: int) -> None:
    outcomes = on_ranks(
        3,
        lambda agreement, rank: agreement.abstain() if rank == absent else agreement.confirm({"a": 1}),
        limit=60,
    )
    assert outcomes[absent] is None
    for rank in {0, 1, 2} - {absent}:
        assert f"rank {absent} has no dct section" in str(outcomes[rank])


def test_a_fact_that_only_some_state_is_a_difference() -> None:
    assert differences({0: {"a": 1}, 1: {}}) == ["a differs: 1 on rank 0; not set on rank 1"]


def test_a_section_that_some_leave_out_is_named_by_its_options() -> None:
    facts = {0: {"dct.p.sparsity": 0.9, "dct.p.full_every": None}, 1: {"dct.p": None}}
    assert differences(facts) == [
        "dct.p.sparsity differs: 0.9 on rank 0; not set on rank 1",
        "dct.p.full_every differs: null on rank 0; not set on rank 1",
    ]


def test_description_of_many_absent_ranks() -> None:
    heard: dict[int, Any] = {rank: {"absent": True} for rank in (1, 2, 3, 6)}
    assert describe({0: {"facts": {}}, **heard}, 7, 120).startswith("ranks 1-3, 6 have no dct section")
