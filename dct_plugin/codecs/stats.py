"""Figures of a compression. Those of an accelerator stay there until many are read at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import PayloadError
from .copies import to_host

#: What compiled kernels find wrong with a payload, by number; those of a device find no other.
KERNEL_ERRORS = {
    1: "payload checksum is wrong: corrupted in transit or in memory",
    2: "value section holds a non-finite value, or one that no encoder writes",
    3: "value section holds scales that no encoder writes",
    4: "index section holds an index outside the tensor",
    5: "index section does not hold as many entries as the header says",
    6: "block16 offsets are not ascending",
    7: "header is damaged, or does not fit the tensor or the message",
}


class Stats:
    """Statistics of one compression.

    An accelerator's backend returns :meth:`on_device` without waiting for its kernel. Asking for a figure
    then reads this compression's, one device-to-host copy; :func:`read_stats` reads those of many in one.

    Args:
        nbytes: size of the payload, bytes.
        nnz: entries sent.
        above: entries with ``|acc| >= tau`` before the capacity limit.
        nonfinite: the input held a non-finite entry (or one of magnitude 2**126 or more); nothing was sent or
            changed.
        tau: threshold that was applied; 0: none, every entry was sent.
        select_ns: time of finite check + accumulate + select, nanoseconds; 0 if unknown.
        encode_ns: time of writing the payload, nanoseconds; 0 if unknown.
    """

    __slots__ = ("_counts", "_device_counts", "_launch", "_tau", "encode_ns", "select_ns")

    def __init__(
        self,
        nbytes: int,
        nnz: int,
        above: int,
        nonfinite: bool,
        *,
        tau: float = 0.0,
        select_ns: int = 0,
        encode_ns: int = 0,
    ) -> None:
        self._counts = (nbytes, nnz, above, nonfinite)
        self._tau: float | Tensor = tau
        self._device_counts: Tensor | None = None
        self._launch: Callable[[], None] | None = None
        self.select_ns = select_ns
        self.encode_ns = encode_ns

    @classmethod
    def on_device(
        cls, counts: Tensor, *, tau: float | Tensor = 0.0, launch: Callable[[], None] | None = None
    ) -> Stats:
        """Return figures that a kernel writes or has written. Nobody may overwrite them before they are read.

        Args:
            counts: int64 [4]: nbytes, nnz, above, and nonfinite + 2 * what was wrong with a payload that was
                decoded before (:data:`KERNEL_ERRORS`; 0: nothing).
            tau: on the host, or fp32 [] on the device of ``counts``.
            launch: starts the kernel, if that has not been done; called before the figures are read.
        """
        stats = cls(0, 0, 0, False)
        stats._device_counts, stats._tau, stats._launch = counts, tau, launch
        return stats

    @property
    def pending(self) -> bool:
        """True if the figures have not been read from the device yet."""
        return self._device_counts is not None

    @property
    def device_counts(self) -> Tensor:
        """The pending figures, int64 [4], see :meth:`on_device`."""
        assert self._device_counts is not None
        return self._device_counts

    @property
    def counts(self) -> tuple[int, int, int, bool]:
        """``(nbytes, nnz, above, nonfinite)``."""
        if self._device_counts is not None:
            read_stats([self])
        return self._counts

    @property
    def nbytes(self) -> int:
        return self.counts[0]

    @property
    def nnz(self) -> int:
        return self.counts[1]

    @property
    def above(self) -> int:
        return self.counts[2]

    @property
    def nonfinite(self) -> bool:
        return self.counts[3]

    @property
    def tau(self) -> float:
        if self._device_counts is not None:
            read_stats([self])
        assert isinstance(self._tau, float)
        return self._tau

    def __repr__(self) -> str:
        if self.pending:
            return "Stats(pending)"
        nbytes, nnz, above, nonfinite = self._counts
        return f"Stats({nbytes=}, {nnz=}, {above=}, {nonfinite=}, tau={self._tau})"


def read_stats(stats: Iterable[Stats]) -> list[Stats]:
    """Read statistics that are still on a device, in one device-to-host copy per device.

    Returns:
        the same objects, whose statistics are now on the host.
    Raises:
        PayloadError: a payload that was decoded on the device since the last read was not valid; nothing
            of it was added.
    """
    stats = list(stats)
    if any(each._device_counts is not None for each in stats):
        read_figures(stats, ())
    return stats


def read_figures(stats: Iterable[Stats], also: Sequence[Tensor]) -> list[list[int]]:
    """Do what :func:`read_stats` does; return what ``also`` holds, int64 [any] each, read in the same
    copy.
    """
    parts: dict[torch.device, list[Tensor]] = {}
    pending: dict[torch.device, list[Stats]] = {}
    for each in stats:
        if each._device_counts is not None:
            if each._launch is not None:
                each._launch()
            pending.setdefault(each._device_counts.device, []).append(each)
    for where, group in pending.items():
        # Bits of thresholds travel along.
        taus = [each._tau for each in group if isinstance(each._tau, Tensor)]
        bits = [torch.stack(taus).view(torch.int32).to(torch.int64)] if taus else []
        parts[where] = [*(each.device_counts for each in group), *bits]
    for tensor in also:
        parts.setdefault(tensor.device, []).append(tensor.view(-1))
    found = {where: iter(to_host(torch.cat(several)).tolist()) for where, several in parts.items()}
    wrong = 0
    for where, group in pending.items():
        numbers = found[where]
        for each in group:
            nbytes, nnz, above, flags = itertools.islice(numbers, 4)
            each._counts, each._device_counts = (nbytes, nnz, above, bool(flags & 1)), None
            each._launch = None
            wrong = wrong or flags >> 1
        with_tau = [each for each in group if isinstance(each._tau, Tensor)]
        taus_read = torch.tensor(list(itertools.islice(numbers, len(with_tau))), dtype=torch.int32)
        for each, tau in zip(with_tau, taus_read.view(torch.float32).tolist(), strict=True):
            each._tau = tau
    if wrong:
        raise PayloadError(f"a payload decoded before: {KERNEL_ERRORS[wrong]}")
    return [list(itertools.islice(found[tensor.device], tensor.numel())) for tensor in also]
