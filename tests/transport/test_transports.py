"""The same messages by TCP connections of our own and by gloo, whatever their size and order."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.processes import run

from dct_plugin.errors import ConfigError, DesyncError
from dct_plugin.transport import Exchange, collective, tcp_connect
from dct_plugin.transport.collective import CollectiveTransport
from dct_plugin.transport.lost_ranks import time_limit
from dct_plugin.transport.transports import subgroup

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
#: More than a connection buffers: who only sends would wait for ever.
LARGE = 24_000_000


@contextmanager
def transport(choice: str) -> Iterator[None]:
    """With a choice of the user, which the next test finds as it was."""
    with patch.dict(os.environ, {tcp_connect.VARIABLE: choice}):
        yield


def message(sender: int, receiver: int, turn: int) -> torch.Tensor:
    size = (0, 1, 1000, 300_000, LARGE)[(sender + 2 * receiver + turn) % 5]
    generator = torch.Generator().manual_seed(100 * sender + 10 * receiver + turn)
    return torch.empty(size // 8 + 1, dtype=torch.int64).random_(generator=generator).view(torch.uint8)[:size]


def exchanged(rank: int, world_size: int, choice: str) -> tuple[str, int]:
    exchange, everyone = Exchange(None, CPU), range(world_size)
    with transport(choice):
        name = type(exchange._open()).__name__
    for turn in range(5):
        messages = [message(rank, other, turn) for other in everyone]
        wanted = [message(other, rank, turn) for other in everyone]
        with exchange.preparing():
            time.sleep(0.01 * rank)
        sizes = [len(part) for part in wanted]
        for received in (exchange.all_to_all(messages, 7), exchange.transfer(messages, sizes)):
            assert all(torch.equal(a, b) for a, b in zip(received, wanted, strict=True))
        exchange.agree(8)
    assert len(exchange.all_gather(messages[0], 9)) == world_size
    return name, exchange.counters()[0]


def test_messages_arrive_whatever_their_size() -> None:
    by_sockets, by_gloo = run(3, exchanged, "sockets"), run(3, exchanged, "gloo")
    assert {name for name, _ in by_sockets} == {"TcpTransport"}
    assert {name for name, _ in by_gloo} == {"CollectiveTransport"}
    assert [size for _, size in by_sockets] == [size for _, size in by_gloo]


def fails_once(rank: int, world_size: int, choice: str) -> tuple[str, list[int]]:
    """One rank fails while it prepares; the others hear of it; the exchange after it is whole."""
    exchange, own = Exchange(None, CPU), torch.full((LARGE,), rank, dtype=torch.uint8)
    with transport(choice):
        exchange.agree(4)
    text = ""
    try:
        with exchange.preparing():
            if rank == 1:
                raise MemoryError("no room")
        exchange.all_gather(own, 5)
    except (DesyncError, MemoryError) as error:
        text = str(error)
    return text, [int(part[0]) for part in exchange.all_gather(own[:10], 5)]


def several(rank: int, world_size: int, choice: str) -> tuple[str, int]:
    """Any number of messages on their way; one rank fails behind the second of five."""
    exchange, everyone = Exchange(None, CPU), range(world_size)
    with transport(choice):
        exchange.agree(4)
    posted = [[message(rank, other, turn) for other in everyone] for turn in range(5)]
    for turn, messages in enumerate(posted):
        exchange.post(messages, turn)
    for turn, messages in enumerate(posted):
        received = exchange.collect(messages[rank])
        wanted = [message(other, rank, turn) for other in everyone]
        assert all(torch.equal(a, b) for a, b in zip(received, wanted, strict=True))
    text, collected = "", 0
    try:
        with exchange.preparing(posts=5):
            for turn, messages in enumerate(posted):
                if (rank, turn) == (1, 2):
                    raise MemoryError("no room")
                exchange.post(messages, turn)
        with exchange.preparing(posts=0):
            for messages in posted:
                exchange.collect(messages[rank])
                collected += 1
    except (DesyncError, MemoryError) as error:
        text = str(error)
    own = torch.full((10,), rank, dtype=torch.uint8)
    assert [int(part[0]) for part in exchange.all_gather(own, 5)] == [*everyone]
    return text, collected


@pytest.mark.parametrize("choice", ["sockets", "gloo"])
def test_messages_on_their_way_are_collected_in_order(choice: str) -> None:
    (first, before), (second, _), (third, before_too) = run(3, several, choice)
    assert second == "no room"
    assert before == before_too == 2
    for text in (first, third):
        assert "rank(s) [1] failed while preparing this exchange" in text


@pytest.mark.parametrize("choice", ["sockets", "gloo"])
def test_after_a_failure_that_was_told_the_next_exchange_is_whole(choice: str) -> None:
    (first, received), (second, _), (third, _) = run(3, fails_once, choice)
    assert second == "no room"
    for text in (first, third):
        assert "rank(s) [1] failed while preparing this exchange" in text
    assert received == [0, 1, 2]


def _some_ranks_in_a_group_of_their_own(rank: int, world_size: int) -> tuple[list[int], float, str]:
    """Rank 2 makes no group: it is on a pipeline stage without experts, for example."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    if rank == 2:
        return [], 0.0, ""
    everyone: Any = dist.group.WORLD
    everyone.bound_device_id = torch.device("cuda:0")  # as with init_process_group(device_id=...)
    make, split = dist.new_group, []

    def new_group(*arguments: Any, **options: Any) -> Any:
        split.append(everyone.bound_device_id)  # torch would split the communicator of all ranks then
        return make(*arguments, **options)

    with patch.object(dist, "new_group", new_group):
        made = subgroup(group, [0, 1], CPU)
    assert split == [None]
    total = torch.ones(1)
    dist.all_reduce(total, group=made)
    assert (total.item(), everyone.bound_device_id) == (2.0, torch.device("cuda:0"))
    if hasattr(dist.distributed_c10d, "_use_torchcomms_enabled"):  # torch refuses it itself
        refusing: Any = patch.object(dist.distributed_c10d, "_use_torchcomms_enabled", return_value=True)
    else:
        refusing = patch.object(dist, "new_group", side_effect=NotImplementedError("TorchComms"))
    with refusing, pytest.raises(ConfigError) as refused:
        subgroup(group, [0, 1], CPU)
    everyone.bound_device_id = None
    return dist.get_process_group_ranks(made), time_limit(made), str(refused.value)


def test_some_ranks_make_a_group_without_all_others() -> None:
    for rank, (ranks, seconds, refused) in enumerate(run(3, _some_ranks_in_a_group_of_their_own)[:2]):
        assert (ranks, seconds) == ([0, 1], 77.0)
        assert refused.startswith(f"rank {rank}: dct.data_parallel.nodes: torch cannot make groups of nodes")
        assert "TORCH_DISTRIBUTED_USE_TORCHCOMMS" in refused


def test_means_inside_a_node_are_divided_before_they_are_added() -> None:
    """As nccl does for AVG: a sum of fp16 would overflow."""
    transport, asked = CollectiveTransport(0, range(2), None, torch.device("cuda")), []
    with patch.object(
        collective, "_reduce_scatter", lambda out, parts, op, group: asked.append((len(parts), op))
    ):
        transport.reduce_scatter(torch.zeros(3), torch.zeros(2, 3))
    assert asked == [(6, dist.ReduceOp.AVG)]
