"""Connections of our own between ranks: the same messages as by gloo, and gloo where they cannot be had."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import launch, run

from dct_plugin.errors import DesyncError
from dct_plugin.transport import Exchange, tcp, transports

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
#: More than a connection buffers: who only sends would wait for ever.
LARGE = 24_000_000


@contextmanager
def transport(choice: str, **changed: Any) -> Iterator[None]:
    """With a choice of the user, and ``changed`` in the module; the process serves other tests afterwards."""
    with patch.dict(os.environ, {tcp.VARIABLE: choice}), patch.dict(vars(tcp), changed):
        yield


def message(sender: int, receiver: int, turn: int) -> torch.Tensor:
    size = (0, 1, 1000, 300_000, LARGE)[(sender + 2 * receiver + turn) % 5]
    generator = torch.Generator().manual_seed(100 * sender + 10 * receiver + turn)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


def exchanged(rank: int, world_size: int, choice: str) -> tuple[str, int]:
    exchange, everyone = Exchange(None, CPU), range(world_size)
    with transport(choice):
        name = type(exchange._carried()).__name__
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
    return name, exchange.sent_bytes


def test_messages_arrive_whatever_their_size() -> None:
    by_sockets, by_gloo = run(3, exchanged, "sockets"), run(3, exchanged, "gloo")
    assert {name for name, _ in by_sockets} == {"_Sockets"}
    assert {name for name, _ in by_gloo} == {"_Gloo"}
    assert [size for _, size in by_sockets] == [size for _, size in by_gloo]


def one_says_gloo(rank: int, world_size: int) -> str:
    with transport("gloo" if rank == 1 else "sockets"):
        return type(Exchange(None, CPU)._carried()).__name__


def test_one_rank_that_is_told_to_use_gloo_is_enough() -> None:
    assert run(3, one_says_gloo) == ["_Gloo"] * 3


def unreachable(rank: int, world_size: int) -> tuple[str, list[int], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    transports.logger.addHandler(handler)
    exchange = Exchange(None, CPU)
    try:
        with transport("sockets", _ARRIVE=0.5, _addresses=lambda: ["no address of anybody"]):
            received = exchange.all_gather(torch.tensor([rank], dtype=torch.uint8))
    finally:
        transports.logger.removeHandler(handler)
    return type(exchange._carried()).__name__, [int(part) for part in received], lines


def test_where_a_rank_cannot_be_reached_all_use_gloo_and_say_so() -> None:
    found = run(2, unreachable)
    assert [(name, received) for name, received, _ in found] == [("_Gloo", [0, 1])] * 2
    assert "rank 1: messages travel by gloo" in found[1][2][0]
    assert "rank 0 cannot be reached at port" in found[1][2][0]
    assert "rank 0: messages travel by gloo" in found[0][2][0]


def with_strangers(rank: int, world_size: int) -> tuple[str, list[int], list[bool]]:
    """Whoever finds the port of rank 0, but does not know its token, is sent away."""
    real, strangers, turned_away = tcp._exchange_cards, list[threading.Thread](), list[bool]()

    def knock(port: int, hello: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            turned_away.append(stranger.recv(1) == b"")

    def meanwhile(card: dict[str, Any], *others: Any) -> Any:
        if rank == 0:
            for hello in (b"", b"GET / HTTP/1.1\r\n\r\n", tcp._HELLO.pack(bytes(16), 1)):
                strangers.append(threading.Thread(target=knock, args=(card["port"], hello)))
                strangers[-1].start()
            time.sleep(0.3)  # they are first in the queue
        return real(card, *others)

    exchange = Exchange(None, CPU)
    with transport("sockets", _exchange_cards=meanwhile):
        received = exchange.all_gather(torch.tensor([rank], dtype=torch.uint8))
    for thread in strangers:
        thread.join(10)
    return type(exchange._carried()).__name__, [int(part) for part in received], turned_away


def test_strangers_are_turned_away() -> None:
    assert run(2, with_strangers) == [("_Sockets", [0, 1], [True] * 3), ("_Sockets", [0, 1], [])]


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
        with exchange.collecting():
            for messages in posted:
                exchange.collect(messages[rank])
                collected += 1
    except (DesyncError, MemoryError) as error:
        text = str(error)
    own = torch.full((10,), rank, dtype=torch.uint8)
    assert [int(part[0]) for part in exchange.all_gather(own, 5)] == [*everyone]
    return text, collected


def pumped(rank: int, world_size: int, choice: str) -> bool:
    """What arrives before anybody waits for it, up to a limit, is there when it is waited for."""
    exchange, everyone = Exchange(None, CPU), range(world_size)
    with transport(choice, _MOST_EARLY=400_000):
        exchange.agree(4)
        posted = [[message(rank, other, turn) for other in everyone] for turn in range(5)]
        for turn, messages in enumerate(posted):
            exchange.post(messages, turn)
            for _ in range(rank * turn):
                time.sleep(0.005)
                exchange.pump()
        for turn, messages in enumerate(posted):
            received = exchange.collect(messages[rank])
            wanted = [message(other, rank, turn) for other in everyone]
            assert all(torch.equal(a, b) for a, b in zip(received, wanted, strict=True))
            exchange.pump()
    return True


@pytest.mark.parametrize("choice", ["sockets", "gloo"])
def test_what_comes_early_is_taken(choice: str) -> None:
    assert all(run(3, pumped, choice))


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


def misconfigured(rank: int, world_size: int) -> None:
    with transport("pigeons" if rank == 1 else "sockets"):
        Exchange(None, CPU).agree(1)


def test_a_transport_that_does_not_exist_is_an_error() -> None:
    for kind, text in launch(2, misconfigured):
        assert kind == "error"
        assert "ConfigError: rank 1: DCT_TRANSPORT = 'pigeons': must be one of 'sockets', 'gloo'" in text


def through_one_interface(rank: int, world_size: int) -> list[str]:
    with patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        return tcp._addresses()


def test_the_interface_that_gloo_is_given_comes_first() -> None:
    (addresses,) = run(1, through_one_interface)
    assert addresses[0] == "127.0.0.1"
