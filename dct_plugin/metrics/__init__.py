"""Metrics of what crossed, how much of it, and how long it took: per tensor class, per step, and per run.

A tensor class is a free string (``gradient``, ``gradient_small``, ``activation``, ...). ``class/layer``
is one layer's share of what crossed as ``class``, and is left out of the totals; ``class/tensor/name`` is
that of one tensor.  The data path calls :meth:`Metrics.record` for every message and :meth:`Metrics.step`
once per optimizer step; every ``every`` steps a report goes to the JSON lines file, to TensorBoard and to the
sinks of the host framework's monitor.  :meth:`Metrics.event` writes what happens beside these: losses,
decisions.
"""

from __future__ import annotations

import math
import operator
import statistics
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Literal
from uuid import uuid4

# torch's own code uses it: it costs 0.2 us where nobody profiles, and torch.profiler.record_function 5 us.
from torch._C._profiler import _RecordFunctionFast as profiled

from .._version import __version__
from ..config import MetricsConfig
from ..console import logger
from .sinks import Event as Event
from .sinks import ReportSinks, Sink
from .summary import FASTER, KINDS, UNCOMPRESSED, ClassSummary, Summary, in_words, ratio_of, uncompressed
from .summary import format_bytes as format_bytes


@dataclass(slots=True)
class Record:
    """One message, of one or several tensors.

    Attributes:
        cls: Tensor class.
        dense_bytes: Bytes this rank would have sent without the plugin.
        sent_bytes: Bytes it did send.
        numel, nnz: Entries of the tensors, and how many of them were kept.
        target_density: Wanted nnz / numel; 1 for what is sent dense.
        tau: Threshold (mean over the tensors); 0 or infinite ones do not enter the mean.
        refreshes: Thresholds that were measured anew.
        held_back: Entries that reached the threshold, and wait for a later step, as the message was full.
        select_ms, encode_ms, exchange_ms, decode_ms: Milliseconds.
        waited_ms: How many of ``exchange_ms`` passed until the slowest rank's message was ready.
        intra_node: Bytes sent inside the node, which are not in ``sent_bytes``.
    """

    cls: str
    dense_bytes: float = 0
    sent_bytes: float = 0
    numel: int = 0
    nnz: int = 0
    target_density: float = 1.0
    tau: float = 0.0
    refreshes: int = 0
    select_ms: float = 0.0
    encode_ms: float = 0.0
    exchange_ms: float = 0.0
    decode_ms: float = 0.0
    waited_ms: float = 0.0
    intra_node: float = 0.0
    held_back: int = 0

    def timed(self, what: Literal["select", "encode", "exchange", "decode"]) -> AbstractContextManager[None]:
        """Add the time that the block takes. A profiler of torch shows it, as ``dct.exchange``."""
        return _Timed(self, what)


class _Timed:
    """See :meth:`Record.timed`; a class, since a generator takes three times as long."""

    __slots__ = ("_began", "_profiled", "_record", "_what")

    def __init__(self, record: Record, what: str) -> None:
        self._record, self._what, self._profiled = record, f"{what}_ms", profiled(f"dct.{what}")

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._profiled.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profiled.__exit__(*error)
        took = 1e3 * (time.perf_counter() - self._began)
        setattr(self._record, self._what, getattr(self._record, self._what) + took)


