"""Messages of 16 MB within the backward pass: more ranks than cores, one of them slow, and no deadlock."""

from __future__ import annotations

import socket
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_plugin import DCTState
from dct_plugin.config import DataParallelConfig
from dct_plugin.transport import tcp_connect

pytestmark = pytest.mark.slow

RANKS, STEPS = 4, 2
#: Bytes that a socket holds until they are sent: a small part of a message.
BUFFER = 1 << 17


CONNECT = tcp_connect.connect


def with_small_buffers(group: Any) -> Any:
    connections, reason = CONNECT(group)
    for connection in connections.values():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return connections, reason


def train(rank: int, slow: int | None, config: DataParallelConfig | None) -> tuple[list[torch.Tensor], int]:
    """Some weights after every step, and the bytes of messages; one tensor takes 16 MB in them."""
    torch.manual_seed(0)
    layers = [nn.Linear(100, 2000), nn.Tanh(), nn.Linear(2000, 4000), nn.Tanh(), nn.Linear(4000, 100)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=200)
    state = None if config is None else DCTState(config).register(model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * rank + step)
        outputs = model(torch.randn(4, 100, generator=generator))
        if rank == slow:
            outputs.register_hook(lambda gradient: time.sleep(0.3))
        optimizer.zero_grad()
        outputs.square().mean().backward()
        optimizer.step()
        found.append(torch.cat([p.detach().reshape(-1)[::997] for p in model.parameters()]))
    return found, 0 if state is None else state.reducer(torch.device("cpu")).group.exchange.counters()[0]


def trained(rank: int, world_size: int, exchange: str, slow: int) -> tuple[float, int]:
    """The largest difference from training without the plugin, and the bytes that this rank sent."""
    torch.set_num_threads(1)
    expected, _ = train(rank, None, None)
    with patch.object(tcp_connect, "connect", with_small_buffers):
        found, sent = train(rank, slow, DataParallelConfig(sparsity=0.0, exchange=exchange))
    return max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)), sent


@pytest.mark.parametrize("exchange", ["direct", "two_phase"])
def test_large_messages_within_the_backward_pass_do_not_deadlock(exchange: str) -> None:
    least = {"direct": 3, "two_phase": 1}[exchange] * STEPS * 16_000_000
    for difference, sent in run(RANKS, trained, exchange, 2):
        assert difference < 1e-5  # values travel in bf16
        assert sent > least
