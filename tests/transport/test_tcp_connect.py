"""How ranks connect: through TCP where all can, by gloo where one cannot, and no stranger is in the way."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.processes import launch, logged, run

from dct_plugin.transport import Exchange, tcp_connect

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@contextmanager
def transport(choice: str = "sockets", **changed: Any) -> Iterator[None]:
    """With a choice of the user, and ``changed`` in :mod:`.tcp_connect`; the process serves other tests
    afterwards.
    """
    with patch.dict(os.environ, {tcp_connect.VARIABLE: choice}), patch.dict(vars(tcp_connect), changed):
        yield


def before_connecting(action: Callable[[list[Any]], None]) -> Callable[..., Any]:
    """In place of ``_exchange_invitations``: ``action`` first gets this rank's endpoints."""
    real = tcp_connect._exchange_invitations

    def exchange(invitation: dict[str, Any], **others: Any) -> Any:
        action(invitation["endpoints"])
        return real(invitation, **others)

    return exchange


def calls_while_connecting(rank: int, world_size: int) -> dict[str, Any]:
    """How often this rank calls others and meets them in collectives until all agree, and how long it may."""
    counts: dict[str, Any] = {"calls": 0, "sums": 0, "gathers": 0, "limits": []}
    greet, connect = tcp_connect._Rendezvous._greet, tcp_connect._Rendezvous.connect
    reduce, gather = dist.all_reduce, dist.all_gather

    async def greets(*arguments: Any) -> socket.socket:
        counts["calls"] += 1
        return await greet(*arguments)

    async def connects(self: Any, listeners: Any, seconds: float) -> None:
        counts["limits"].append(seconds)
        await connect(self, listeners, seconds)

    def sums(*arguments: Any, **options: Any) -> Any:
        counts["sums"] += 1
        work = reduce(*arguments, **options)
        wait = work.wait

        def waits(limit: timedelta) -> bool:
            counts["limits"].append(limit.total_seconds())
            return wait(limit)

        return SimpleNamespace(wait=waits)

    def gathers(*arguments: Any, **options: Any) -> Any:
        counts["gathers"] += 1
        return gather(*arguments, **options)

    exchange = Exchange(None, CPU)
    with (
        transport(),
        patch.object(tcp_connect, "time_limit", lambda group: 20.0),
        patch.multiple(tcp_connect._Rendezvous, _greet=greets, connect=connects),
        patch.multiple(dist, all_reduce=sums, all_gather=gathers),
    ):
        for number in range(3):
            exchange.agree(number)
    return {**counts, "name": type(exchange._open()).__name__}


def test_a_rank_calls_each_rank_before_it_once_and_all_agree_in_one_sum() -> None:
    """Connecting takes two collectives and one call per pair of ranks, whatever is agreed on later. A lost
    rank is waited for until half of the limit, and in the sum until the limit.
    """
    for rank, found in enumerate(run(3, calls_while_connecting)):
        assert (found["calls"], found["sums"], found["gathers"]) == (rank, 1, 1)
        connecting, agreeing = found["limits"]
        assert connecting == 10.0
        assert agreeing <= 20.0
        assert found["name"] == "TcpTransport"


def one_says_gloo(rank: int, world_size: int) -> str:
    with transport("gloo" if rank == 1 else "sockets"):
        return type(Exchange(None, CPU)._open()).__name__


def test_one_rank_that_is_told_to_use_gloo_is_enough() -> None:
    assert run(3, one_says_gloo) == ["CollectiveTransport"] * 3


def unreachable(rank: int, world_size: int) -> tuple[str, list[int], list[str]]:
    exchange = Exchange(None, CPU)

    def nowhere(endpoints: list[Any]) -> None:
        endpoints[:] = [("no address of anybody", port) for _, port in endpoints]

    with logged() as lines, transport(_CONNECT=0.5, _exchange_invitations=before_connecting(nowhere)):
        received = exchange.all_gather(torch.tensor([rank], dtype=torch.uint8))
    return type(exchange._open()).__name__, [int(part) for part in received], lines


def test_where_a_rank_cannot_be_reached_all_use_gloo_and_say_so() -> None:
    found = run(2, unreachable)
    assert [(name, received) for name, received, _ in found] == [("CollectiveTransport", [0, 1])] * 2
    assert "rank 1: messages travel by gloo" in found[1][2][0]
    assert "rank 0 cannot be reached at no address of anybody port" in found[1][2][0]
    assert "rank 0: messages travel by gloo" in found[0][2][0]


class Strangers:
    """Connections to a port of rank 0 of whoever does not know its token, in the queue before the ranks'."""

    def __init__(self, count: int, say: Callable[[socket.socket], object]) -> None:
        self._threads = [threading.Thread(target=self._knock, daemon=True) for _ in range(count)]
        self._say = say
        self._come = threading.Barrier(count + 1)
        self._address: tuple[str, int] = ("", 0)
        self.turned_away = 0

    def come(self, endpoints: list[Any]) -> None:
        self._address = tuple(endpoints[0])
        for thread in self._threads:
            thread.start()
        self._come.wait(10)

    def leave(self) -> None:
        for thread in self._threads:
            thread.join(10)

    def _knock(self) -> None:
        with socket.create_connection(self._address) as stranger:
            stranger.settimeout(10)
            self._come.wait(10)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._say(stranger)
                while stranger.recv(1000):
                    pass
            self.turned_away += 1


