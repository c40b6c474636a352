"""Exchanges of messages between the ranks of a process group.

A message of a size that only its sender knows is announced by a header with its size and a fingerprint of the
operation. So ranks that are out of step stop with an error instead of adding up each other's wrong tensors,
and a rank that fails can tell the others before it stops. :mod:`.transports` chooses how the bytes travel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DesyncError
from ..host_traffic import bytes_sent, own_traffic
from ..metrics import Record
from . import lost_ranks
from .base import Announced, Header, Transport
from .transports import GroupPeers, Peers

_FAILED = -1
_Result = TypeVar("_Result")


def _receive_buffers(messages: Sequence[Tensor], sizes: Sequence[int], rank: int) -> list[Tensor]:
    """Return an empty buffer for the message from every rank, and the own message in its place."""
    device = messages[rank].device
    return [
        messages[r] if r == rank else torch.empty(size, dtype=torch.uint8, device=device)
        for r, size in enumerate(sizes)
    ]


@dataclass
class AnnouncedMessages:
    """The messages of a group that were posted and not collected yet, oldest first.

    Args:
        world_size: Ranks of the group.
        transport: Returns the transport of the group.
        guard: Returns a context manager that makes of the transport's errors one that names ranks.

    Attributes:
        waited_ms: Milliseconds so far in which this rank's message was ready and another rank's was not.
        posts: Number of posts so far.
    """

    world_size: int
    transport: Callable[[], Transport]
    guard: Callable[[str], AbstractContextManager[None]]
    waited_ms: float = 0.0
    posts: int = 0
    _posted: deque[tuple[Announced, int]] = field(default_factory=deque)
    """Messages, and the time in nanoseconds at which this rank posted them."""
    _left: int = 0
    """Time at which the last exchange ended; 0 before the first."""
    _thread: threading.Thread | None = None

    def post(self, sizes: Sequence[int], fingerprint: int, messages: Sequence[Tensor] | None) -> None:
        """Announce messages of so many bytes to all ranks and start to send them."""
        at = time.perf_counter_ns()
        busy = at - self._left if self._left else 0
        announced = Announced([Header(size, fingerprint, busy) for size in sizes], messages)
        self._posted.append((announced, at))
        self.posts += 1
        with self.guard("exchange of sizes"):
            self.transport().post(announced)

    def fail(self, posts: int) -> None:
        """Tell all ranks, in place of the next so many messages, that this one failed; receive what the
        others send for what was posted, and forget it: they may be well, and go on.
        """
        failed = [_FAILED] * self.world_size
        if not self.transport().queues:
            for _ in range(posts):
                self.post(failed, 0, None)
            self.drain()
        elif posts or self._posted:  # the host would wait for ranks that may be in another call
            self.transport().queue_headers(Announced([Header(size, 0, 0) for size in failed], None))

    def receive_headers(self) -> tuple[Announced, list[Header]]:
        """Return the oldest messages that were posted, and the headers that came from all ranks for them."""
        (announced, at), entered = self._posted.popleft(), time.perf_counter_ns()
        with self.guard("exchange of sizes"):
            headers = self.transport().receive_headers(announced)
        # Ranks leave an exchange together: all wait for the one that has worked longest since then, from when
        # they come here. Their clocks need not agree.
        now = time.perf_counter_ns()
        if not self._posted:
            self._left = now
        busy = [header.busy for header in headers]
        if 0 not in busy:
            lateness = max(busy) - announced.headers[0].busy - (entered - at)
            self.waited_ms += max(0, min(lateness, now - entered)) / 1e6
        return announced, headers

    def receive_sizes(
        self, checked: Callable[[Sequence[Header], int], list[int]]
    ) -> tuple[Announced, list[int]]:
        """Return the oldest messages that were posted, and the sizes of all ranks' messages.

        Args:
            checked: Takes all headers and the own fingerprint, and returns the sizes. After its error all
                that others send is thrown away.
        """
        announced, headers = self.receive_headers()
        try:
            return announced, checked(headers, announced.headers[0].fingerprint)
        except DesyncError:
            self.discard([header.size for header in headers])
            raise

    def receive_messages(self, announced: Announced, sizes: Sequence[int]) -> list[Tensor]:
        """Return the messages of all ranks behind the headers that were received last."""
        assert announced.messages is not None
        with self.guard("exchange of messages"):
            transport = self.transport()
            received = _receive_buffers(announced.messages, sizes, transport.rank)
            transport.receive_messages(announced.messages, received, more=bool(self._posted))
        if not self._posted:
            self._left = time.perf_counter_ns()
        return received

    def discard(self, sizes: Sequence[int]) -> None:
        """Throw away the messages behind the last headers, and all that others send for what was posted."""
        if self.transport().queues:  # others may be gone, and the host would wait for them
            self.clear()
            return
        self.transport().discard(sizes)
        with suppress(RuntimeError):  # the first error is the one to report
            self.drain()

    def drain(self) -> None:
        """Receive what the others send for what was posted, and forget it: they may be well, and go on."""
        while self._posted:
            announced, headers = self.receive_headers()
            sizes = [header.size for header in headers]
            if announced.messages is None or min(sizes) < 0:  # then nobody receives it
                self.transport().discard(sizes)
            else:
                self.receive_messages(announced, sizes)

    def clear(self) -> None:
        """Forget what was posted."""
        self._posted.clear()

    def in_background(self, receivers: Sequence[Callable[[], _Result]]) -> list[Callable[[], _Result]]:
        """Let another thread receive what was posted. Nothing else uses the exchange until all results were
        taken.

        Args:
            receivers: Functions that receive the messages that were posted, in order.

        Returns: Functions that wait for the results of those, and return or raise them; none if the transport
            does not allow a thread.
        """
        if not self.transport().allows_threads:
            return []
        futures = [Future[_Result]() for _ in receivers]

        def work() -> None:
            for future, function in zip(futures, receivers, strict=True):
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        return [future.result for future in futures]

    @property
    def in_use(self) -> bool:
        """True while another thread receives messages."""
        return self._thread is not None and self._thread.is_alive()


class Staging:
    """Copies between the device of the messages and the one that the transport sends from.

    Where both are the same, nothing is copied.

    Args:
        rank: Position of this rank, whose messages to itself are never copied.
        device: Device of the messages.
        transport_device: Device that the transport sends from.
    """

    def __init__(self, rank: int, device: torch.device, transport_device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._transport_device = transport_device

    def to_send(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Return ``messages`` for the transport; a message that all ranks get is copied once."""
        if self._transport_device == self._device:
            return list(messages)
        copies = {id(m): m.to(self._transport_device) for r, m in enumerate(messages) if r != self._rank}
        empty = torch.empty(0, dtype=torch.uint8, device=self._transport_device)
        return [empty if r == self._rank else copies[id(m)] for r, m in enumerate(messages)]

    def on_transport(self, buffer: Tensor) -> AbstractContextManager[Tensor]:
        """Within the block, the transport may read and write ``buffer`` in what this gives."""
        same = self._transport_device == self._device
        return contextlib.nullcontext(buffer) if same else self._copied(buffer)

    @contextmanager
    def _copied(self, buffer: Tensor) -> Iterator[Tensor]:
        yield (copied := buffer.to(self._transport_device))
        buffer.copy_(copied)

    def received(self, received: Sequence[Tensor], own: Tensor) -> list[Tensor]:
        """Return the messages that were received, with this rank's own message to itself among them."""
        return [own if r == self._rank else m.to(self._device) for r, m in enumerate(received)]


