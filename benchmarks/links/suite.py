"""The suite: every workload on every link, within the time that is given."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dct_plugin.recommender.links.interleave import Figures, interleaved, warmed
from dct_plugin.recommender.links.namespaces import Links, LinksError
from dct_plugin.recommender.links.team import NETWORKS, Team, TeamError

UNLIMITED = "unlimited"
OPTIMIZERS = ("sgd", "adamw")
#: Seconds that the ranks of a workload take to start, and a variant to be made and warmed up; rough.
STARTING, WARMING = 15.0, 8.0
LEAST_SECONDS = 1.0


@dataclass
class Cell:
    """A variant of a workload on one link: its figures, or why there are none."""

    workload: str
    variant: str
    ranks: int
    rate: str
    baseline: str
    figures: list[Figures] = field(default_factory=list)
    skipped: str = ""
    failed: bool = False
    nodes: int | None = None


@dataclass(frozen=True)
class Plan:
    """The measurements to make; order ``rates`` from the fastest to the slowest."""

    workloads: Sequence[str]
    ranks: Sequence[int]
    rates: Sequence[str]
    seconds: float
    out: Path
    parameters: float = 10.65
    format: str = "diabetes"
    data: str | None = None
    batch_sizes: Sequence[int] = (256, 2048)
    stages: Sequence[int] = (0, 1, 2)
    nodes: int | None = None
    """Nodes that the ranks are spread over; None: each rank is one."""
    methods: Sequence[str] = ()
    """Names of the methods that take turns; empty for all."""
    optimizers: Sequence[str] = OPTIMIZERS
    """The optimizers of ddp, deepspeed and fsdp."""

    def by_optimizer(self, variants: Sequence[str]) -> list[str]:
        """Return the variants with each optimizer, in words."""
        ends = {"sgd": "", "adamw": ", AdamW"}
        return [f"{variant}{ends[name]}" for variant in variants for name in self.optimizers]

    def per_node(self, ranks: int) -> int:
        """Return the ranks of a node."""
        return 1 if self.nodes is None else ranks // self.nodes


class Entry(NamedTuple):
    """A workload.

    Attributes:
        title: For people.
        target: ``module:class`` of it.
        needs: Modules that must be installed.
        variants: Of it, under a plan.
        options: Its options, under a plan and a number of ranks.
        baseline: Method that the others are compared with.
    """

    title: str
    target: str
    needs: tuple[str, ...]
    variants: Callable[[Plan], Sequence[str]]
    options: Callable[[Plan, int], dict[str, Any]]
    baseline: str


def _sized(plan: Plan, ranks: int) -> dict[str, Any]:
    return {"parameters": plan.parameters, "per_node": plan.per_node(ranks)}


def _recommender(plan: Plan, ranks: int) -> dict[str, Any]:
    from .recommender import configurations

    configs = configurations(ranks, list(plan.batch_sizes))
    return {"format": plan.format, "data": plan.data, "max_rows": None, "configs": configs}


WORKLOADS: dict[str, Entry] = {
    "ddp": Entry(
        "torch DDP",
        "benchmarks.links.ddp:DDP",
        (),
        lambda plan: plan.by_optimizer([f"{plan.parameters:g}M parameters"]),
        _sized,
        "fp32",
    ),
    "deepspeed": Entry(
        "DeepSpeed",
        "benchmarks.links.zero:Zero",
        ("deepspeed",),
        lambda plan: plan.by_optimizer([f"ZeRO-{stage}" for stage in plan.stages]),
        _sized,
        "dense fp32",
    ),
    "fine-tuning": Entry(
        "DeepSpeed, fine-tuning",
        "benchmarks.links.zero:FineTuning",
        ("deepspeed",),
        lambda plan: [f"ZeRO-{stage}" for stage in plan.stages if stage > 0],
        _sized,
        "dense",
    ),
    "fsdp": Entry(
        "torch FSDP2",
        "benchmarks.links.fsdp:Replicas",
        (),
        lambda plan: plan.by_optimizer([f"{plan.parameters:g}M parameters"]),
        _sized,
        "fp32",
    ),
    "fsdp-mesh": Entry(
        "torch FSDP2 on one mesh",
        "benchmarks.links.fsdp:OneMesh",
        (),
        lambda plan: [f"{rate:g}, {count} micro-batches" for count in (1, 4, 8) for rate in (2e-3, 1e-5)],
        _sized,
        "bf16",
    ),
    "dlrm": Entry(
        "hybrid DLRM",
        "dct_plugin.recommender.on_links:Trainings",
        ("deepspeed", "sklearn"),
        lambda plan: [f"batch {size}" for size in plan.batch_sizes],
        _recommender,
        "dense",
    ),
}


def measure(plan: Plan, follow: Callable[[Cell], None]) -> list[Cell]:
    """Every cell of the plan, in turn; one that cannot be measured says why.

    Args:
        plan: What to measure.
        follow: Gets every cell when it is done.
    """
    return list(_Run(plan, follow).cells())


class _Run:
    def __init__(self, plan: Plan, follow: Callable[[Cell], None]) -> None:
        self.plan, self.follow = plan, follow
        self.end = time.monotonic() + plan.seconds
        self.begun = False  # with measuring: a slow start must not use up all the time
        self.jobs = list(itertools.product(plan.ranks, plan.workloads))
        # What is still to come, to share out the time.
        self.variants = sum(len(WORKLOADS[name].variants(plan)) for _, name in self.jobs)
        self.starts = len(self.jobs)
        self.left = self.variants * len(plan.rates)

    def cells(self) -> Iterator[Cell]:
        for ranks, name in self.jobs:
            self.starts -= 1
            for cell in self._workload(name, ranks):
                self.left -= 1
                self.follow(cell)
                yield cell

    def _workload(self, name: str, ranks: int) -> Iterator[Cell]:
        entry, rates = WORKLOADS[name], self.plan.rates
        todo = {
            (variant, rate): Cell(name, variant, ranks, rate, entry.baseline, nodes=self.plan.nodes)
            for variant in entry.variants(self.plan)
            for rate in rates
        }
        if missing := [module for module in entry.needs if importlib.util.find_spec(module) is None]:
            yield from _skipped(todo.values(), f"{', '.join(missing)} not installed")
            return
        with ExitStack() as stack:
            links: Links | None = None
            try:
                links = stack.enter_context(Links(self.plan.nodes or ranks, NETWORKS))
            except LinksError as error:
                limited = [todo.pop(key) for key in list(todo) if key[1] != UNLIMITED]
                yield from _skipped(limited, str(error))
                if not todo:
                    return
            try:
                yield from self._measured(name, ranks, links, todo, stack)
            except TeamError as error:
                yield from _skipped(todo.values(), str(error), failed=True)

    def _measured(
        self,
        name: str,
        ranks: int,
        links: Links | None,
        todo: dict[tuple[str, str], Cell],
        stack: ExitStack,
    ) -> Iterator[Cell]:
        """Takes from ``todo`` what it yields."""
        if self._late():
            return (yield from self._out_of_time(todo))
        entry = WORKLOADS[name]
        options, logs = entry.options(self.plan, ranks), self.plan.out / "logs"
        team = stack.enter_context(
            Team(entry.target, ranks, links, options=options, folder=logs, name=f"{name}-{ranks}")
        )
        for variant in dict.fromkeys(variant for variant, _ in todo):
            self.variants -= 1
            if self._late():
                break
            if links is not None:
                links.limit(None)
            methods = self._chosen(team.open(variant), entry.baseline)
            warmed(team.block, methods)
            for rate in [rate for v, rate in todo if v == variant]:
                if self._late():
                    break
                if links is not None:
                    links.limit(None if rate == UNLIMITED else rate)
                self.begun = True
                cell = todo.pop((variant, rate))
                cell.figures = interleaved(team.block, list(methods), self._share())
                yield cell
            team.close()
        yield from self._out_of_time(todo)

    def _chosen(self, made: dict[str, int], baseline: str) -> dict[str, int]:
        """Return those of a workload's methods that are to be measured: the baseline always is."""
        if unknown := set(self.plan.methods) - made.keys():
            raise TeamError(f"no method {', '.join(sorted(unknown))}; there are {', '.join(made)}")
        chosen = {*self.plan.methods, baseline} if self.plan.methods else made
        return {name: steps for name, steps in made.items() if name in chosen}

    def _share(self) -> float:
        """Seconds for the next cell."""
        to_come = self.starts * STARTING + self.variants * WARMING
        return max(LEAST_SECONDS, (self.end - time.monotonic() - to_come) / self.left)

    def _late(self) -> bool:
        return self.begun and time.monotonic() > self.end

    def _out_of_time(self, todo: dict[tuple[str, str], Cell]) -> Iterator[Cell]:
        yield from _skipped(todo.values(), f"the {self.plan.seconds / 60:g} minutes were over")
        todo.clear()


def _skipped(cells: Any, reason: str, *, failed: bool = False) -> Iterator[Cell]:
    for cell in list(cells):
        cell.skipped, cell.failed = reason, failed
        yield cell
