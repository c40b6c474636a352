"""Count the host's work for a bucket on a GPU: launches of kernels, uploads, waits, and microseconds.

    python benchmarks/host_work.py

It runs anywhere. Kernels are not run: their launches are counted, and they leave plausible figures. Messages
go back to their sender, so one process stands for a rank of 2 to 64. Microseconds are those of the thread
that runs the backward pass on this machine's processor; the other columns do not depend on the machine. Calls
are those of functions, of Python and of C. torch is the number of its operations that are kernels or copies
on a GPU: neither views nor new memory. What stands in for kernels and for other ranks counts in no column.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dct_plugin.codecs.slots import WORDS
from dct_plugin.compression import feedback
from dct_plugin.config import DataParallelConfig, KernelConfig
from dct_plugin.data_parallel import GradientReducer, pending_exchanges
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.data_parallel.step_ahead.displaced_weights import Event
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.kernels import register_backend
from dct_plugin.kernels.triton import backend, batch, messages, step_ahead
from dct_plugin.transport.base import Announced, Header, Transport
from dct_plugin.transport.transports import Peers

#: The bucket of the table: 16.8 million entries in 8 tensors.
TENSORS, ENTRIES = 8, 1 << 21
_NBYTES, _KEPT = 200, 100


_Arguments = ParamSpec("_Arguments")
#: Seconds in functions that stand in for something else.
_stand_ins: list[float] = []


class Operations(TorchDispatchMode):
    """Counts torch's operations within its block, but while :attr:`away` is True."""

    count, away = 0, False

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        result = operation(*arguments, **(options or {}))
        nothing = isinstance(result, Tensor) and not result.numel()
        if not (self.away or nothing or operation.is_view or "empty" in str(operation)):
            self.count += 1
        return result


operations = Operations()


