"""Figures of a compression. Those of an accelerator stay there until many are read at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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
    6: "index section holds positions that do not ascend",
    7: "header is damaged, or does not fit the tensor or the message",
}


class Figures:
    """Figures that a kernel writes, of any number of payloads; they are read together.

    Attributes:
        counts: int64 [4 * payloads]: nbytes, nnz, above, and nonfinite + 2 * what was wrong with a payload
            that was decoded before (:data:`KERNEL_ERRORS`; 0: nothing). Nobody may overwrite them before they
            are read. Empty before the kernel was started.
        read: They on the host, four numbers for each payload, once they were read.
    """

    __slots__ = ("_launch", "counts", "read")

    def __init__(self, counts: Tensor, launch: Callable[[], None] | None = None) -> None:
        self.counts, self._launch = counts, launch
        self.read: list[int] = []

    def start(self) -> Tensor:
        """Start the kernel, if that has not been done; return :attr:`counts`."""
        if self._launch is not None:
            self._launch()
        return self.counts

    def started(self, counts: Tensor) -> None:
        """Note that the kernel is started, which writes ``counts``."""
        self.counts, self._launch = counts, None


class Stats:
    """Statistics of one compression: of one payload, or of all parts of a tensor together.

    An accelerator's backend returns :meth:`on_device` without waiting for its kernel. Asking for a figure
    then reads this compression's, one device-to-host copy; :func:`read_stats` reads those of many in one.

    Args:
        nbytes: size of the payload, bytes.
        nnz: entries sent.
        above: entries with ``|acc| >= tau`` before the capacity limit.
        nonfinite: the input held a non-finite entry (or one of magnitude 2**126 or more); nothing was sent or
            changed.
        tau: threshold that was applied; 0: none, every entry was sent.
        ns: nanoseconds of finite check, accumulation and selection, and of writing the payload; 0 if unknown.
        sizes: those of several payloads, if the figures are sums.
    """

    __slots__ = ("_counts", "_figures", "_numbers", "_sizes", "_tau", "encode_ns", "select_ns")

    def __init__(
        self,
        nbytes: int,
        nnz: int,
        above: int,
        nonfinite: bool,
        *,
        tau: float = 0.0,
        ns: tuple[int, int] = (0, 0),
        sizes: list[int] | None = None,
    ) -> None:
        self._counts = (nbytes, nnz, above, nonfinite)
        self._tau: float | Tensor = tau
        self._figures: Figures | None = None
        self._sizes, self._numbers = [nbytes] if sizes is None else sizes, (0, 4)
        self.select_ns, self.encode_ns = ns

    @classmethod
    def on_device(cls, figures: Figures, at: int = 0, count: int = 1, *, tau: float | Tensor = 0.0) -> Stats:
        """Return the figures of payloads that a kernel writes or has written.

        Args:
            figures: Those of several payloads.
            at, count: The first of them, and how many.
            tau: on the host, or fp32 [] on the device of the figures.
        """
        stats = cls.__new__(cls)
        stats._figures, stats._numbers, stats._tau = figures, (4 * at, 4 * (at + count)), tau
        stats.select_ns = stats.encode_ns = 0
        return stats

    @property
    def pending(self) -> bool:
        """True if the figures have not been read from the device yet."""
        return self._figures is not None and not self._figures.read

    @property
    def device_counts(self) -> Tensor:
        """The figures of the first payload on the device, int64 [4], see :class:`Figures`."""
        assert self._figures is not None
        return self._figures.start()[self._numbers[0] :][:4]

    @property
    def address(self) -> int:
        """The address of :attr:`device_counts`; those of the next payload lie 32 bytes behind."""
        assert self._figures is not None
        return self._figures.start().data_ptr() + 8 * self._numbers[0]

    @property
    def counts(self) -> tuple[int, int, int, bool]:
        """``(nbytes, nnz, above, nonfinite)``."""
        if self._figures is not None:
            if not self._figures.read:
                read_stats([self])
            begin, end = self._numbers
            found = self._figures.read[begin:end]
            self._sizes = found[::4]
            nbytes, nnz, above, flags = found if end == begin + 4 else _sums(found)
            self._counts = (nbytes, nnz, above, flags & 1 == 1)
            self._figures = None
        return self._counts

    def totals(self) -> Totals:
        """Return the figures on the host."""
        if self._figures is None and isinstance(self._tau, float):
            return Totals(*self._counts, self._tau)
        return Totals(*self.counts, self.tau)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each payload."""
        if self._figures is not None:
            _ = self.counts  # reads them
        return self._sizes

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
        if isinstance(self._tau, Tensor):
            read_stats([self])
        assert isinstance(self._tau, float)
        return self._tau


def _sums(found: list[int]) -> tuple[int, int, int, int]:
    """Return the sums of figures, and whether one is flagged."""
    nonfinite = 1 in [flags & 1 for flags in found[3::4]]
    return sum(found[::4]), sum(found[1::4]), sum(found[2::4]), int(nonfinite)


class Totals(NamedTuple):
    """Figures on the host, see :class:`Stats`."""

    nbytes: int
    nnz: int
    above: int
    nonfinite: bool
    tau: float


def read_stats(stats: Iterable[Stats]) -> list[Stats]:
    """Read statistics that are still on a device, in one device-to-host copy.

    Returns:
        the same objects, whose statistics are now on the host.
    Raises:
        PayloadError: a payload that was decoded on the device since the last read was not valid; nothing
            of it was added.
    """
    stats = list(stats)
    if any(each._figures is not None or isinstance(each._tau, Tensor) for each in stats):
        read_figures(stats, ())
    return stats


def read_figures(stats: Iterable[Stats], also: Sequence[Tensor]) -> list[list[int]]:
    """Do what :func:`read_stats` does; return what ``also`` holds, int64 [any] each on the same device, read
    in the same copy.
    """
    stats = list(stats)
    tables = {id(f): f for each in stats if (f := each._figures) is not None and not f.read}.values()
    taus = {id(each._tau): each._tau for each in stats if isinstance(each._tau, Tensor)}
    parts = [table.start() for table in tables]
    if taus:  # their bits travel along
        parts.append(torch.stack([*taus.values()]).view(torch.int32).to(torch.int64))
    parts += [tensor.reshape(-1) for tensor in also]
    found = iter(to_host(torch.cat(parts)).tolist() if parts else ())
    wrong = 0
    for table in tables:
        table.read = list(itertools.islice(found, table.counts.numel()))
        wrong = wrong or max(table.read[3::4], default=0) >> 1
    if taus:
        bits = torch.tensor([*itertools.islice(found, len(taus))], dtype=torch.int32, device="cpu")
        known = dict(zip(taus, bits.view(torch.float32).tolist(), strict=True))
        for each in stats:
            if isinstance(each._tau, Tensor):
                each._tau = known[id(each._tau)]
    if wrong:
        raise PayloadError(f"a payload decoded before: {KERNEL_ERRORS[wrong]}")
    return [list(itertools.islice(found, tensor.numel())) for tensor in also]