#: Size and fingerprint from every rank.
_Headers = Sequence[Sequence[int]]
#: Differences of fingerprints below this are optimizer steps.
_STEPS = 1 << 20


def _refuse(exchange: Exchange, headers: _Headers, fingerprint: int, bounds: Sequence[int] | None) -> None:
    """Say what is wrong with headers, see :meth:`Exchange.checked_sizes`.

    Raises:
        DesyncError: Always.
    """
    ranks, step = exchange.peers.ranks, exchange.step
    own = f"rank {ranks[exchange.rank]}"
    if failed := [ranks[r] for r, header in enumerate(headers) if header[0] < 0]:
        at = "" if step is None else f" in step {step}"
        raise DesyncError(
            f"{own}: rank(s) {failed} failed while preparing this exchange{at}; see their own error "
            f"output{lost_ranks.found_lost()}"
        )
    apart = {
        ranks[r]: header[1] - fingerprint for r, header in enumerate(headers) if header[1] != fingerprint
    }
    if apart and max(map(abs, apart.values())) < _STEPS:
        named = ", ".join(f"rank {other} by {steps:+d}" for other, steps in apart.items())
        raise DesyncError(
            f"{own}: ranks have made different numbers of optimizer steps ({named}): a check of the loss or "
            "of gradients has kept one rank alone from its step; decide on all ranks"
        )
    if apart:
        raise DesyncError(
            f"{own}: rank(s) {list(apart)} are exchanging other tensors (names, sizes or order differ); "
            "every rank must reduce the same gradients in one order"
        )
    for sender, ((size, *_), bound) in enumerate(zip(headers, bounds or (), strict=True)):
        if size > bound:
            raise DesyncError(
                f"{own}: rank {ranks[sender]} announces a message of {size} bytes, where at most {bound} can "
                "be right"
            )


#: Header and fixed parts of a payload, and position and value of an entry, both with room to spare.
_FIXED_BYTES, _MOST_PER_ENTRY = 4096, 16


