"""The traffic of the host framework: what its own collectives send, counted by their sizes.

Every collective that Python code starts goes through a method of ``ProcessGroup``. These methods are wrapped
while a job runs, and put back afterwards; a group takes no attributes of its own that could be wrapped in
their place. Collectives that C++ code or compiled graphs start are not seen,
but for DDP's broadcast of buffers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .metrics import HOST, PLUGIN, Metrics, Record

#: Bytes on the wire of one message of gloo besides its contents: three headers of its own, and the headers of
#: packets and acknowledgements. Measured with interface counters, for 2 and 4 ranks.
_GLOO_MESSAGE = 400


class _Operation(NamedTuple):
    """The bytes that an operation sends over a ring of ``P`` ranks, the mean of all ranks.

    Attributes:
        factor: Bytes sent for each byte of the input; of ``P``.
        gloo_messages: Messages that gloo sends; of ``P``.
        gloo_factor: ``factor`` on gloo, where it is another one.
    """

    factor: Callable[[int], float]
    gloo_messages: Callable[[int], float]
    gloo_factor: Callable[[int], float] | None = None


_OPERATIONS = {
    "all_reduce": _Operation(lambda p: 2 * (p - 1) / p, lambda p: max(4, 2 * (p - 1))),
    "all_gather": _Operation(lambda p: p - 1, lambda p: 2 * (p - 1)),
    # gloo sums everything on all ranks.
    "reduce_scatter": _Operation(
        lambda p: (p - 1) / p, lambda p: max(4, 2 * (p - 1)), lambda p: 2 * (p - 1) / p
    ),
    # gloo scatters the sums, then gathers them.
    "reduce": _Operation(lambda p: (p - 1) / p, lambda p: p - 1 / p, lambda p: (p - 1) / p * (1 + 1 / p)),
    "broadcast": _Operation(lambda p: (p - 1) / p, lambda p: (p - 1) / p),
    "gather": _Operation(lambda p: (p - 1) / p, lambda p: (p - 1) / p),
    "scatter": _Operation(lambda p: (p - 1) / p, lambda p: (p - 1) / p),
    "all_to_all": _Operation(lambda p: (p - 1) / p, lambda p: p - 1),
    "send": _Operation(lambda p: 1, lambda p: 1),
    "barrier": _Operation(lambda p: 0, lambda p: (p - 1).bit_length()),
}

#: Methods of a process group, by their operation.
_METHODS = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single",
        "all_gather_single_coalesced", "_allgather_base",
    ),
    "reduce_scatter": (
        "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced", "_reduce_scatter_base",
    ),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "gather": ("gather", "gather_single"),
    **{name: (name,) for name in ("reduce", "broadcast", "scatter", "send", "barrier")},
}  # fmt: skip
#: Operations whose methods take the output first, and then the input, whose tensors count.
_OUTPUT_FIRST = {"all_gather", "reduce_scatter", "gather", "all_to_all"}


@functools.lru_cache(maxsize=256)
def bytes_sent(operation: str, nbytes: float, ranks: int, *, gloo: bool) -> float:
    """Return the bytes that a rank sends, the mean of all ranks, without headers.

    Args:
        operation: ``all_reduce``, ``reduce_scatter``, ``all_gather`` or another name.
        nbytes: Bytes of a rank's input.
        ranks: Ranks of the group.
        gloo: Whether gloo carries them; otherwise they count as in a ring.
    """
    _, _, gloo_factor = found = _OPERATIONS[operation]
    return (gloo_factor if gloo and gloo_factor is not None else found.factor)(ranks) * nbytes


Count = Callable[[float], None]


class _OwnTraffic(threading.local):
    recorded: bool | None = None
    """True if the plugin records the running collective by itself; None: it is the host's."""
    count: Count | None = None
    """The function that counts the host's running collective."""


_own = _OwnTraffic()
_counts: dict[dist.ProcessGroup, Count] = {}


@contextmanager
def own_traffic(*, recorded: bool = True) -> Iterator[None]:
    """Surround collectives of the plugin; also a decorator.

    Args:
        recorded: Whether the plugin records them by itself. Otherwise they count as sent, and not as dense.
    """
    before, _own.recorded = _own.recorded, recorded
    try:
        yield
    finally:
        _own.recorded = before


