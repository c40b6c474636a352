"""The interface of all transports: how the bytes of messages get from rank to rank of a group.

A message is either announced by a header with its size, or its receiver knows the size beforehand
(:meth:`Transport.transfer`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..host_traffic import own_traffic


class Header(NamedTuple):
    """The announcement of a message.

    Attributes:
        size: Bytes of the message; negative: the sender failed.
        fingerprint: Description of the operation.
        busy: Nanoseconds that the sender worked since its last exchange.
    """

    size: int
    fingerprint: int
    busy: int


HEADER = struct.Struct("=3q")
#: Entries that are added up at once, which stay in a cache meanwhile.
_BLOCK = 1 << 17


def mean_into(out: Tensor, terms: Sequence[Tensor]) -> None:
    """Write the mean of tensors of one type, added up in their order in fp32 at least; ``out`` may be one."""
    wide = max(out.dtype, torch.float32, key=lambda dtype: dtype.itemsize)
    for start in range(0, out.numel(), _BLOCK):
        target, first, *others = [each[start : start + _BLOCK] for each in (out, *terms)]
        total = first.to(wide, copy=True)
        for term in others:
            total += term
        target.copy_(total.mul_(1.0 / len(terms)))


class Announced(NamedTuple):
    """The headers and messages to all ranks; messages is None where the headers say it all."""

    headers: Sequence[Header]
    messages: Sequence[Tensor] | None


class Transport:
    """A transport between the ranks of a group.

    Every method is a collective, but for those that say so, and raises RuntimeError when it fails.

    Args:
        rank: Position of this process in the group.
        ranks: Global rank of every position.
        group: The process group, where it carries the messages; None for the default one.

    Attributes:
        sent_bytes: Bytes handed to the transport so far.
        queues: Calls return before messages have arrived: the host waits where it reads them.
        allows_threads: Another thread may receive messages while this one calls collectives of torch, in
            whatever order.
        peers: Positions in the group to receive from and to send to, each rank in another order.
    """

    def __init__(self, rank: int, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.sent_bytes = 0
        self.queues = self.allows_threads = False
        # Point-to-point calls take global ranks.
        self.rank, self.ranks = rank, list(ranks)
        self.world_size = len(ranks)
        self.peers = [
            ((self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size)
            for distance in range(1, self.world_size)
        ]

    def post(self, announced: Announced) -> None:
        """Start sending. Several may be posted; the methods below are then called for one after the other."""

    def queue_headers(self, announced: Announced) -> Tensor:
        """Exchange headers, int64 [ranks, fields], on the device, where the transport ``queues``."""
        raise NotImplementedError

    def receive_headers(self, announced: Announced) -> list[Header]:
        """Return the header from every rank, where this rank posted ``announced``."""
        raise NotImplementedError

    def receive_messages(self, messages: Sequence[Tensor], buffers: Sequence[Tensor], *, more: bool) -> None:
        """Fill ``buffers`` from the messages that follow the last headers; the own one is left alone.

        Args:
            messages: The own messages, which this rank posted.
            buffers: uint8, by rank, of the sizes that the headers say.
            more: Other messages have been posted, so that not all need to have left at the end.
        """
        self.transfer(messages, buffers)

    def discard(self, sizes: Sequence[int]) -> None:
        """Throw away the messages that follow the last headers; ``sizes`` are their bytes."""

    @own_traffic()
    def transfer(self, messages: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Send ``messages[r]`` to rank ``r`` and fill ``buffers[r]`` from it; the own ones are left alone.

        gloo refuses all-gathers of unequal sizes and runs equal ones 1.5 to 4 times slower than the line;
        point-to-point calls reach it.
        """
        operations = []
        for source, target in self.peers:
            if buffers[source].numel():
                operations.append(dist.P2POp(dist.irecv, buffers[source], self.ranks[source], self.group))
            if messages[target].numel():
                operations.append(dist.P2POp(dist.isend, messages[target], self.ranks[target], self.group))
                self.sent_bytes += messages[target].numel()
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def scatter(
        self, received: Tensor, sizes_from: Sequence[int], sent: Tensor, sizes_to: Sequence[int]
    ) -> None:
        """Send a part of ``sent`` to each rank and fill a part of ``received`` from each, as
        ``all_to_all_single`` does; the own parts are empty.
        """
        self.transfer(sent.split(list(sizes_to)), received.split(list(sizes_from)))

    def gather(self, received: Tensor) -> None:
        """Fill the parts of ``received``, all of one size, from the ranks; the own one is there already."""
        parts = received.chunk(self.world_size)
        self.transfer([parts[self.rank]] * self.world_size, parts)

    def reduce_scatter(self, mean: Tensor, parts: Tensor) -> None:
        """Fill ``mean`` with the mean over the ranks of row ``rank`` of their ``parts`` [ranks, entries]."""
        received = torch.empty_like(parts)
        self.transfer(list(parts.view(torch.uint8)), list(received.view(torch.uint8)))
        mean_into(mean, [parts[r] if r == self.rank else row for r, row in enumerate(received)])
