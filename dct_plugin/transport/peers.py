"""The ranks that exchange messages: their numbers, and the means to reach them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from . import lost_ranks
from .base import Transport
from .transports import message_device, open_transport, subgroup


class Peers(ABC):
    """The ranks that exchange messages.

    Args:
        rank: Position of this process.
        ranks: Number by which messages name the rank of each position.
    """

    group: dist.ProcessGroup | None = None
    """The process group of ``torch.distributed`` of these ranks; None if there is none."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, list(ranks)

    @abstractmethod
    def message_device(self, device: torch.device) -> torch.device:
        """Return where a message of ``device`` has to lie to be sent."""

    @abstractmethod
    def open_transport(self, device: torch.device) -> Transport:
        """Return a transport of messages that lie on ``device``; a collective."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place and dense; a collective."""

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

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; the first use of one of some ranks is a collective of the whole group."""
        if self._in_part:
            self._group, self._in_part = subgroup(self._group, self.ranks), False
        return self._group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._in_part = group, False

    def message_device(self, device: torch.device) -> torch.device:
        return message_device(self._group, device)

    def open_transport(self, device: torch.device) -> Transport:
        transport = open_transport(self.group, device)
        lost_ranks.rejoin()
        return transport

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def guard(self, what: str, step: int | None, failed: Callable[[], None]) -> AbstractContextManager[None]:
        return lost_ranks.reported(what, self.group, step, failed)
