"""Connections between ranks: many short messages, messages larger than a socket holds, ranks in a circle."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from dct_plugin.transport import tcp
from dct_plugin.transport.tcp import Connections

#: Bytes that a socket of these tests holds until they are sent.
BUFFER = 1 << 17
LARGE = 30_000_000
LIMIT = 10.0


def connected(ranks: int) -> list[Connections]:
    """The connections of every rank, all in this process."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for first, second in itertools.combinations(range(ranks), 2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
        for end in (one, other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        sockets[first][second], sockets[second][first] = one, other
    return [Connections(found, range(ranks), LIMIT) for found in sockets]


def together(functions: Sequence[Callable[[], None]]) -> None:
    """Run the functions in a thread each; raise what one of them raises."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


def random_bytes(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


def test_more_buffers_than_one_system_call_takes() -> None:
    """The system refuses more than 1024 buffers ("Message too long")."""
    first, second = connected(2)
    messages = [random_bytes(size % 50, size) for size in range(5000)]
    buffers = [torch.empty_like(message) for message in messages]

    for message in [large := random_bytes(LARGE, 0), *messages]:
        first.send(1, message)

    def receive() -> None:
        buffer = torch.empty_like(large)
        for each in [buffer, *buffers]:
            second.receive(0, each)
        second.complete()
        assert torch.equal(buffer, large)

    together([first.complete, receive])
    assert all(torch.equal(a, b) for a, b in zip(messages, buffers, strict=True))


def test_ranks_that_wait_for_each_other_in_a_circle_still_send() -> None:
    """Every rank has all bytes of its left neighbour, still sends to it, and waits for its right one."""
    ranks = 3
    connections = connected(ranks)

    def exchange(rank: int) -> None:
        own, after, before = connections[rank], (rank + 1) % ranks, (rank - 1) % ranks
        short, large = torch.empty(10, dtype=torch.uint8), torch.empty(LARGE, dtype=torch.uint8)
        own.send(after, random_bytes(10, rank))
        own.send(before, random_bytes(LARGE, rank))
        own.receive(before, short)
        own.receive(after, large)
        own.complete(sent=False)
        assert torch.equal(short, random_bytes(10, before))
        assert torch.equal(large, random_bytes(LARGE, after))
        own.complete()

    together([lambda rank=rank: exchange(rank) for rank in range(ranks)])  # type: ignore[misc]


def test_who_waits_for_one_rank_goes_on_sending_to_another() -> None:
    """Rank 1 sends when rank 2 has everything from rank 0, which waits for rank 1 meanwhile."""
    first, second, third = connected(3)
    arrived, answer, large = threading.Event(), bytearray(3), torch.empty(LARGE, dtype=torch.uint8)

    def waits() -> None:
        first.send(2, random_bytes(LARGE, 0))
        first.receive(1, answer)
        first.complete(sent=False)

    def answers() -> None:
        arrived.wait(2 * LIMIT)
        second.send(0, b"yes")
        second.complete()

    def receives() -> None:
        third.receive(0, large)
        third.complete()
        arrived.set()

    together([waits, answers, receives])
    assert answer == b"yes"
    assert torch.equal(large, random_bytes(LARGE, 0))


def test_a_silent_rank_is_given_up_and_named_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is asked once, for as long as the limit is."""
    asked = []

    class Poll:
        def register(self, *_: object) -> None:
            pass

        def poll(self, milliseconds: float) -> list[object]:
            asked.append(milliseconds)
            return []

    monkeypatch.setattr(tcp.select, "poll", Poll)
    first, *others = connected(3)
    first.receive(2, bytearray(1))
    with pytest.raises(RuntimeError, match=r"Timed out after 10 s waiting for rank\(s\) \[2\]"):
        first.complete()
    assert asked == [1e3 * LIMIT]
    for each in (first, *others):
        each.close()
