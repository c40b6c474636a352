"""The figures of one run: means over its ranks, its start and what came after it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..metrics import TENSOR
from .reading import EventLine, RankRun, Row


@dataclass(frozen=True)
class Window:
    """The reports of all ranks about the same steps; ``rows`` are those of each tensor class."""

    step: int
    steps: int
    rows: dict[str, list[Row]]

    def mean(self, key: str, cls: str) -> float | None:
        """Return the mean over the ranks of one figure of a class; None where no rank has it."""
        found = [value for row in self.rows.get(cls, ()) if (value := getattr(row, key)) is not None]
        return statistics.fmean(found) if found else None

    def of_step(self, key: str = "step_ms") -> float | None:
        """Return ``step_ms`` or ``dense_step_ms``, which every line has."""
        return next((x for cls in self.rows if (x := self.mean(key, cls)) is not None), None)

    @property
    def is_start(self) -> bool:
        """True for steps of the start."""
        return any(row.is_start for rows in self.rows.values() for row in rows)


@dataclass(frozen=True)
class Tensor:
    """The density of one tensor after the start, and its threshold in the last report."""

    name: str
    density: float
    target: float
    tau: float | None

    @property
    def miss(self) -> float:
        """The factor by which the density is above or below its target."""
        return max(self.density / self.target, self.target / max(self.density, self.target / 1000))


class Run:
    """One run, from the files of one or several of its ranks. Bytes are per step and rank.

    Args:
        ranks: The lines of each rank.
        dense: A dense run to compare with; None: the dense steps at the start count.
    """

    def __init__(self, ranks: Sequence[RankRun], dense: Run | None = None) -> None:
        self.dense = dense
        self.ranks = sorted(ranks, key=lambda each: each.rank)
        self.world_size = ranks[0].world_size
        found: dict[int, dict[str, list[Row]]] = {}
        for part in self.ranks:
            for row in part.rows:
                found.setdefault(row.step, {}).setdefault(row.cls, []).append(row)
        self.windows = [
            Window(step, max(row.steps for rows in classes.values() for row in rows), classes)
            for step, classes in sorted(found.items())
        ]
        first = self.ranks[0]
        self.losses = [(e.step, e.loss) for e in first.events if e.event == "loss" and e.loss is not None]
        """Step and loss of every ``loss`` line."""
        self.decisions: list[EventLine] = [e for e in first.events if e.event == "decision"]
        self.settings = next((e.data_parallel for e in reversed(first.events) if e.event == "settings"), {})
        """The applied ``dct.data_parallel``, as the file has it."""

    @property
    def who(self) -> str:
        """The ranks whose figures these are, in words."""
        if len(self.ranks) > 1:
            return f"a rank (mean of {len(self.ranks)} of {self.world_size})"
        return f"rank {self.ranks[0].rank} of {self.world_size}"

    @functools.cached_property
    def steps(self) -> int:
        """Number of steps that the reports cover."""
        return sum(window.steps for window in self.windows)

    @functools.cached_property
    def steady(self) -> list[Window]:
        """The windows after the start, which is dense or has a rising sparsity; all if it did not end."""
        start = [at for at, window in enumerate(self.windows) if window.is_start]
        return self.windows[start[-1] + 1 :] if start and start[-1] + 1 < len(self.windows) else self.windows

    @functools.cached_property
    def classes(self) -> list[str]:
        """Tensor classes without shares of classes, the one that sends most first."""
        names = dict.fromkeys(cls for window in self.windows for cls in window.rows if "/" not in cls)
        return sorted(names, key=lambda cls: -self.per_step("sent_bytes", self.windows, [cls]))

    def per_step(self, key: str, windows: Sequence[Window], classes: Sequence[str] | None = None) -> float:
        """Return the mean per step of a figure of some classes; None: of all."""
        classes = self.classes if classes is None else classes
        amount = sum(w.steps * sum(w.mean(key, cls) or 0.0 for cls in classes) for w in windows)
        return amount / sum(w.steps for w in windows)

    def share(self, *prefixes: str) -> float:
        """Return the share of classes whose names begin so in the bytes sent after the start."""
        chosen = [cls for cls in self.classes if prefixes and cls.startswith(prefixes)]
        whole = self.per_step("sent_bytes", self.steady)
        return self.per_step("sent_bytes", self.steady, chosen) / whole if whole else 0.0

    def ratio(self, windows: Sequence[Window]) -> float | None:
        """Return dense over sent bytes."""
        sent = self.per_step("sent_bytes", windows)
        return self.per_step("dense_bytes", windows) / sent if sent else None

    def part(self, key: str, windows: Sequence[Window] | None = None) -> float:
        """Return the milliseconds per step of a part such as ``select_ms``, by default after the start.
        Exchange is without the wait.
        """
        windows = self.steady if windows is None else windows
        waited = self.per_step("waited_ms", windows) if key == "exchange_ms" else 0.0
        return self.per_step(key, windows) - waited

    @functools.cached_property
    def step_ms(self) -> float | None:
        """Median duration of a step after the start."""
        found = [x for window in self.steady if (x := window.of_step()) is not None]
        return statistics.median(found) if found else None

    @functools.cached_property
    def dense_step_ms(self) -> float | None:
        """Median duration of a dense step: of the dense run, or else of the dense steps at the start."""
        return self.dense.step_ms if self.dense else self.windows[-1].of_step("dense_step_ms")

    @functools.cached_property
    def thresholded(self) -> list[str]:
        """Classes whose target density was below 1."""
        return [
            cls
            for cls in self.classes
            if any((window.mean("density_target", cls) or 1.0) < 1 for window in self.steady)
        ]

    def density(self, cls: str) -> tuple[float, float] | None:
        """Return the mean density of a class after the start, and its target."""
        pairs = [
            (density, target)
            for window in self.steady
            if (density := window.mean("density", cls)) is not None
            and (target := window.mean("density_target", cls)) is not None
        ]
        return tuple(map(statistics.fmean, zip(*pairs, strict=True))) if pairs else None  # type: ignore[return-value]

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that have lines of their own, the one that misses its density most first."""
        names = dict.fromkeys(cls for window in self.steady for cls in window.rows if TENSOR in cls)
        found = []
        for cls in names:
            if (pair := self.density(cls)) is not None:
                taus = [tau for window in self.steady if (tau := window.mean("tau", cls)) is not None]
                found.append(Tensor(cls.partition(TENSOR)[2], *pair, taus[-1] if taus else None))
        return sorted(found, key=lambda tensor: -tensor.miss)

    def waited(self) -> dict[int, float]:
        """Return the milliseconds per step that each rank waited for slower ones."""
        steps = sum(window.steps for window in self.steady)
        waited = dict.fromkeys((part.rank for part in self.ranks), 0.0)
        for window in self.steady:
            for cls, rows in window.rows.items():
                for row in rows if "/" not in cls else ():
                    waited[row.rank] += row.waited_ms * window.steps / steps
        return waited


def grouped(windows: Sequence[Window], most: int) -> list[list[Window]]:
    """Return successive windows in at most so many groups."""
    size = -(-len(windows) // most)
    return [list(windows[at : at + size]) for at in range(0, len(windows), size)]


def mean_step(windows: Sequence[Window]) -> float | None:
    """Return the mean ``step_ms`` over the steps of the windows that have it."""
    pairs = [(window.steps, value) for window in windows if (value := window.of_step()) is not None]
    return sum(n * value for n, value in pairs) / sum(n for n, _ in pairs) if pairs else None