def stand_in(function: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Take the time and the calls of a function out of the measurement."""

    @wraps(function)
    def outside(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> None:
        began = time.thread_time()
        if profile := sys.getprofile():
            sys.setprofile(None)
        operations.away = True
        function(*arguments, **options)
        operations.away = False
        if profile:
            sys.setprofile(profile)
        _stand_ins.append(time.thread_time() - began)

    return outside


@stand_in
def _nothing() -> None:
    """Stand in for nothing."""


def _overhead() -> float:
    """Return the seconds that :func:`stand_in` itself takes."""
    count = 1000
    _stand_ins.clear()
    began = time.thread_time()
    for _ in range(count):
        _nothing()
    return (time.thread_time() - began - sum(_stand_ins)) / count


class LoopedTransport(Transport):
    """Gives every message back: what comes from a rank is what was sent to it."""

    def receive_headers(self, announced: Announced) -> list[Header]:
        return list(announced.headers)

    def receive_messages(self, messages: Sequence[Tensor], buffers: Sequence[Tensor], *, more: bool) -> None:
        LoopedTransport.transfer(self, messages, buffers)  # posted before: a derived class counts transfers

    @stand_in
    def transfer(self, messages: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for source, _ in self.peers:
            buffers[source].copy_(messages[source])

    @stand_in
    def scatter(
        self, received: Tensor, sizes_from: Sequence[int], sent: Tensor, sizes_to: Sequence[int]
    ) -> None:
        parts, messages = received.split([*sizes_from]), sent.split([*sizes_to])
        for source, _ in self.peers:
            parts[source].copy_(messages[source])

    @stand_in
    def gather(self, received: Tensor) -> None:
        parts = received.chunk(self.world_size)
        for source, _ in self.peers:
            parts[source].copy_(parts[self.rank])


class LoopedPeers(Peers):
    """Ranks of which this process is the first."""

    def message_device(self, device: torch.device) -> torch.device:
        return device

    def open_transport(self, device: torch.device) -> Transport:
        return LoopedTransport(self.rank, self.ranks)

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.mul_(len(self.ranks))

    def guard(self, what: str, step: int | None, failed: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the launches, by kernel, the uploads and the waits of the block, in which no kernel runs."""
    counts: Counter[str] = Counter()
    upload, read_figures = batch.upload, pending_exchanges.read_figures

    @stand_in
    def launch(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        name = kernel.fn.__name__
        counts[name] += 1
        if name == "settle":
            arguments[2].view(-1, 4)[:] = torch.tensor([_NBYTES, _KEPT, _KEPT, 0])
        elif name == "kth_largest":
            arguments[2].fill_(1.0)
        elif name == "open_messages":
            buffer, table, heads, bounds_at = arguments[0], arguments[1], arguments[3], arguments[4]
            firsts = table[bounds_at:].view(-1, 3)[:, :1] // 8 + torch.arange(WORDS)
            heads.copy_(buffer.view(torch.int64)[firsts] if constants["SLOTS"] else torch.zeros(()))
        elif name == "fill_slots":
            places, buffer, _, slots, fingerprint = arguments[0].view(-1, 4).tolist(), *arguments[1:5]
            for first, parts, begin, _ in places[:slots]:
                payloads = places[slots + first :][:parts]
                nbytes = sum(ctypes.c_int64.from_address(figures).value for _, _, figures, _ in payloads)
                head = torch.tensor([nbytes, fingerprint, 0, 0])
                ctypes.memmove(buffer.data_ptr() + begin, head.data_ptr(), 8 * WORDS)

    def counted_upload(table: Any, where: torch.device) -> Tensor:
        counts["uploads"] += 1
        return upload(table, where)

    def counted_read(*arguments: Any) -> Any:
        counts["waits"] += 1
        return read_figures(*arguments)

    def beside(residual: feedback.Residual) -> tuple[Tensor, Tensor]:
        residual._beside = True  # as on a GPU
        return begin(residual)

    begin = feedback.Residual.begin
    patches = [
        mock.patch.object(feedback.Residual, "begin", beside),
        *(mock.patch.object(module, "launch", launch) for module in (backend, batch, messages, step_ahead)),
        *(mock.patch.object(module, "upload", counted_upload) for module in (batch, messages, step_ahead)),
        mock.patch.object(pending_exchanges, "read_figures", counted_read),
    ]
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in patches:
            patch.stop()


class HostWork(NamedTuple):
    """The host's work for a bucket in one step."""

    launches: int
    torch: int
    uploads: int
    waits: int
    calls: int
    microseconds: float
    kernels: Counter[str]


def keep_memory() -> None:
    """Keep memory that was freed, as a GPU's allocator does; else the system is called for residuals."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    for option in (-3, -1) if mallopt else ():  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(option, 2**30)


def reducer_of(ranks: int, **settings: Any) -> GradientReducer:
    """Return a reducer of the first of so many ranks."""
    register_backend("counted", backend.TritonBackend)
    config = DataParallelConfig(sparsity=0.99, **settings)
    return GradientReducer(config, LoopedPeers(0, range(ranks)), kernels=KernelConfig(backend="counted"))


def _measured(step: Callable[[], None], steps: int) -> HostWork:
    """Return the work of a step that repeats."""
    taken, found, overhead = [], Counter[str](), _overhead()
    with counted() as counts:
        for _ in range(3):  # the first exchanges lengths
            step()
        for _ in range(steps):
            counts.clear()
            _stand_ins.clear()
            began = time.thread_time()
            step()
            elsewhere = sum(_stand_ins) + overhead * len(_stand_ins)
            taken.append(1e6 * (time.thread_time() - began - elsewhere))
            found = counts.copy()
        events = Counter[str]()

        def note(frame: Any, event: str, argument: Any) -> None:
            events[event] += 1

        sys.setprofile(note)
        step()
        sys.setprofile(None)
        operations.count = 0
        with operations:
            step()
    kernels = found.copy()
    uploads, waits = kernels.pop("uploads", 0), kernels.pop("waits", 0)
    calls = events["call"] + events["c_call"]
    numbers = kernels.total(), operations.count, uploads, waits, calls
    return HostWork(*numbers, statistics.median(taken), kernels)


def bucket(
    ranks: int, exchange: str, *, entries: int = ENTRIES, steps: int = 25, threshold: str = "fixed"
) -> HostWork:
    """Return the work for one bucket."""
    reducer = reducer_of(
        ranks, exchange=exchange, feedback="local", warmup_steps=0, expert={"threshold": threshold}
    )
    gradients = [(f"layer {i}", torch.zeros(entries)) for i in range(TENSORS)]

    def step() -> None:
        reducer.begin(gradients).finish()
        reducer.finish()
        reducer.end_step()

    return _measured(step, steps)


def displacement(tensors: int = 200, *, width: int = 64, steps: int = 5) -> HostWork:
    """Return the work for a step of AdamW with step-ahead: moments, displaced weights, and a bucket."""
    reducer = reducer_of(2, feedback="step_ahead", warmup_steps=0)
    weights = [(f"layer {i}", nn.Parameter(torch.zeros(width, width))) for i in range(tensors)]
    optimizer = torch.optim.AdamW([weight for _, weight in weights])
    ahead = reducer.add_ons.step_ahead.prepare(weights, units_of(optimizer))
    gradients = [(name, torch.zeros(width * width)) for name, _ in weights]

    def step() -> None:
        ahead.displace()
        ahead._displaced.on(Event.BACKWARD_ENDS)
        reducer.begin(gradients).finish()
        reducer.finish()
        reducer.end_step()

    return _measured(step, steps)


def exact_updates(ranks: int, *, entries: int = ENTRIES, steps: int = 5) -> HostWork:
    """Return the work for exact updates of bf16 weights, of which the ranks own equal parts."""
    register_backend("counted", backend.TritonBackend)
    config = DataParallelConfig(parameters="exact")
    updates = ParameterUpdates(config, LoopedPeers(0, range(ranks)), kernels=KernelConfig(backend="counted"))
    before = torch.zeros(entries // ranks, dtype=torch.bfloat16)
    shards = shards_in(0, entries, entries // ranks)
    weights = [(f"bucket {i}", torch.zeros(entries, dtype=torch.bfloat16), shards) for i in range(TENSORS)]

    def step() -> None:
        updates.update(weights, lambda name: before)
        updates.end_step()

    return _measured(step, steps)


ROWS: dict[str, Callable[..., HostWork]] = {
    **{
        f"{ranks} ranks, {exchange}": partial(bucket, ranks, exchange)
        for ranks in (2, 8, 64)
        for exchange in ("direct", "two_phase")
    },
    "2 ranks, direct, sampled thresholds": partial(bucket, 2, "direct", threshold="sample"),
    "step-ahead with AdamW, 200 tensors": displacement,
    **{f"{ranks} ranks, exact updates": partial(exact_updates, ranks) for ranks in (2, 8)},
}


def main() -> None:
    """Print the table."""
    keep_memory()
    table = Table("bucket of 16.8M entries", "host, us", "calls", "launches", "torch", "uploads", "waits")
    for name, measure in ROWS.items():
        work = measure()
        table.add_row(name, f"{work.microseconds:.0f}", str(work.calls), *map(str, work[:4]))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
