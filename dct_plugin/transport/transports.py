"""The choice of a transport for the messages of a group."""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist

from . import tcp_connect
from .base import Transport
from .device import DeviceTransport
from .gloo import GlooTransport
from .tcp import Connections, TcpTransport

logger = logging.getLogger("dct_plugin.transport")


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Return where a message of ``device`` has to lie for the group to send it: gloo sends from the host."""
    backends = str(dist.get_backend_config(group)).split(",")
    if device.type == "cpu" or f"{device.type}:gloo" not in backends:
        return device
    _warn_of_copies(device)
    return torch.device("cpu")


@functools.cache
def _warn_of_copies(device: torch.device) -> None:
    logger.warning("gloo carries messages of %s through the host; nccl would not", device)


def open_transport(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """Return a transport of messages that lie on ``device``; a collective."""
    if device.type != "cpu":
        return DeviceTransport(group, device)
    if dist.get_world_size(group) > 1:
        sockets, reason = tcp_connect.connect(group)
        if sockets is not None:
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            return TcpTransport(group, Connections(sockets, ranks, tcp_connect.time_limit(group)))
        if reason:
            logger.warning(
                "dct: rank %d: messages travel by gloo, which costs time where cores are busy, as the ranks "
                "could not be connected directly: %s (%s=gloo: not to try)",
                dist.get_rank(),
                reason,
                tcp_connect.VARIABLE,
            )
    return GlooTransport(group)
