"""Connections between the ranks of a group, for messages in host memory.

gloo moves messages in a thread of its own. Where all cores are busy training, that thread takes the core away
from the one that is sending and holds the connection's lock, and asks for the lock until the scheduler's next
tick: milliseconds per message, of processor time as well (measured: ``docs/performance.md``). Messages here
are short and whoever sends them waits for the answers anyhow: it moves the bytes itself, and the system wakes
it when something has come.
"""

from __future__ import annotations

import itertools
import select
import socket
from collections import deque
from collections.abc import Mapping, Sequence

from torch import Tensor

__all__ = ["Mesh"]

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


def _bytes(part: Tensor | bytes | bytearray) -> memoryview:
    return part.numpy().data if isinstance(part, Tensor) else memoryview(part)
