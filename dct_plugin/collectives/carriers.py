"""How messages get from rank to rank: over connections of our own, by gloo, or by the device's transport.

A message is announced with a prefix of fixed size, to which all ranks' answers are awaited, and delivered
when it is known how long it is; or it is transferred, where the receiver knows that beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import mesh

logger = logging.getLogger("dct_plugin.collectives")

#: Bytes of a message that travel with its prefix through gloo: room that every receiver has ready, so the
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

    def announce(self, prefixes: Tensor, messages: Sequence[Tensor] | None) -> Tensor:
        """Send row ``r`` of ``prefixes``, int64 [ranks, n] on the host, to rank ``r``, and return everyone's;
        ``messages`` (None: there are none) may be on their way when this returns.
        """
        ...

    def deliver(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """What was announced last; ``sizes`` are those of the messages that come."""
        ...

    def drop(self, sizes: Sequence[int]) -> None:
        """Nobody wants what was announced last, of which so many bytes may be on their way."""

    def transfer(self, messages: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """Send ``messages[r]`` to rank ``r`` and fill ``rooms[r]`` from it; the own ones are left alone."""


def carrier_of(group: dist.ProcessGroup | None, wire: torch.device) -> Carrier:
    """The carrier of messages that lie on ``wire``; a collective."""
    if wire.type != "cpu":
        return _Device(group, wire)
    if dist.get_world_size(group) > 1:
        found, reason = mesh.connect(group)
        if found is not None:
            return _Sockets(group, found)
        if reason:
            logger.warning(
                "dct: rank %d: messages travel by gloo, which costs time where cores are busy, as the ranks "
                "could not be connected directly: %s (%s=gloo: not to try)",
                dist.get_rank(),
                reason,
                mesh.VARIABLE,
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

    def drop(self, sizes: Sequence[int]) -> None:
        pass


class _Sockets(_Places):
    """Connections of our own: a message follows its prefix at once."""

    def __init__(self, group: dist.ProcessGroup | None, connections: mesh.Mesh) -> None:
        super().__init__(group)
        self._mesh = connections

    def announce(self, prefixes: Tensor, messages: Sequence[Tensor] | None) -> Tensor:
        rows, answer = prefixes.view(torch.uint8), prefixes.clone()
        rooms = answer.view(torch.uint8)
        for source, target in self.peers:
            parts = [rows[target]] if messages is None else [rows[target], messages[target]]
            self.sent_bytes += sum(part.numel() for part in parts)
            self._mesh.send(target, *parts)
            self._mesh.receive(source, rooms[source])
        self._mesh.complete(sent=False)
        return answer

    def deliver(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        received = [
            messages[r] if r == self.rank else torch.empty(size, dtype=torch.uint8)
            for r, size in enumerate(sizes)
        ]
        for source, _ in self.peers:
            self._mesh.receive(source, received[source])
        self._mesh.complete()
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
    """gloo, whose receivers take less than they have room for: a prefix and a message's first bytes are one
    transfer, and most messages are no longer than that.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._expected: dict[int, tuple[Tensor, Any]] = {}
        self._heads: dict[int, Tensor] = {}
        self._prefix_bytes = 0

    def expect(self) -> None:
        # gloo asks receivers before it sends, and is answered while the message is made.
        if self._prefix_bytes and not self._expected:
            for source, _ in self.peers:
                room = torch.empty(self._prefix_bytes + HEAD_BYTES, dtype=torch.uint8)
                self._expected[source] = room, dist.irecv(room, self.ranks[source], self.group)

    def announce(self, prefixes: Tensor, messages: Sequence[Tensor] | None) -> Tensor:
        rows, answer = prefixes.view(torch.uint8), prefixes.clone()
        self._prefix_bytes = rows.shape[1]
        sent = list(rows)
        if messages is not None:
            first = {id(m): torch.cat([r, m[:HEAD_BYTES]]) for r, m in zip(rows, messages, strict=True)}
            sent = [first[id(m)] for m in messages]
        self.expect()
        expected, self._expected = self._expected, {}
        under_way = [work for _, work in expected.values()]
        for _, target in self.peers:
            under_way.append(dist.isend(sent[target], self.ranks[target], self.group))
            self.sent_bytes += sent[target].numel()
        for work in under_way:
            work.wait()
        self._heads = {source: room[self._prefix_bytes :] for source, (room, _) in expected.items()}
        for source, (room, _) in expected.items():
            answer.view(torch.uint8)[source] = room[: self._prefix_bytes]
        return answer

    def deliver(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
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
    """The transport of a device (nccl): prefixes go first, in one small all-to-all."""

    def __init__(self, group: dist.ProcessGroup | None, wire: torch.device) -> None:
        super().__init__(group)
        self._wire = wire

    def announce(self, prefixes: Tensor, messages: Sequence[Tensor] | None) -> Tensor:
        there = (prefixes.pin_memory() if self._wire.type == "cuda" else prefixes).to(
            self._wire, non_blocking=True
        )
        answer = torch.empty_like(there)
        dist.all_to_all_single(answer, there, group=self.group)
        self.sent_bytes += prefixes[0].nbytes * (self.world_size - 1)
        return answer.cpu()

    def deliver(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        received = [
            messages[r] if r == self.rank else torch.empty(size, dtype=torch.uint8, device=self._wire)
            for r, size in enumerate(sizes)
        ]
        self.transfer(messages, received)
        return received
