"""Connections between the ranks of a group, for messages in host memory.

gloo moves messages in a thread of its own. Where all cores are busy training, that thread takes the core away
from the one that is sending and holds the connection's lock, and asks for the lock until the scheduler's next
tick: milliseconds per message, of processor time as well (measured: ``docs/performance.md``). Messages here
are short and whoever sends them waits for the answers anyhow: it moves the bytes itself, and the system wakes
it when something has come.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError

__all__ = ["VARIABLE", "Mesh", "connect"]

#: Environment variable that chooses how messages in host memory travel, on every rank alike.
VARIABLE = "DCT_TRANSPORT"
_CHOICES = ("sockets", "gloo")

#: Seconds for one connection, and for all others to arrive.
_CONNECT, _ARRIVE = 5.0, 15.0
#: Of a rank: where it listens and what it wants to hear, as JSON in so many bytes.
_CARD_BYTES = 1024
_HELLO = struct.Struct("!16sI")  # the listener's token, the caller's position in the group
_WELCOME = b"\x06"
#: Bytes for which the system wakes a receiver, at most: it need not be told of every packet.
_WAKE = 1 << 17
_LEAST_WAKE = 1 << 12
#: Buffers that one system call sends: POSIX promises 16, Linux and macOS take 1024.
_MOST_BUFFERS = 512
#: Bytes that are taken from the system before they are awaited.
_MOST_EARLY = 1 << 24


class _Peer:
    """One connection: what is to be sent over it, and where what arrives belongs."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = connection
        self.rank = rank
        self.outgoing: deque[memoryview] = deque()
        self.incoming: deque[memoryview] = deque()
        self._early = bytearray()
        self._wake = 1

    def push(self) -> None:
        """Send what the system takes now."""
        try:
            while self.outgoing:
                sent = self.socket.sendmsg(itertools.islice(self.outgoing, _MOST_BUFFERS))
                while self.outgoing and sent >= len(self.outgoing[0]):
                    sent -= len(self.outgoing.popleft())
                if sent:
                    self.outgoing[0] = self.outgoing[0][sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise RuntimeError(f"sending to rank {self.rank}: {error}") from error

    def take(self) -> None:
        """Take what has arrived and is not awaited yet: the system has room for some 100 kB of it."""
        try:
            while not self.incoming and len(self._early) < _MOST_EARLY:
                arrived = self.socket.recv(_WAKE)
                if not arrived:  # told when it is waited for
                    return
                self._early += arrived
        except OSError:
            return

    def pull(self) -> None:
        """Receive what has arrived."""
        try:
            while self.incoming:
                room = self.incoming[0]
                if self._early:
                    received = min(len(room), len(self._early))
                    room[:received] = self._early[:received]
                    del self._early[:received]
                else:
                    received = self.socket.recv_into(room)
                if not received:
                    raise RuntimeError(f"rank {self.rank} closed its connection")
                if received == len(room):
                    self.incoming.popleft()
                else:
                    self.incoming[0] = room[received:]
        except BlockingIOError:
            left = len(self.incoming[0])
            wake = min(left, _WAKE) if left >= _LEAST_WAKE else 1
            if wake != self._wake:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)
                self._wake = wake
        except OSError as error:
            raise RuntimeError(f"receiving from rank {self.rank}: {error}") from error


class Mesh:
    """A connection to every other rank of a group; one thread at a time uses it.

    Args:
        connections: By position in the group.
        ranks: Global rank of every position, for messages.
        limit: Seconds without any progress after which a rank is given up.
    """

    def __init__(self, connections: Mapping[int, socket.socket], ranks: Sequence[int], limit: float) -> None:
        self._peers = {position: _Peer(found, ranks[position]) for position, found in connections.items()}
        self._limit = limit

    def send(self, position: int, *parts: Tensor | bytes) -> None:
        """Send tensors (1-D uint8) and bytes, one behind the other, from now on; they stay as they are until
        :meth:`complete` returns.
        """
        peer = self._peers[position]
        for part in parts:
            if len(part):
                peer.outgoing.append(_bytes(part))
        peer.push()

    def receive(self, position: int, room: Tensor | bytearray) -> None:
        """Have the next ``len(room)`` bytes put there by :meth:`complete`."""
        if len(room):
            self._peers[position].incoming.append(_bytes(room))

    def pump(self) -> None:
        """Send and receive what the system has and takes now, also what is not awaited yet; does not wait."""
        for peer in self._peers.values():
            if peer.outgoing:
                peer.push()
            peer.take()

    def complete(self, *, sent: bool = True, limit: float | None = None) -> None:
        """Until all that is to be received is there, and, unless ``sent`` is False, all is sent.

        Args:
            limit: In place of the mesh's own.

        Raises:
            RuntimeError: A connection broke, or nothing moved for the time limit; names the rank.
        """
        limit = self._limit if limit is None else limit
        while True:
            waiting = []
            for peer in self._peers.values():
                if peer.outgoing:
                    peer.push()
                if peer.incoming:
                    peer.pull()
                if peer.incoming or (sent and peer.outgoing):
                    waiting.append(peer)
            if not waiting:
                return
            poll = select.poll()
            for peer in self._peers.values():
                # Also what need not be sent yet: the rank that is waited for may wait for it.
                events = (select.POLLOUT if peer.outgoing else 0) | (select.POLLIN if peer.incoming else 0)
                if events:
                    poll.register(peer.socket, events)
            if not poll.poll(1e3 * limit):
                ranks = [peer.rank for peer in waiting]
                raise RuntimeError(f"Timed out after {limit:g} s waiting for rank(s) {ranks}")

    def close(self) -> None:
        """The others learn of it; nothing can be sent or received any more."""
        for peer in self._peers.values():
            peer.socket.close()


