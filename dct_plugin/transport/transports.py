"""The choice of a transport for the messages of a group."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..host_traffic import own_traffic
from . import tcp_connect
from .base import Transport
from .collective import CollectiveTransport
from .tcp import Connections, TcpTransport

logger = logging.getLogger("dct_plugin.transport")

#: Transports of process groups that have one of their own, by the class of the group.
TRANSPORTS: dict[
    type[dist.ProcessGroup], Callable[[int, Sequence[int], dist.ProcessGroup | None], Transport]
] = {}


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


@own_traffic(recorded=False)
def open_transport(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """Return a transport of messages that lie on ``device``; a collective."""
    whole: Any = group if group is not None else dist.group.WORLD
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(whole)
    if type(whole) in TRANSPORTS:
        return TRANSPORTS[type(whole)](rank, ranks, group)
    if device.type == "cpu" and len(ranks) > 1:
        sockets, reason = tcp_connect.connect(group)
        if sockets is not None:
            return TcpTransport(rank, ranks, Connections(sockets, ranks, tcp_connect.time_limit(group)))
        if reason:
            logger.warning(
                "dct: rank %d: messages travel by gloo, which costs time where cores are busy, as the ranks "
                "could not be connected directly: %s (%s=gloo: not to try)",
                dist.get_rank(),
                reason,
                tcp_connect.VARIABLE,
            )
    return CollectiveTransport(rank, ranks, group, device)


@own_traffic(recorded=False)
def subgroup(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a process group of some ranks of a group, with its backend and time limit; a collective of the
    group, every rank of which makes one.

    Raises:
        ConfigError: torch could not make it.
    """
    whole: Any = group if group is not None else dist.group.WORLD
    # torch names a group that some ranks make after the number of groups that each of them is in.
    count = len(dist.distributed_c10d._world.pg_names)
    counts = torch.tensor([count, -count])
    if "nccl" in dist.get_backend(whole):
        counts = counts.cuda()
    dist.all_reduce(counts, dist.ReduceOp.MAX, whole)
    if counts[0] != -counts[1]:
        raise ConfigError(
            f"rank {dist.get_rank()}: dct.data_parallel.nodes: the ranks that exchange gradients are in "
            f"different numbers of process groups, up to {int(counts[0])}: torch cannot make groups of nodes "
            "then. Make as many groups with every rank, or set it to 1"
        )
    backend = str(dist.get_backend_config(whole))
    limit = timedelta(seconds=tcp_connect.time_limit(whole)) if "gloo" in backend else None
    made = dist.new_group(list(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