def _trickle(stranger: socket.socket) -> None:
    for _ in range(60):
        stranger.sendall(b"x")
        time.sleep(0.1)


CALLERS: dict[str, tuple[int, Callable[[socket.socket], object]]] = {
    "silent": (20, lambda stranger: None),
    "trickling": (20, _trickle),
    "another protocol": (3, lambda stranger: stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))),
    "a guess": (3, lambda stranger: stranger.sendall(tcp_connect._HELLO.pack(1, bytes(16)) + bytes(32))),
    "nothing but an end": (3, lambda stranger: stranger.shutdown(socket.SHUT_WR)),
}


def with_strangers(rank: int, world_size: int, who: str) -> tuple[str, list[int], int]:
    strangers = Strangers(*CALLERS[who])
    hook = {"_exchange_invitations": before_connecting(strangers.come)} if rank == 0 else {}
    exchange = Exchange(None, CPU)
    with transport(**hook):
        received = exchange.all_gather(torch.tensor([rank], dtype=torch.uint8))
    if rank == 0:
        strangers.leave()
    return type(exchange._open()).__name__, [int(part) for part in received], strangers.turned_away


@pytest.mark.parametrize("who", CALLERS)
def test_strangers_are_served_side_by_side_and_turned_away(who: str) -> None:
    """One after the other the silent ones would take more time than there is to connect: no TcpTransport."""
    (first, second) = run(2, with_strangers, who)
    for name, received, _ in (first, second):
        assert (name, received) == ("TcpTransport", [0, 1])
    assert first[2] == CALLERS[who][0]


def waits_for_a_rank_that_does_not_call(rank: int, world_size: int) -> str:
    """Strangers come one after the other meanwhile, and each one stays."""
    stop, open_ones = threading.Event(), list[socket.socket]()

    def come(endpoints: list[Any]) -> None:
        def knock() -> None:
            while not stop.wait(0.05):
                with contextlib.suppress(OSError):
                    open_ones.append(socket.create_connection(tuple(endpoints[0])))
                    open_ones[-1].sendall(b"x")

        threading.Thread(target=knock, daemon=True).start()

    async def does_not_call(*_: Any) -> None:
        pass

    exchange = Exchange(None, CPU)
    with transport(_CONNECT=2.0, _exchange_invitations=before_connecting(come)):
        if rank == 0:
            exchange.agree(1)
        else:
            with patch.object(tcp_connect._Rendezvous, "_call", does_not_call):
                exchange.agree(1)
    stop.set()
    for each in open_ones:
        each.close()
    return type(exchange._open()).__name__


def test_strangers_do_not_hold_a_rank_beyond_its_deadline() -> None:
    """Strangers come for as long as it waits."""
    assert run(2, waits_for_a_rank_that_does_not_call) == ["CollectiveTransport"] * 2


def meets_an_impostor(rank: int, world_size: int) -> tuple[str, bytes, str]:
    """Where rank 1 calls first somebody else listens, who writes down what it hears and answers at random."""
    heard, token = bytearray(), [""]

    def impostor(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            caller, _ = listener.accept()
            caller.settimeout(2)
            heard.extend(caller.recv(1000))
            caller.sendall(secrets.token_bytes(48))
            while part := caller.recv(1000):
                heard.extend(part)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener,), daemon=True)
        real = tcp_connect._exchange_invitations

        def exchange(invitation: dict[str, Any], **others: Any) -> Any:
            if rank == 0:
                thread.start()
                invitation["endpoints"].insert(0, listener.getsockname())
            token[0] = invitation["token"]
            return real(invitation, **others)

        with transport(_exchange_invitations=exchange):
            exchanged = Exchange(None, CPU)
            exchanged.agree(1)
        if rank == 0:
            thread.join(10)
    return type(exchanged._open()).__name__, bytes(heard), token[0]


def test_an_impostor_learns_nothing_and_the_rank_is_found_behind_it() -> None:
    (name, heard, token), (other, _, _) = run(2, meets_an_impostor)
    assert name == other == "TcpTransport"
    assert len(heard) == tcp_connect._HELLO.size  # no proof for who has not given one
    assert bytes.fromhex(token) not in heard


def listens(rank: int, world_size: int) -> tuple[list[Any], list[str]]:
    told: list[Any] = []
    with (
        transport(_exchange_invitations=before_connecting(told.extend)),
        patch.object(tcp_connect, "_listeners", wraps=tcp_connect._listeners) as bound,
    ):
        Exchange(None, CPU).agree(1)
    return told, bound.call_args.args[0]


def test_a_rank_listens_where_the_others_are_told_and_nowhere_else() -> None:
    for told, addresses in run(2, listens):
        assert told
        assert {address for address, _ in told} <= set(addresses)
        assert not {"", "0.0.0.0", "::"} & {address for address, _ in told}


def misconfigured(rank: int, world_size: int) -> None:
    with transport("pigeons" if rank == 1 else "sockets"):
        Exchange(None, CPU).agree(1)


def test_a_transport_that_does_not_exist_is_an_error() -> None:
    for kind, text in launch(2, misconfigured):
        assert kind == "error"
        assert "ConfigError: rank 1: DCT_TRANSPORT = 'pigeons': must be one of 'sockets', 'gloo'" in text


def through_one_interface(rank: int, world_size: int) -> list[str]:
    with patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        return tcp_connect.addresses_here()


def test_the_interface_that_gloo_is_given_comes_first() -> None:
    (addresses,) = run(1, through_one_interface)
    assert addresses[0] == "127.0.0.1"