@contextmanager
def counted_by(count: Count) -> Iterator[None]:
    """Call ``count(bytes)`` for every collective of the host inside the block; the innermost block counts."""
    before, _own.count = _own.count, count
    try:
        yield
    finally:
        _own.count = before


def count_group(group: dist.ProcessGroup, count: Count) -> Callable[[], None]:
    """Call ``count(bytes)`` for the host's collectives over a group, outside of :func:`counted_by`, too.

    Returns:
        A function that ends it.
    """
    _counts[group] = count

    def end() -> None:
        if _counts.get(group) == count:
            del _counts[group]

    return end


class HostTraffic:
    """Records the collectives of this process but for the plugin's own, within a ``with`` statement. Of
    several that are entered, the last one records.

    Args:
        metrics: Takes the records, of the classes ``host_all_reduce``, ``host_all_gather`` and so on, and
            ``plugin``.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __enter__(self) -> HostTraffic:
        for operation, methods in _METHODS.items():
            for name in methods:
                _wrap(dist.ProcessGroup, name, operation, int(operation in _OUTPUT_FIRST))
        # DDP asks the module for it: (group, tensors, bytes of a bucket, source).
        _wrap(dist, "_broadcast_coalesced", "broadcast", 0)
        _started.append(self)
        self._metrics.counts_host = True
        return self

    def __exit__(self, *error: object) -> None:
        _started.remove(self)
        # The last one puts everything back, but for what somebody else has wrapped since.
        for (owner, name), (original, ours) in () if _started else list(_wrapped.items()):
            if vars(owner)[name] is ours:
                setattr(owner, name, original)
                del _wrapped[owner, name]

    def record(self, operation: str, group: dist.ProcessGroup, tensors: Any, splits: Sequence[int]) -> None:
        """Record one collective.

        Args:
            operation: Its name.
            group: Group of ranks.
            tensors: The rank's input: a tensor, or lists of them.
            splits: Entries for each rank, where an all-to-all has unequal ones; also an array of numpy.
        """
        ranks = group.size()
        if operation == "all_to_all" and not isinstance(tensors, Tensor):
            splits = [tensor.numel() for tensor in tensors]
        flat = list(_tensors(tensors))
        gloo = all(tensor.device.type == "cpu" for tensor in flat)
        nbytes = float(sum(tensor.numel() * tensor.element_size() for tensor in flat))
        sent = bytes_sent(operation, nbytes, ranks, gloo=gloo)
        if total := sum(splits):
            sent = float(nbytes * (1 - splits[group.rank()] / total))
        if gloo:
            sent += _GLOO_MESSAGE * _OPERATIONS[operation].gloo_messages(ranks)
        numel = sum(tensor.numel() for tensor in flat)
        if _own.recorded is None:
            self._metrics.record(Record(f"{HOST}{operation}", sent, sent, numel))
            if (count := _own.count or _counts.get(group)) is not None:
                count(sent)
        else:
            self._metrics.record(Record(PLUGIN, 0, sent, numel))


_started: list[HostTraffic] = []
_wrapped: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""By owner and name: the function from before, and the one in its place."""


def _wrap(owner: Any, name: str, operation: str, position: int) -> None:
    original = getattr(owner, name, None)
    if original is None or (owner, name) in _wrapped:  # not in all versions of torch
        return

    @functools.wraps(original)
    def collective(group: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        if _started and not _own.recorded and group.size() > 1:
            tensors = arguments[position] if len(arguments) > position else ()
            splits = arguments[3] if operation == "all_to_all" and len(arguments) > 3 else ()
            _started[-1].record(operation, group, tensors, splits)
        return original(group, *arguments, **keywords)

    _wrapped[owner, name] = vars(owner)[name], collective  # what getattr returns would not bind the group
    setattr(owner, name, collective)


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor) and nested.is_sparse:
        yield from (nested._indices(), nested._values())
    elif isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for each in nested:
            yield from _tensors(each)