@dataclass(slots=True)
class _Sums(Record):
    """Sums over the records of one tensor class.

    ``tau`` is the sum of tau * numel over the ``tau_numel`` entries with a finite tau > 0. Fields that begin
    with ``sparse`` count thresholded messages only (target < 1), not warm-up and small tensors.
    """

    cls: str = ""
    target: float = 0.0  # sum of target density * numel
    tau_numel: int = 0
    sparse_numel: int = 0
    sparse_nnz: int = 0
    sparse_target: float = 0.0

    def count(self, record: Record) -> None:
        """Add a record to the sums of one step."""
        # Field by field: this is done for every tensor, and a loop over names takes four times as long.
        self.dense_bytes += record.dense_bytes
        self.sent_bytes += record.sent_bytes
        self.numel += record.numel
        self.nnz += record.nnz if record.target_density < 1 else record.numel
        self.refreshes += record.refreshes
        self.held_back += record.held_back
        self.select_ms += record.select_ms
        self.encode_ms += record.encode_ms
        self.exchange_ms += record.exchange_ms
        self.decode_ms += record.decode_ms
        self.waited_ms += record.waited_ms
        self.intra_node += record.intra_node
        target = record.target_density * record.numel
        self.target += target
        if record.target_density < 1:
            self.sparse_numel += record.numel
            self.sparse_nnz += record.nnz
            self.sparse_target += target
        if 0 < record.tau < math.inf:
            self.tau += record.tau * record.numel
            self.tau_numel += record.numel

    def summary(self, steps: int) -> ClassSummary:
        """Return the totals and averages of a run with so many steps."""
        per_step = 1 / max(steps, 1)
        return ClassSummary(
            steps=steps,
            dense_bytes=round(self.dense_bytes),
            sent_bytes=round(self.sent_bytes),
            ratio=ratio_of(self.dense_bytes, self.sent_bytes),
            density=ratio_of(self.sparse_nnz, self.sparse_numel),
            density_target=ratio_of(self.sparse_target, self.sparse_numel),
            tau=ratio_of(self.tau, self.tau_numel),
            refreshes=self.refreshes,
            held_back=self.held_back,
            intra_node=round(self.intra_node),
            **{name: getattr(self, name) * per_step for name in _TIMES},
        )

    def add(self, other: _Sums, sign: int = 1) -> None:
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


_SUMMED = tuple(each.name for each in fields(_Sums))


#: Tensor classes of the framework's own traffic begin with this.
HOST = "host_"

#: Tensor class of collectives of the plugin that carry no messages.
PLUGIN = "plugin"

#: The share of a kind's bytes that may be sent uncompressed without a warning.
_SHARE = 0.01
#: Returns whether a class counts uncompressed bytes; most steps have no such class.
_went_uncompressed = operator.methodcaller("startswith", UNCOMPRESSED)
_is_decided = operator.methodcaller("endswith", f"/{FASTER}")

#: Between a class and the name of one of its tensors.
TENSOR = "/tensor/"

#: Version of the lines in the file; a higher one may have keys that this version does not know.
FORMAT = 1

#: Files that this process has begun, by the path of the configuration, which all ranks share.
_files: dict[str | None, int] = {}

#: Steps at the start whose duration is kept to compare later ones with.
_DENSE_STEPS = 1000

#: Fields of sums and records that are milliseconds.
_TIMES = ("select_ms", "encode_ms", "exchange_ms", "decode_ms", "waited_ms")


