"""Messages of sizes that only their senders know: each is announced by a header with its size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import DesyncError
from .base import Announced, Header, Transport

_FAILED = -1


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
            received = self.transport().receive_messages(announced.messages, sizes, more=bool(self._posted))
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
