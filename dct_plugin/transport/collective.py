"""Collectives of torch as the transport: of messages on a device (nccl), and of those that gloo carries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..host_traffic import own_traffic
from . import lost_ranks
from .base import HEADER, Announced, Header, Transport

#: torch 2.13 has other names for them, and warns of these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveTransport(Transport):
    """Headers go first, in one small all-to-all; messages follow.

    Args:
        rank, ranks, group: See :class:`.base.Transport`.
        device: Device of the messages.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        super().__init__(rank, ranks, group)
        self._device = device
        self.queues = device.type != "cpu"

    @own_traffic()
    def queue_headers(self, announced: Announced) -> Tensor:
        pinned = torch.tensor(
            announced.headers, dtype=torch.int64, pin_memory=self._device.type == "cuda", device="cpu"
        )
        sent = pinned.to(self._device, non_blocking=True)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self.sent_bytes += HEADER.size * (self.world_size - 1)
        return received

    def receive_headers(self, announced: Announced) -> list[Header]:
        received = lost_ranks.received(self.queue_headers(announced), self.group)
        return [Header(*row) for row in received.tolist()]

    @own_traffic()
    def scatter(
        self, received: Tensor, sizes_from: Sequence[int], sent: Tensor, sizes_to: Sequence[int]
    ) -> None:
        dist.all_to_all_single(received, sent, list(sizes_from), list(sizes_to), group=self.group)
        self.sent_bytes += sent.numel()

    @own_traffic()
    def reduce_scatter(self, mean: Tensor, parts: Tensor) -> None:
        if self._device.type == "cpu":  # gloo sums everything on all ranks
            super().reduce_scatter(mean, parts)
            return
        # nccl divides before it adds: a sum of fp16 would overflow where its mean does not.
        _reduce_scatter(mean, parts.view(-1), dist.ReduceOp.AVG, group=self.group)
        self.sent_bytes += mean.nbytes * (self.world_size - 1)

    @own_traffic()
    def gather(self, received: Tensor) -> None:
        own = received.chunk(self.world_size)[self.rank]
        _all_gather(received, own, group=self.group)
        self.sent_bytes += own.numel() * (self.world_size - 1)
