"""The ranks that exchange messages, and the choice of a transport for them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..console import log_once
from ..errors import ConfigError
from ..host_traffic import own_traffic
from . import lost_ranks, tcp_connect
from .base import Transport
from .collective import CollectiveTransport
from .tcp import Connections, TcpTransport

logger = logging.getLogger("dct_plugin.transport")


@own_traffic(recorded=False)
def open_transport(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """Return a transport of messages that lie on ``device``; a collective."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group or dist.group.WORLD)
    if device.type == "cpu" and len(ranks) > 1:
        sockets, reason = tcp_connect.connect(group)
        if sockets is not None:
            return TcpTransport(rank, ranks, Connections(sockets, ranks, tcp_connect.time_limit(group)))
        if reason:
            logger.warning(
                f"dct: rank {dist.get_rank()}: messages travel by gloo, which costs time where cores are "
                f"busy, as the ranks could not be connected directly: {reason} ({tcp_connect.VARIABLE}=gloo: "
                "not to try)"
            )
    return CollectiveTransport(rank, ranks, group, device)


@own_traffic(recorded=False)
def subgroup(
    group: dist.ProcessGroup | None, ranks: Sequence[int], device: torch.device
) -> dist.ProcessGroup:
    """Make a process group of some ranks of a group, with its backend and time limit; a collective of the
    group, every rank of which makes one. Ranks of other groups need not take part.

    Args:
        group: The group, None for the default one.
        ranks: Global ranks of the new one.
        device: Device of its messages.

    Raises:
        ConfigError: torch could not make it.
    """
    # torch names a group that some ranks make after the number of groups that each of them is in.
    count = len(dist.distributed_c10d._world.pg_names)
    counts = torch.tensor([count, -count], device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group)
    if counts[0] != -counts[1]:
        raise ConfigError(
            f"rank {dist.get_rank()}: dct.data_parallel.nodes: the ranks that exchange gradients are in "
            f"different numbers of process groups, up to {int(counts[0])}: torch cannot make groups of nodes "
            "then. Make as many groups with every rank, or set it to 1"
        )
    backend = str(dist.get_backend_config(group))
    limit = timedelta(seconds=lost_ranks.time_limit(group, device.type))
    # With init_process_group(device_id=...) torch would split the communicator of all ranks, and wait for
    # those that make no group.
    everyone: Any = dist.group.WORLD
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        made = dist.new_group(list(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
    except NotImplementedError as error:  # of TorchComms
        raise ConfigError(
            f"rank {dist.get_rank()}: dct.data_parallel.nodes: torch cannot make groups of nodes with "
            f"TORCH_DISTRIBUTED_USE_TORCHCOMMS: {error}. Leave it out, or set nodes to 1"
        ) from error
    finally:
        everyone.bound_device_id = bound
    assert isinstance(made, dist.ProcessGroup)
    return made


class Peers(ABC):
    """The ranks that exchange messages.

    Args:
        rank: Position of this process.
        ranks: Number by which messages name the rank of each position.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, list(ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of ``torch.distributed`` of these ranks; None if there is none."""
        return None

    @abstractmethod
    def message_device(self, device: torch.device) -> torch.device:
        """Return where a message of ``device`` has to lie to be sent."""

    @abstractmethod
    def open_transport(self, device: torch.device) -> Transport:
        """Return a transport of messages that lie on ``device``; a collective."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place and dense; a collective."""

    def state_failure(self, error: BaseException) -> None:
        """Tell the other ranks of an error that ends this process, where they look for such statements."""
        return

    @abstractmethod
    def guard(self, what: str, step: int | None, failed: Callable[[], None]) -> AbstractContextManager[None]:
        """Surround the work of a transport. Its errors name addresses at best; those raised here name ranks.

        Args:
            what: The work, in words.
            step: Optimizer steps so far; None if they are not known.
            failed: Called after an error of the transport.
        """


class GroupPeers(Peers):
    """The ranks of a process group of ``torch.distributed``, or a part of them.

    Args:
        group: Process group, None for the default one.
        ranks: Global ranks of a part of the group. It gets a process group of its own when that is first
            used, on all ranks of the group at the same time.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int] | None = None) -> None:
        everyone = ranks or dist.get_process_group_ranks(group or dist.group.WORLD)
        super().__init__(list(everyone).index(dist.get_rank()), everyone)
        self._group, self._in_part = group, ranks is not None
        self._device = torch.device("cpu")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; the first use of one of some ranks is a collective of the whole group."""
        if self._in_part:
            with lost_ranks.reported("making of process groups of nodes", self._group):
                self._group, self._in_part = subgroup(self._group, self.ranks, self._device), False
        return self._group

    def message_device(self, device: torch.device) -> torch.device:
        backends = str(dist.get_backend_config(self._group)).split(",")
        if device.type == "cpu" or f"{device.type}:gloo" not in backends:
            self._device = device
        else:
            log_once(f"dct: gloo carries messages of {device} through the host; nccl would not")
        return self._device

    def open_transport(self, device: torch.device) -> Transport:
        transport = open_transport(self.group, device)
        lost_ranks.rejoin()
        return transport

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def state_failure(self, error: BaseException) -> None:
        lost_ranks.state_failure(error)

    def guard(self, what: str, step: int | None, failed: Callable[[], None]) -> AbstractContextManager[None]:
        group = self.group if self._in_part else self._group
        return lost_ranks.reported(what, group, step, failed)