class Metrics:
    """Accumulates records and reports them.

    Args:
        config: the ``dct.metrics`` section.
        rank, world_size: of this process; rank 0 writes files, the others only if the path holds ``{rank}``.

    Raises:
        ConfigError: the file or directory cannot be written, or TensorBoard is asked for and not installed.
    """

    def __init__(self, config: MetricsConfig, *, rank: int, world_size: int) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.starting = False
        """Set by reducers: this step is dense or has a rising sparsity."""
        self.has_nodes = False
        """Set when ranks of a node are summed first: what the plugin sends crosses between nodes then."""
        self.counts_host = False
        """Set when the collectives of the host framework are recorded."""
        self._open: dict[str, _Sums] = {}
        """Sums of the step that is not closed yet."""
        self._window: dict[str, _Sums] = {}
        self._totals: dict[str, _Sums] = {}
        """Sums of all steps that are closed."""
        self._steps = 0
        self._window_steps = 0
        self._last_step = 0
        self._start_steps = 0
        self._start: dict[str, _Sums] = {}
        """Sums of the steps up to the end of the start."""
        self._step_ended: float | None = None
        self._durations: list[float] = []
        """Milliseconds of the steps of this window."""
        self._medians: list[float] = []
        """Medians of the windows after the start."""
        self._dense_durations: list[float] = []
        """Milliseconds of the first steps, until one has a compressed message."""
        self._is_dense = True
        self.warns = rank == 0
        """True if this rank warns of tensors that cross uncompressed."""
        self._warned: set[str] = set()
        # Records may come from communication hooks that run on autograd's threads.
        self._lock = threading.Lock()
        self._sinks = ReportSinks(config, rank)
        if self._sinks.has_file:
            self.event("start", format=FORMAT, version=__version__, run=_identity(config.path))

    def add_sink(self, sink: Sink) -> None:
        """Report to one more monitor of the host framework: a callable for ``[(name, value, step), ...]``."""
        self._sinks.add(sink)

    def record(self, *records: Record) -> None:
        """Add messages to the current step."""
        with self._lock:
            for record in records:
                sums = self._open.get(record.cls)
                if sums is None:
                    sums = self._open[record.cls] = _Sums()
                sums.count(record)

    def uncompressed(self, kind: str, reason: str, nbytes: float) -> None:
        """Note what the host sends dense in a job that compresses such tensors.

        Args:
            kind: The tensor classes that are meant begin with it: ``gradient``, ``tensor``, ``pipeline``.
            reason: A key of :data:`.summary.REASONS`.
            nbytes: Bytes that this rank sends; the framework's own collectives have them already.
        """
        self.record(Record(f"{UNCOMPRESSED}{kind}/{reason}", nbytes, nbytes))

    def step(self, n: int) -> None:
        """Close step ``n`` (the host's step number); reports when the last report is ``every`` steps ago, and
        at the end of the start.
        """
        now, ended = time.perf_counter(), self._step_ended
        self._step_ended = now
        if 0 < self._start_steps == self._steps and not self.starting:
            self._end_start()
        with self._lock:
            opened, self._open = self._open, {}
            self._steps += 1
            self._window_steps += 1
            self._last_step = n
            compressed = (s.sparse_numel or (cls in KINDS and s.numel) for cls, s in opened.items())
            self._is_dense = self._is_dense and not any(compressed)
            if ended is not None:  # the first step has no beginning
                self._durations.append(1e3 * (now - ended))
                if self._is_dense and len(self._dense_durations) < _DENSE_STEPS:
                    self._dense_durations.append(self._durations[-1])
            for sums in (self._window, self._totals):
                _add(sums, opened)
            if self.starting:
                self._start_steps = self._steps
            due = self._window_steps >= self.config.every
            if self.warns:
                self._warn(opened)
        if due:
            self._report()

    def _end_start(self) -> None:
        """Report what is left of the start, so that no report holds steps of the start and later ones."""
        if self._window_steps:
            self._report()
        self._medians.clear()
        self._start = _add({}, self._totals)

    def event(self, name: str, **figures: Any) -> None:
        """Write one line for what is no report, for example ``event("loss", step=n, loss=x)``.

        Args:
            name: Of the event.
            figures: What belongs to it, as JSON has it; numbers that are not finite become null.
        """
        endless = {key: None for key, x in figures.items() if isinstance(x, float) and not math.isfinite(x)}
        self._write([{"event": name, **figures, **endless}])

    def summary(self) -> Summary:
        """Totals so far, of all classes together and of each one."""
        with self._lock:
            per_class = _add(_add({}, self._totals), self._open)
            steps = self._steps
            medians = [*self._medians, *([statistics.median(self._durations)] if self._durations else [])]
        steady, steady_steps = _add({}, per_class), steps
        if self._start_steps < steps:
            _add(steady, self._start, sign=-1)
            steady_steps -= self._start_steps
        return Summary(
            **vars(_total(per_class).summary(steps)),
            classes={cls: sums.summary(steps) for cls, sums in per_class.items()},
            steady=_total(steady).summary(steady_steps),
            steady_classes={cls: sums.summary(steady_steps) for cls, sums in steady.items()},
            step_ms=statistics.median(medians) if medians else None,
            start_steps=self._start_steps,
        )

    def summary_line(self) -> str:
        """The run in one line, for the end of training."""
        return in_words(
            self.summary(), rank=self.rank, world_size=self.world_size, counts_host=self.counts_host
        )

    def _warn(self, opened: Mapping[str, _Sums]) -> None:
        """Warn, once for a kind, of a step in which too much of it crossed uncompressed."""
        if not any(map(_went_uncompressed, opened)):
            return
        opened = {cls: sums for cls, sums in opened.items() if not _is_decided(cls)}
        found = uncompressed(opened, self._totals, self._steps, least=_SHARE, without=self._warned)
        for kind, words in found:
            self._warned.add(kind)
            logger.warning("dct: %s", words)

    def close(self) -> None:
        """Report the steps since the last report and close what is open; may be called again."""
        if self._window_steps:
            self._report()
        self._sinks.close()

    def _report(self) -> None:
        with self._lock:
            window, steps, step = self._window, self._window_steps, self._last_step
            self._window, self._window_steps = {}, 0
            step_ms = round(statistics.median(self._durations), 4) if self._durations else None
            self._medians += [] if step_ms is None else [step_ms]
            self._durations = []
            is_start = self._start_steps == self._steps
            dense = self._dense_durations
            dense_ms = round(statistics.median(dense), 4) if len(dense) >= 3 else None
        rows = {cls: _row(sums, steps) for cls, sums in window.items()}
        for cls, row in rows.items() if self.has_nodes else ():
            row["inter_node"] = None if cls.startswith((HOST, UNCOMPRESSED)) else row["sent_bytes"]
            row["intra_node"] = round(window[cls].intra_node / steps, 1)
        head: dict[str, Any] = {"step": step, "steps": steps, "is_start": is_start, "step_ms": step_ms}
        head["dense_step_ms"] = dense_ms
        self._write([{**head, "class": cls, **row} for cls, row in rows.items()])
        figures = {
            f"{cls}/{name}": value for cls in rows if TENSOR not in cls for name, value in rows[cls].items()
        }
        if figures:
            figures["step_ms"] = step_ms
            known = {name: value for name, value in figures.items() if value is not None}
            self._sinks.report([(f"dct/{name}", float(value), step) for name, value in known.items()])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        tail = {"rank": self.rank, "world_size": self.world_size, "time": round(time.time(), 3)}
        self._sinks.write([{**line, **tail} for line in lines])


