"""TCP connections of our own as the transport of messages in host memory.

gloo moves messages in a thread of its own. Where all cores train, that thread takes the core from the thread
that sends, which holds the connection's lock, and spins on the lock until the scheduler's next tick. This
costs milliseconds per message (``docs/performance.md``). A rank waits for the messages of the others anyhow:
here it moves the bytes itself, and the system wakes it when something has arrived.
"""

from __future__ import annotations

import itertools
import select
import socket
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .base import HEADER, Announced, Header, Transport

#: Bytes for which the system wakes a receiver, at most: it need not be told of every packet.
_WAKE = 1 << 17
_LEAST_WAKE = 1 << 12
#: Buffers that one system call sends: POSIX promises 16, Linux and macOS take 1024.
_MOST_BUFFERS = 512
#: Bytes of unwanted messages that are received so that the next one is understood, and seconds for that.
_MOST_DISCARDED, _DISCARD = 1 << 28, 2.0


class TcpTransport(Transport):
    """Connections to all ranks: a message follows its header at once.

    Args:
        rank, ranks: See :class:`.base.Transport`.
        connections: Connections to the other ranks.
    """

    def __init__(self, rank: int, ranks: Sequence[int], connections: Connections) -> None:
        super().__init__(rank, ranks)
        self._connections, self.allows_threads = connections, True

    def post(self, announced: Announced) -> None:
        # Bytes, not tensors: where cores are busy a call of torch takes 20 to 130 microseconds.
        for _, target in self.peers:
            header = HEADER.pack(*announced.headers[target])
            if announced.messages is None:
                self._connections.send(target, header)
            else:
                self._connections.send(target, header, announced.messages[target])
                self.sent_bytes += announced.messages[target].numel()
            self.sent_bytes += HEADER.size

    def receive_headers(self, announced: Announced) -> list[Header]:
        buffers = {source: bytearray(HEADER.size) for source, _ in self.peers}
        for source, buffer in buffers.items():
            self._connections.receive(source, buffer)
        self._connections.complete(sent=False)
        return [
            Header(*HEADER.unpack(buffers[r])) if r in buffers else own
            for r, own in enumerate(announced.headers)
        ]

    def receive_messages(self, messages: Sequence[Tensor], buffers: Sequence[Tensor], *, more: bool) -> None:
        for source, _ in self.peers:
            self._connections.receive(source, buffers[source])
        self._connections.complete(sent=not more)

    def discard(self, sizes: Sequence[int]) -> None:
        try:
            if any(size > _MOST_DISCARDED for size in sizes):
                raise dist.DistNetworkError("too much")
            for source, _ in self.peers:
                self._connections.receive(
                    source, torch.empty(max(0, sizes[source]), dtype=torch.uint8, device="cpu")
                )
            self._connections.complete(limit=_DISCARD)
        except RuntimeError:  # ranks that go on see that this one does not
            self._connections.close()

    def transfer(self, messages: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for source, target in self.peers:
            self.sent_bytes += messages[target].numel()
            self._connections.send(target, messages[target])
            self._connections.receive(source, buffers[source])
        self._connections.complete()


class Connections:
    """A connection to every other rank of a group; one thread at a time uses it.

    Args:
        sockets: The connected sockets by position in the group.
        ranks: Global rank of every position, for messages.
        limit: Seconds without any progress after which a rank is given up.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], ranks: Sequence[int], limit: float) -> None:
        self._peers = {position: _Connection(found, ranks[position]) for position, found in sockets.items()}
        self._limit = limit

    def send(self, position: int, *parts: Tensor | bytes) -> None:
        """Start to send tensors (1-D uint8) and bytes, one behind the other. They must not change until
        :meth:`complete` returns.
        """
        peer = self._peers[position]
        for part in parts:
            if len(part):
                peer.outgoing.append(_view(part))
        peer.push()

    def receive(self, position: int, buffer: Tensor | bytearray) -> None:
        """Let :meth:`complete` put the next ``len(buffer)`` bytes there."""
        if len(buffer):
            self._peers[position].incoming.append(_view(buffer))

    def complete(self, *, sent: bool = True, limit: float | None = None) -> None:
        """Wait until all buffers are full and, unless ``sent`` is False, all has been sent.

        Args:
            sent: Wait for that, too. Sending goes on in any case.
            limit: Seconds, in place of the group's own limit.

        Raises:
            DistNetworkError: A connection broke, or nothing moved for the time limit; names the rank.
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
                    waiting.append(peer.rank)
            if not waiting:
                return
            poll = select.poll()
            for peer in self._peers.values():
                # Also what need not be sent yet: the rank that is waited for may wait for it.
                events = (select.POLLOUT if peer.outgoing else 0) | (select.POLLIN if peer.incoming else 0)
                if events:
                    poll.register(peer.socket, events)
            if not poll.poll(1e3 * limit):
                raise dist.DistNetworkError(f"Timed out after {limit:g} s waiting for rank(s) {waiting}")

    def close(self) -> None:
        """Close all connections, which the other ranks see."""
        for peer in self._peers.values():
            peer.socket.close()


class _Connection:
    """One connection: what is to be sent over it, and the buffers for what arrives."""

    def __init__(self, connected: socket.socket, rank: int) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = connected
        self.rank = rank
        self.outgoing: deque[memoryview] = deque()
        self.incoming: deque[memoryview] = deque()
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
            raise dist.DistNetworkError(f"sending to rank {self.rank}: {error}") from error

    def pull(self) -> None:
        """Receive what has arrived into the buffers."""
        try:
            while self.incoming:
                buffer = self.incoming[0]
                received = self.socket.recv_into(buffer)
                if not received:
                    raise dist.DistNetworkError(f"rank {self.rank} closed its connection")
                if received == len(buffer):
                    self.incoming.popleft()
                else:
                    self.incoming[0] = buffer[received:]
        except BlockingIOError:
            missing = len(self.incoming[0])
            wake = min(missing, _WAKE) if missing >= _LEAST_WAKE else 1
            if wake != self._wake:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)
                self._wake = wake
        except OSError as error:
            raise dist.DistNetworkError(f"receiving from rank {self.rank}: {error}") from error


def _view(part: Tensor | bytes | bytearray) -> memoryview:
    return part.numpy().data if isinstance(part, Tensor) else memoryview(part)
