"""Copies between the host and a device that make nobody wait for more than they need."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, through pinned memory and a stream of its own. Work that is queued behind
    the tensor is not waited for.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    copied = start_to_host(tensor)
    _reader(tensor.device).synchronize()  # which torch's debug mode for synchronisation counts
    return copied()


def start_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start a copy of the tensor as it is now; the function that is returned waits for it."""
    if not tensor.is_cuda:
        copy = tensor.detach().to("cpu", copy=True)
        return lambda: copy
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    stream = _reader(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        pinned.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(stream)
        there = stream.record_event()

    def copied() -> Tensor:
        there.synchronize()
        return pinned

    return copied


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device, through pinned memory: nobody waits for the copy."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class SideStream:
    """A stream for work that the current one does not wait for. Devices without streams do it at once.

    Args:
        priority: -1 for work that is to go first.
    """

    def __init__(self, priority: int = 0) -> None:
        self._priority = priority
        self._own: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def queue(self, *used: Tensor, device: torch.device | None = None) -> Iterator[None]:
        """Queue the work of the block behind all work of the current stream so far.

        Args:
            used: Tensors that the block reads and that may be freed before it has run.
            device: The device, if there are none.
        """
        where = device or used[0].device
        if where.type != "cuda":
            yield
            return
        if self._own is None:
            self._own = torch.cuda.Stream(where, priority=self._priority)
        self._own.wait_stream(torch.cuda.current_stream(where))
        with torch.cuda.stream(self._own):
            yield
        for tensor in used:
            tensor.record_stream(self._own)

    def join(self) -> None:
        """Let the current stream wait for what was queued."""
        if self._own is not None:
            torch.cuda.current_stream(self._own.device).wait_stream(self._own)


class Stopwatch:
    """Adds up the times of blocks: on a CPU by its clock, on a device by events of the current stream, since
    there the block only queues its work.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_queued = device.type == "cuda"
        self._marks: list[Any] = []
        self._total = 0.0

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def seconds(self) -> float:
        """Return the seconds of all blocks so far; waits for them."""
        marks, self._marks = self._marks, []
        for began, ended in zip(marks[::2], marks[1::2], strict=True):
            if self._is_queued:
                ended.synchronize()
                self._total += 1e-3 * began.elapsed_time(ended)
            else:
                self._total += ended - began
        return self._total

    def _mark(self) -> None:
        mark: Any = time.perf_counter()
        if self._is_queued:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append(mark)


class Mirror:
    """The content of a device's tensor on the host. It is copied only after the tensor was written or
    replaced.
    """

    def __init__(self) -> None:
        self._seen: tuple[Tensor, int] | None = None
        self._copy: Callable[[], Tensor] = lambda: torch.empty(0)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of a module begin without a copy."""
        return Mirror, ()

    def begin(self, tensor: Tensor) -> None:
        """Start to copy the content of the tensor, if it is not known."""
        if not self._knows(tensor):
            self.keep(tensor, start_to_host(tensor))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the content of the tensor; it must not be written."""
        if not self._knows(tensor):
            copy = to_host(tensor) if tensor.is_cuda else tensor.detach().to("cpu", copy=True)
            self.keep(tensor, lambda: copy)
        return self._copy()

    def _knows(self, tensor: Tensor) -> bool:
        seen = self._seen
        return seen is not None and seen[0] is tensor and seen[1] == tensor._version

    def keep(self, tensor: Tensor, copy: Callable[[], Tensor]) -> None:
        """Note that the tensor holds what ``copy()`` returns."""
        self._seen, self._copy = (tensor, tensor._version), copy


@functools.cache
def _reader(where: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(where)
