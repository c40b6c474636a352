"""Process groups whose ranks are threads of one process, and whose messages travel in memory.

The library runs in these threads as it does in processes, from its reducers to the announcements of messages.
Only the transport is another one. One thread runs at a time, until it waits for the others: so results do not
depend on the scheduler, and many ranks cost one core no more than their own work.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from dct_plugin.transport import transports
from dct_plugin.transport.base import HEADER, Announced, Header, Transport

#: Name of the backend.
BACKEND = "threads"
#: Held by the thread that runs; the others wait on it.
TURN = threading.Condition()


class Rounds:
    """Values that the ranks of one group give each other, round by round.

    Args:
        count: Number of ranks.
    """

    #: The error that ended a rank, for those that wait for it.
    error: BaseException | None = None

    def __init__(self, count: int) -> None:
        self._count = count
        self._given: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._taken: defaultdict[int, int] = defaultdict(int)
        self._at_give, self._at_take = [0] * count, [0] * count

    def give(self, rank: int, value: Any) -> None:
        """Give the ranks a value in the next round; several may be given before the first is taken."""
        values = self._given[self._at_give[rank]]
        self._at_give[rank] += 1
        values[rank] = value
        if len(values) == self._count:
            with TURN:
                TURN.notify_all()

    def take(self, rank: int) -> list[Any]:
        """Return the values of all ranks in the next round, once all have given theirs."""
        number = self._at_take[rank]
        self._at_take[rank] += 1
        values = self._given[number]
        with TURN:
            TURN.wait_for(lambda: len(values) == self._count or Rounds.error is not None)
        if len(values) < self._count:
            raise RuntimeError("another rank has failed")
        self._taken[number] += 1
        if self._taken[number] == self._count:
            del self._given[number], self._taken[number]
        return [values[other] for other in range(self._count)]


class ThreadGroup(dist.ProcessGroup):
    """The process group of one thread, with the collectives that the library uses.

    Args:
        rank, size: Position in the group, and its ranks.
        channels: Rounds of the group's ranks by name, shared by all of them.
    """

    def __init__(self, rank: int, size: int, channels: dict[str, Rounds]) -> None:
        super().__init__(rank, size)
        self._position, self._channels, self._opened = rank, channels, 0
        self.channel("sums")

    def channel(self, name: str = "") -> Rounds:
        """Return rounds of this group; without a name, the next ones, which every rank asks for in turn."""
        if not name:
            self._opened += 1
            name = str(self._opened)
        return self._channels.setdefault(name, Rounds(self.size()))

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return what all ranks give, in their order; a collective."""
        rounds = self.channel(name)
        rounds.give(self._position, value)
        return rounds.take(self._position)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        """Sum in the order of the ranks, or take the greatest."""
        (tensor,) = tensors
        values = self.gather("sums", tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(values[0])
            greatest = options is not None and options.reduceOp == dist.ReduceOp.MAX
            for other in values[1:]:
                torch.maximum(tensor, other, out=tensor) if greatest else tensor.add_(other)
        done = torch.futures.Future[list[Tensor]]()
        done.set_result(list(tensors))
        return torch._C._distributed_c10d._create_work_from_future(done)

    def getBackendName(self) -> str:
        """Return the name by which torch knows the backend."""
        return BACKEND


class MemoryTransport(Transport):
    """A transport of messages between threads.

    Args:
        rank, ranks, group: See :class:`~dct_plugin.transport.base.Transport`.

    Attributes:
        posted: Messages that each rank has sent to others so far.
    """

    posted: ClassVar[Counter[int]] = Counter()

    def __init__(self, rank: int, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        super().__init__(rank, ranks, group)
        threads = group if group is not None else dist.group.WORLD
        assert isinstance(threads, ThreadGroup)
        self._rounds = threads.channel()
        self._received: list[tuple[Sequence[Header], list[Tensor]]] = []

    def post(self, announced: Announced) -> None:
        messages = announced.messages or []
        # The sender writes its next messages into the same memory.
        copies = {id(message): message.clone() for message in messages}
        self._rounds.give(self.rank, (announced.headers, [copies[id(message)] for message in messages]))
        self._count(messages, HEADER.size)

    def receive_headers(self, announced: Announced) -> list[Header]:
        self._received = self._rounds.take(self.rank)
        return [headers[self.rank] for headers, _ in self._received]

    def receive_messages(self, messages: Sequence[Tensor], buffers: Sequence[Tensor], *, more: bool) -> None:
        for source, _ in self.peers:
            buffers[source].copy_(self._received[source][1][self.rank])

    def transfer(self, messages: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self._rounds.give(self.rank, [message.clone() for message in messages])
        for other, sent in enumerate(self._rounds.take(self.rank)):
            if other != self.rank:
                buffers[other].copy_(sent[self.rank])
        self._count(messages, 0)

    def _count(self, messages: Sequence[Tensor], header: int) -> None:
        others = [message.numel() for to, message in enumerate(messages) if to != self.rank]
        self.sent_bytes += header * (self.world_size - 1) + sum(others)
        self.posted[dist.get_rank()] += sum(nbytes > 0 for nbytes in others)


def gather(value: Any) -> list[Any]:
    """Return what all ranks give, in their order, also where they are processes; a collective."""
    if isinstance(dist.group.WORLD, ThreadGroup):
        return dist.group.WORLD.gather("values", value)
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def apart() -> Iterator[None]:
    """Let other threads run while the block waits for them by means of torch, which makes process groups."""
    threads = isinstance(dist.group.WORLD, ThreadGroup)
    if threads:
        TURN.release()
    try:
        yield
    finally:
        if threads:
            TURN.acquire()


def _open_transport(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """Take the place of ``transports.open_transport``: the ranks of every group are threads."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return MemoryTransport(dist.get_rank(group), ranks, group)


def run(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what ``function(rank)`` returns for each of ``count`` ranks, in a process group of theirs.

    The first error that ends a rank ends all, and is raised.
    """
    groups: dict[tuple[int, ...], dict[str, Rounds]] = defaultdict(dict)

    def make(options: Any, _: Any) -> ThreadGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(count))
        return ThreadGroup(options.group_rank, options.group_size, groups[ranks])

    def rank_thread(rank: int) -> Any:
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=count)
        try:
            with TURN:
                return function(rank)
        except BaseException as error:
            with TURN:
                Rounds.error = Rounds.error or error
                TURN.notify_all()
            raise
        finally:
            dist.destroy_process_group()

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    store, Rounds.error = dist.HashStore(), None
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with (
            patch.object(transports, "open_transport", _open_transport),
            ThreadPoolExecutor(count) as pool,
        ):
            results = [pool.submit(rank_thread, rank) for rank in range(count)]
        if Rounds.error is not None:
            raise Rounds.error
        return [each.result() for each in results]
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
