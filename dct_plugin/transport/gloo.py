"""gloo as the transport of messages in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..host_traffic import own_traffic
from .base import HEADER, Announced, Header, Transport

#: Bytes of a message that travel with its header: every receiver has a buffer for them ready, so this is the
#: same on all ranks.
FIRST_BYTES = 1 << 18


class GlooTransport(Transport):
    """A header and a message's first bytes are one transfer, and most messages are no longer than that.

    A receiver of gloo's takes less than it has room for.
    """

    def __init__(self, rank: int, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        super().__init__(rank, ranks, group)
        self._receiving: dict[int, tuple[Tensor, Any]] = {}
        self._first: dict[int, Tensor] = {}

    def prepare_headers(self) -> None:
        # gloo asks receivers before it sends, and is answered while the message is made.
        if not self._receiving:
            for source, _ in self.peers:
                buffer = torch.empty(HEADER.size + FIRST_BYTES, dtype=torch.uint8)
                self._receiving[source] = buffer, dist.irecv(buffer, self.ranks[source], self.group)

    @own_traffic()
    def receive_headers(self, announced: Announced) -> list[Header]:
        headers = torch.tensor(announced.headers, dtype=torch.int64)
        sent = list(headers.view(torch.uint8).clone())
        if (messages := announced.messages) is not None:
            # A message that all ranks get is copied once.
            joined = {
                id(m): torch.cat([header, m[:FIRST_BYTES]]) for header, m in zip(sent, messages, strict=True)
            }
            sent = [joined[id(m)] for m in messages]
        self.prepare_headers()
        receiving, self._receiving = self._receiving, {}
        pending = [work for _, work in receiving.values()]
        for _, target in self.peers:
            pending.append(dist.isend(sent[target], self.ranks[target], self.group))
            self.sent_bytes += sent[target].numel()
        for work in pending:
            work.wait()
        self._first = {source: buffer[HEADER.size :] for source, (buffer, _) in receiving.items()}
        for source, (buffer, _) in receiving.items():
            headers.view(torch.uint8)[source] = buffer[: HEADER.size]
        return [Header(*row) for row in headers.tolist()]

    def receive_messages(
        self, messages: Sequence[Tensor], sizes: Sequence[int], *, more: bool
    ) -> list[Tensor]:
        received = []
        for r, size in enumerate(sizes):
            if r == self.rank:
                received.append(messages[r])
            elif size <= FIRST_BYTES:
                received.append(self._first[r][:size])
            else:
                received.append(torch.empty(size, dtype=torch.uint8))
                received[r][:FIRST_BYTES] = self._first[r]
        self.transfer([m[FIRST_BYTES:] for m in messages], [buffer[FIRST_BYTES:] for buffer in received])
        return received