def connect(group: dist.ProcessGroup | None) -> tuple[Mesh | None, str]:
    """Connect the ranks of a group whose CPU tensors gloo carries; a collective.

    Every rank listens where gloo would (``GLOO_SOCKET_IFNAME``, or the way to ``MASTER_ADDR``, or the host's
    name) until all others have come, who show a token that travelled through the group.

    Returns:
        The mesh, or None on every rank with what this rank knows of the reason: a rank was told to leave it
        to gloo (``DCT_TRANSPORT=gloo``; no reason then), or could not be reached.

    Raises:
        ConfigError: ``DCT_TRANSPORT`` of a rank is neither of its values.
    """
    choice = os.environ.get(VARIABLE, _CHOICES[0])
    position, ranks = dist.get_rank(group), _ranks(group)
    token, connections, reason = secrets.token_bytes(16), dict[int, socket.socket](), ""
    with _listener(len(ranks)) as listener:
        card = {
            "use": choice[:40],
            "addresses": _addresses(),
            "port": listener.getsockname()[1],
            "token": token.hex(),
        }
        cards = _exchange_cards(card, group, len(ranks))
        for rank, chosen in zip(ranks, (other["use"] for other in cards), strict=True):
            if chosen not in _CHOICES:
                allowed = ", ".join(map(repr, _CHOICES))
                raise ConfigError(f"rank {rank}: {VARIABLE} = {chosen!r}: must be one of {allowed}")
        if any(other["use"] != _CHOICES[0] for other in cards):
            return None, ""
        try:
            for lower in range(position):
                connections[lower] = _call(cards[lower], position, ranks[lower])
            _answer(listener, token, connections, range(position + 1, len(ranks)))
        except OSError as error:
            reason = str(error)
    every = torch.tensor([not reason], dtype=torch.int64)
    dist.all_reduce(every, dist.ReduceOp.MIN, group=group)
    if every.item():
        return Mesh(connections, ranks, _limit(group)), ""
    for found in connections.values():
        found.close()
    return None, reason or "another rank could not be connected"


def _bytes(part: Tensor | bytes | bytearray) -> memoryview:
    return part.numpy().data if isinstance(part, Tensor) else memoryview(part)


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def _limit(group: dist.ProcessGroup | None) -> float:
    """Seconds that the group waits for its ranks."""
    whole: Any = group if group is not None else dist.group.WORLD
    with contextlib.suppress(AttributeError, RuntimeError):
        limit: timedelta = whole._get_backend(torch.device("cpu")).options._timeout
        return limit.total_seconds()
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def _exchange_cards(
    card: Mapping[str, Any], group: dist.ProcessGroup | None, world_size: int
) -> list[dict[str, Any]]:
    own = json.dumps(card).encode().ljust(_CARD_BYTES)
    cards = [torch.empty(_CARD_BYTES, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(cards, torch.frombuffer(bytearray(own), dtype=torch.uint8), group=group)
    return [json.loads(other.numpy().tobytes()) for other in cards]


def _listener(backlog: int) -> socket.socket:
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _addresses() -> list[str]:
    """Where others may reach this rank, the most likely first."""
    found = []
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        found += [_address_of(name.strip()) for name in names.split(",")]
    if master := os.environ.get("MASTER_ADDR"):
        found.append(_address_towards(master))
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    found.append("127.0.0.1")
    return list(dict.fromkeys(address for address in found if address))[:8]


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface; empty where it has none, or the system does not tell."""
    try:
        import fcntl

        get_address, request = 0x8915, struct.pack("256s", interface.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), get_address, request)[20:24])
    except (ImportError, OSError):
        return ""


def _address_towards(host: str) -> str:
    """This machine's address on the way to ``host``; nothing is sent."""
    try:
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _call(card: Mapping[str, Any], position: int, rank: int) -> socket.socket:
    """A connection to the rank of a card, who has seen its token."""
    failed = []
    for address in card["addresses"]:
        try:
            connection = socket.create_connection((address, card["port"]), timeout=_CONNECT)
            try:
                connection.sendall(_HELLO.pack(bytes.fromhex(card["token"]), position))
                connection.settimeout(_ARRIVE)  # it may still be waiting for others
                if connection.recv(1) == _WELCOME:
                    return connection
                failed.append(f"{address}: not the rank")
            except OSError:
                connection.close()
                raise
            connection.close()
        except OSError as error:
            failed.append(f"{address}: {error}")
    raise OSError(f"rank {rank} cannot be reached at port {card['port']}: {'; '.join(failed)}")


def _answer(
    listener: socket.socket, token: bytes, connections: dict[int, socket.socket], awaited: Sequence[int]
) -> None:
    """Take the calls of those that are awaited, and of nobody else."""
    end = time.monotonic() + _ARRIVE
    while missing := [position for position in awaited if position not in connections]:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise OSError(f"position(s) {missing} of the group did not connect") from error
        try:
            connection.settimeout(_CONNECT)
            shown, position = _HELLO.unpack(_exactly(connection, _HELLO.size))
            if not secrets.compare_digest(shown, token) or position not in missing:
                raise OSError("a stranger")
            connection.sendall(_WELCOME)
            connections[position] = connection
        except OSError:
            connection.close()


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise OSError("closed")
        found += part
    return found
