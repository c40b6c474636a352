"""How messages get from rank to rank: over connections of our own, by gloo, or by the device's transport.

A message is announced by a row of numbers, to which all ranks' answers are awaited, and delivered when it is
known how long it is; or it is transferred, where the receiver knows that beforehand.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from . import tcp, tcp_connect

logger = logging.getLogger("dct_plugin.transport")

#: Size and fingerprint of a message (size negative: the sender failed), and what its sender was busy with.
Row: TypeAlias = tuple[int, int, int]
_ROW = struct.Struct("=3q")

#: Bytes of a message that travel with its row through gloo: room that every receiver has ready, so the
#: same on all ranks.
HEAD_BYTES = 1 << 18
#: Bytes of a message nobody wants that are read so that the next one is understood, and seconds for that.
_MOST_DROPPED, _DROP = 1 << 28, 2.0


class Carrier(Protocol):
    """A transport between the ranks of a group; every method is a collective, and raises RuntimeError when
    it fails.

    Attributes:
        sent_bytes: Handed to the transport so far.
    """

    sent_bytes: int

    def expect(self) -> None:
        """The next message is an announced one: be ready to receive before it is made."""

    def post(self, rows: Sequence[Row], messages: Sequence[Tensor] | None) -> None:
        """``rows[r]`` and ``messages[r]`` (None: there are no messages) may leave for rank ``r`` from now on.
        Several may be posted; what follows is called for one after the other.
        """

    def pump(self) -> None:
        """Move what can be moved of what was posted, without waiting."""

    def answers(self, rows: Sequence[Row], messages: Sequence[Tensor] | None) -> list[Row]:
        """The row to this rank from every rank, to what was posted so."""
        ...

    def deliver(self, messages: Sequence[Tensor], sizes: Sequence[int], *, more: bool) -> list[Tensor]:
        """The messages that follow these answers, and are so long; unless there is ``more`` to come, all
        that was posted has left when this returns.
        """
        ...

    def drop(self, sizes: Sequence[int]) -> None:
        """Nobody wants the messages that follow these answers, of which so many bytes may be on their way."""

    def transfer(self, messages: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """Send ``messages[r]`` to rank ``r`` and fill ``rooms[r]`` from it; the own ones are left alone."""


def carrier_of(group: dist.ProcessGroup | None, wire: torch.device) -> Carrier:
    """The carrier of messages that lie on ``wire``; a collective."""
    if wire.type != "cpu":
        return _Device(group, wire)
    if dist.get_world_size(group) > 1:
        connections, reason = tcp_connect.connect(group)
        if connections is not None:
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            return _Sockets(group, tcp.Mesh(connections, ranks, tcp_connect.time_limit(group)))
        if reason:
            logger.warning(
                "dct: rank %d: messages travel by gloo, which costs time where cores are busy, as the ranks "
                "could not be connected directly: %s (%s=gloo: not to try)",
                dist.get_rank(),
                reason,
                tcp_connect.VARIABLE,
            )
    return _Gloo(group)


class _Places:
    """The other ranks of a group, and how many bytes they were sent."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.sent_bytes = 0
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # Positions in the group to global ranks, which is what point-to-point calls take.
        self.ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        # Positions to receive from and to send to, each rank in another order.
        self.peers = [
            ((self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size)
            for distance in range(1, self.world_size)
        ]

    def expect(self) -> None:
        pass

    def post(self, rows: Sequence[Row], messages: Sequence[Tensor] | None) -> None:
        pass

    def pump(self) -> None:
        pass

    def drop(self, sizes: Sequence[int]) -> None:
        pass


class _Sockets(_Places):
    """Connections of our own: a message follows its row at once."""

    def __init__(self, group: dist.ProcessGroup | None, connections: tcp.Mesh) -> None:
        super().__init__(group)
        self._mesh = connections

    def post(self, rows: Sequence[Row], messages: Sequence[Tensor] | None) -> None:
        # Bytes, not tensors: where cores are busy a call of torch takes 20 to 130 microseconds.
        for _, target in self.peers:
            row = _ROW.pack(*rows[target])
            if messages is None:
                self._mesh.send(target, row)
            else:
                self._mesh.send(target, row, messages[target])
                self.sent_bytes += messages[target].numel()
            self.sent_bytes += _ROW.size

    def pump(self) -> None:
        self._mesh.pump()

    def answers(self, rows: Sequence[Row], messages: Sequence[Tensor] | None) -> list[Row]:
        rooms = {source: bytearray(_ROW.size) for source, _ in self.peers}
        for source, room in rooms.items():
            self._mesh.receive(source, room)
        self._mesh.complete(sent=False)
        return [_ROW.unpack(rooms[r]) if r in rooms else row for r, row in enumerate(rows)]

    def deliver(self, messages: Sequence[Tensor], sizes: Sequence[int], *, more: bool) -> list[Tensor]:
        received = [
            messages[r] if r == self.rank else torch.empty(size, dtype=torch.uint8)
            for r, size in enumerate(sizes)
        ]
        for source, _ in self.peers:
            self._mesh.receive(source, received[source])
        self._mesh.complete(sent=not more)
        return received

    def drop(self, sizes: Sequence[int]) -> None:
        try:
            if any(size > _MOST_DROPPED for size in sizes):
                raise RuntimeError("too much")
            for source, _ in self.peers:
                self._mesh.receive(source, torch.empty(max(0, sizes[source]), dtype=torch.uint8))
            self._mesh.complete(limit=_DROP)
        except RuntimeError:  # whoever goes on is told that this rank does not
            self._mesh.close()

    def transfer(self, messages: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        for source, target in self.peers:
            self.sent_bytes += messages[target].numel()
            self._mesh.send(target, messages[target])
            self._mesh.receive(source, rooms[source])
        self._mesh.complete()


class _PointToPoint(_Places):
    """Transfers of exactly the bytes there are: gloo refuses unequal all-gathers and runs equal ones 1.5 to
    4 times slower than the line, while isend/irecv and all-to-all reach it.
    """

    def transfer(self, messages: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        operations = []
        for source, target in self.peers:
            if rooms[source].numel():
                operations.append(dist.P2POp(dist.irecv, rooms[source], self.ranks[source], self.group))
            if messages[target].numel():
                operations.append(dist.P2POp(dist.isend, messages[target], self.ranks[target], self.group))
                self.sent_bytes += messages[target].numel()
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()


class _Gloo(_PointToPoint):
    """gloo, whose receivers take less than they have room for: a row and a message's first bytes are one
    transfer, and most messages are no longer than that.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._expected: dict[int, tuple[Tensor, Any]] = {}
        self._heads: dict[int, Tensor] = {}

    def expect(self) -> None:
        # gloo asks receivers before it sends, and is answered while the message is made.
        if not self._expected:
            for source, _ in self.peers:
                room = torch.empty(_ROW.size + HEAD_BYTES, dtype=torch.uint8)
                self._expected[source] = room, dist.irecv(room, self.ranks[source], self.group)

    def answers(self, rows: Sequence[Row], messages: Sequence[Tensor] | None) -> list[Row]:
        answer = torch.tensor(rows, dtype=torch.int64)
        sent = list(answer.view(torch.uint8).clone())
        if messages is not None:
            first = {id(m): torch.cat([r, m[:HEAD_BYTES]]) for r, m in zip(sent, messages, strict=True)}
            sent = [first[id(m)] for m in messages]
        self.expect()
        expected, self._expected = self._expected, {}
        under_way = [work for _, work in expected.values()]
        for _, target in self.peers:
            under_way.append(dist.isend(sent[target], self.ranks[target], self.group))
            self.sent_bytes += sent[target].numel()
        for work in under_way:
            work.wait()
        self._heads = {source: room[_ROW.size :] for source, (room, _) in expected.items()}
        for source, (room, _) in expected.items():
            answer.view(torch.uint8)[source] = room[: _ROW.size]
        return [tuple(row) for row in answer.tolist()]

    def deliver(self, messages: Sequence[Tensor], sizes: Sequence[int], *, more: bool) -> list[Tensor]:
        received = []
        for r, size in enumerate(sizes):
            if r == self.rank:
                received.append(messages[r])
            elif size <= HEAD_BYTES:
                received.append(self._heads[r][:size])
            else:
                received.append(torch.empty(size, dtype=torch.uint8))
                received[r][:HEAD_BYTES] = self._heads[r]
        self.transfer([m[HEAD_BYTES:] for m in messages], [part[HEAD_BYTES:] for part in received])
        return received


class _Device(_PointToPoint):
    """The transport of a device (nccl): rows go first, in one small all-to-all."""

    def __init__(self, group: dist.ProcessGroup | None, wire: torch.device) -> None:
        super().__init__(group)
        self._wire = wire

    def answers(self, rows: Sequence[Row], messages: Sequence[Tensor] | None) -> list[Row]:
        prefixes = torch.tensor(rows, dtype=torch.int64, pin_memory=self._wire.type == "cuda")
        there = prefixes.to(self._wire, non_blocking=True)
        answer = torch.empty_like(there)
        dist.all_to_all_single(answer, there, group=self.group)
        self.sent_bytes += _ROW.size * (self.world_size - 1)
        return [tuple(row) for row in answer.tolist()]

    def deliver(self, messages: Sequence[Tensor], sizes: Sequence[int], *, more: bool) -> list[Tensor]:
        received = [
            messages[r] if r == self.rank else torch.empty(size, dtype=torch.uint8, device=self._wire)
            for r, size in enumerate(sizes)
        ]
        self.transfer(messages, received)
        return received