def _add(totals: dict[str, _Sums], found: Mapping[str, _Sums], sign: int = 1) -> dict[str, _Sums]:
    """Add sums to the ``totals`` of the same classes, or take them away, and return these."""
    for cls, sums in found.items():
        totals.setdefault(cls, _Sums()).add(sums, sign)
    return totals


def _total(classes: Mapping[str, _Sums]) -> _Sums:
    """Return the sums over all classes. A layer's share of its class has been counted there."""
    total = _Sums()
    for cls, sums in classes.items():
        if "/" not in cls:
            total.add(sums)
    return total


def _row(sums: _Sums, steps: int) -> dict[str, float | None]:
    """One report: bytes and milliseconds per step, densities and tau over the window, refreshes in it."""
    return {
        "dense_bytes": round(sums.dense_bytes / steps, 1),
        "sent_bytes": round(sums.sent_bytes / steps, 1),
        "ratio": ratio_of(sums.dense_bytes, sums.sent_bytes),
        "density_target": ratio_of(sums.target, sums.numel),
        "density": ratio_of(sums.nnz, sums.numel),
        "tau": ratio_of(sums.tau, sums.tau_numel),
        "refreshes": sums.refreshes,
        "held_back": sums.held_back,
        **{name: round(getattr(sums, name) / steps, 4) for name in _TIMES},
    }


def _identity(path: str | None) -> str | None:
    """Return a word that only the files of this run have in common; None without torch's store."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
    except (ImportError, ValueError):  # there is no process group
        return None
    number = _files[path] = _files.get(path, 0) + 1
    return store.compare_set(f"dct/metrics/{path}/{number}", "", uuid4().hex[:12]).decode()


def is_estimate(cls: str) -> bool:
    """Return whether the bytes of a tensor class follow from the sizes of collectives, not from messages."""
    return cls.startswith(HOST) or cls == PLUGIN