def most_bytes(entries: int) -> int:
    """Return a size that a payload of so many entries cannot reach, however it is encoded."""
    return _FIXED_BYTES + _MOST_PER_ENTRY * entries


class Exchange:
    """Messages between all ranks of one process group.

    Every method is a collective: all ranks of the group call it in the same order.
    Works on gloo with CPU tensors and on nccl with CUDA tensors. Where gloo carries CUDA tensors, messages go
    through the host.

    Args:
        group: Process group, None for the default one; or the ranks as another kind of :class:`~.Peers`.
        device: Device of the messages.
        ranks: Global ranks of a part of the group: only they exchange messages, over a process group of their
            own, which is made when it is first used, on all ranks of the group at the same time.

    Attributes:
        announced: The messages that were posted and not collected yet.
        step: Optimizer steps so far, for messages about lost ranks.
        other_bytes: Bytes that other ranks got so far by other ways than the transport.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Peers | None,
        device: torch.device,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.peers = group if isinstance(group, Peers) else GroupPeers(group, ranks)
        self.device = device
        self.world_size, self.rank = len(self.peers.ranks), self.peers.rank
        self.step: int | None = None
        self._transport_device = self.peers.message_device(device)
        self._staging = Staging(self.rank, device, self._transport_device)
        self.announced = AnnouncedMessages(self.world_size, self._open, self.guard)
        self._transport: Transport | None = None
        self._transport_failed = False
        self.other_bytes = 0

    def counters(self) -> tuple[int, float]:
        """Return the bytes that were handed to the transport so far, headers included, and the milliseconds
        in which this rank's message was ready and another rank's was not.
        """
        sent = 0 if self._transport is None else self._transport.sent_bytes
        return self.other_bytes + sent, self.announced.waited_ms

    def recorded(self, record: Record) -> AbstractContextManager[None]:
        """Add to a record what the block sends, and how long it waits."""
        return _Recorded(self, record)

    # -- messages of sizes that only their senders know ------------------------------------------------------

    def all_to_all(
        self, messages: Sequence[Tensor], fingerprint: int = 0, *, bounds: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Send ``messages[r]`` to rank ``r``; return what rank ``r`` sent to this one, at position ``r``.

        Args:
            messages: One 1-D uint8 tensor per rank of the group (may be empty). The own one is passed
                through.
            fingerprint: Non-negative 63-bit description of the operation, the same on every rank.
            bounds: Most bytes that the message of rank ``r`` can have, where the caller knows them.

        Raises:
            DesyncError: A rank reported a failure, is at another operation, announces more bytes than it can
                have, or was lost; names the ranks.
        """
        self.post(messages, fingerprint)
        return self.collect(messages[self.rank], bounds=bounds)

    def all_gather(self, message: Tensor, fingerprint: int = 0) -> list[Tensor]:
        """Send ``message`` (1-D uint8) to every rank; return all ranks' messages in rank order."""
        return self.all_to_all([message] * self.world_size, fingerprint)

    def post(self, messages: Sequence[Tensor], fingerprint: int = 0) -> None:
        """Start an :meth:`all_to_all`. Several may be posted before the first is collected. Their messages
        must not change until all are collected.
        """
        messages = self._staging.to_send(messages)
        self.announced.post([m.numel() for m in messages], fingerprint, messages)

    def collect(self, own: Tensor, *, bounds: Sequence[int] | None = None) -> list[Tensor]:
        """Complete the oldest :meth:`all_to_all` that was posted; ``own`` is this rank's message to itself.
        After an error nothing is posted any more.
        """
        announced, sizes = self.announced.receive_sizes(partial(self.checked_sizes, bounds=bounds))
        received = self.announced.receive_messages(announced, sizes)
        if self._open().queues:  # the caller reads them next
            with self.guard("exchange of messages"):
                lost_ranks.await_device(self.device, self.peers.group)
        return self._staging.received(received, own)

    def agree(self, fingerprint: int) -> None:
        """Make sure that every rank is at this operation; errors as of :meth:`all_to_all`."""
        self.announced.post([0] * self.world_size, fingerprint, None)
        self.announced.receive_sizes(self.checked_sizes)

    def checked_sizes(
        self, headers: _Headers, fingerprint: int, bounds: Sequence[int] | None = None
    ) -> list[int]:
        """Return the sizes of all ranks' messages.

        Args:
            headers: Size and fingerprint from every rank; what follows them is not read.
            fingerprint, bounds: See :meth:`all_to_all`, and so are the errors.
        """
        sizes = []
        for sender, header in enumerate(headers):
            size = header[0]
            if size < 0 or header[1] != fingerprint or (bounds is not None and size > bounds[sender]):
                _refuse(self, headers, fingerprint, bounds)
            sizes.append(size)
        return sizes

    # -- messages of known sizes, and dense tensors ----------------------------------------------------------

    def transfer(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Do an :meth:`all_to_all` where every rank knows that rank ``r`` sends it ``sizes[r]`` bytes."""
        sent = self._staging.to_send(messages)
        with self.guard("exchange of messages"):
            received = _receive_buffers(sent, sizes, self.rank)
            self._open().transfer(sent, received)
        return self._staging.received(received, messages[self.rank])

    def scatter_into(
        self, received: Tensor, sizes_from: Sequence[int], sent: Tensor, sizes_to: Sequence[int]
    ) -> None:
        """Send a part of ``sent`` to each rank and fill a part of ``received`` from each (1-D uint8), one
        behind the other in rank order; the own parts are empty.
        """
        with self._staging.on_transport(received) as arriving, self.guard("exchange of messages"):
            self._open().scatter(arriving, sizes_from, sent.to(arriving.device), sizes_to)

    def gather_into(self, received: Tensor) -> None:
        """Fill the parts of ``received`` (1-D uint8), all of one size, from the ranks; the own one is there
        already.
        """
        with self._staging.on_transport(received) as arriving, self.guard("exchange of messages"):
            self._open().gather(arriving)

    def reduce_scatter_into(self, mean: Tensor, parts: Tensor) -> None:
        """Fill ``mean`` with the mean over the ranks of row ``rank`` of their ``parts`` [ranks, entries]."""
        with self._staging.on_transport(mean) as arriving, self.guard("dense sum"):
            self._open().reduce_scatter(arriving, parts.to(arriving.device))

    @own_traffic()
    def all_reduce(self, tensor: Tensor) -> int:
        """Sum ``tensor`` over the ranks, in place and dense; return the bytes that count as sent."""
        with self.guard("dense all-reduce"):
            self.peers.all_reduce(tensor)
        nbytes = tensor.numel() * tensor.element_size()
        size = round(bytes_sent("all_reduce", nbytes, self.world_size, gloo=tensor.device.type == "cpu"))
        self.other_bytes += size
        return size

    def received(self, tensor: Tensor, what: str) -> Tensor:
        """Return a tensor that a collective makes, on the host.

        Args:
            tensor: On any device.
            what: The collective, in words.

        Raises:
            DesyncError: Names the ranks that failed, or that are lost.
        """
        with self.guard(what):
            return lost_ranks.received(tensor, self.peers.group)

    # -- failures --------------------------------------------------------------------------------------------

    def preparing(
        self, *, posts: int = 1, failed: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[Preparation]:
        """Surround the work that makes the messages of the next exchange. The other ranks, which may be
        waiting in the exchange already, are told of an error.

        Args:
            posts: Number of exchanges that are prepared here, which the block may change; it may have posted
                some when it fails. 0 where it collects what was posted: after an error the rest is received,
                and forgotten.
            failed: Called after an error, when the other ranks were told.
        """
        return Preparation(self, posts, failed)

    def abort(self, posts: int = 1) -> None:
        """Tell the ranks that wait in their next ``posts`` exchanges that this one failed. Never raises."""
        if self._transport_failed or self.announced.in_use:  # the others see that, or look for a statement
            return
        with contextlib.suppress(Exception):
            self.announced.fail(posts)
        self.announced.clear()

    def _open(self) -> Transport:
        if self._transport is None:
            self._transport = self.peers.open_transport(self._transport_device)
        return self._transport

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Surround work that waits for other ranks, see :class:`.lost_ranks.reported`."""
        return self.peers.guard(what, self.step, self._give_up)

    def _give_up(self) -> None:
        self._transport_failed = True
        self.announced.clear()


class _Recorded:
    """See :meth:`Exchange.recorded`; a class, since a generator takes three times as long."""

    __slots__ = ("_exchange", "_record", "_sent", "_waited")

    def __init__(self, exchange: Exchange, record: Record) -> None:
        self._exchange, self._record = exchange, record

    def __enter__(self) -> None:
        self._sent, self._waited = self._exchange.counters()

    def __exit__(self, *_: object) -> None:
        sent, waited = self._exchange.counters()
        self._record.sent_bytes += sent - self._sent
        self._record.waited_ms += waited - self._waited


class Preparation:
    """See :meth:`Exchange.preparing`."""

    __slots__ = ("_before", "_exchange", "_failed", "posts")

    def __init__(self, exchange: Exchange, posts: int, failed: Callable[[], None]) -> None:
        self._exchange, self.posts, self._failed = exchange, posts, failed

    def __enter__(self) -> Preparation:
        self._before = self._exchange.announced.posts
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._exchange.peers.state_failure(error)  # first: what follows may wait for the others
            self._exchange.abort(self.posts - (self._exchange.announced.posts - self._before))
            self._failed()
