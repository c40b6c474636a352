"""Interleaved measurement: methods take turns, so that a slow spell of the machine meets all of them."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .team import Block

#: A turn of a method lasts about this long, and at most so many steps.
TURN_SECONDS, TURN_STEPS = 0.4, 5
LEAST_ROUNDS = 3

Take = Callable[[str, int], Block]


@dataclass
class Figures:
    """One method on one link.

    ``ms`` are milliseconds per step of each turn, ``sent`` bytes per step between nodes (all nodes, headers
    included), ``inside`` those between ranks of one node, and ``split`` milliseconds per step by what the
    plugin's metrics time (median of the turns).
    """

    name: str
    ms: list[float] = field(default_factory=list)
    sent: float = 0.0
    split: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    inside: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile; the extremes where there are too few turns."""
        if len(self.ms) < 4:
            return min(self.ms), max(self.ms)
        first, _, third = statistics.quantiles(self.ms, n=4, method="inclusive")
        return first, third

    @classmethod
    def of(cls, name: str, first: Block, turns: Sequence[Block]) -> Figures:
        """Compute the figures of a method from its turns and the block before them."""
        steps, blocks = sum(turn.steps for turn in turns), [first, *turns]
        split = {
            key: statistics.median(
                (turn.totals[key] - before.totals.get(key, 0.0)) / turn.steps
                for before, turn in itertools.pairwise(blocks)
            )
            for key in turns[0].totals
            if key.endswith("_ms")
        }
        sent, inside = (
            sum(getattr(turn, name) * turn.steps for turn in turns) / steps for name in ("sent", "inside")
        )
        return cls(name, [turn.ms for turn in turns], sent, split, steps, inside)


def warmed(take: Take, methods: Mapping[str, int]) -> None:
    """Do the steps of every method that do not count."""
    for name, steps in methods.items():
        take(name, steps)


def orders(methods: Sequence[str]) -> Iterator[list[str]]:
    """Yield the order of every round, without end and the same on all ranks.

    Back and forth, against drift; drawn anew for each pair of rounds, so that nobody always comes after the
    same other.
    """
    generator = random.Random(1)
    while True:
        order = generator.sample(methods, len(methods))
        yield order
        yield order[::-1]


def interleaved(take: Take, methods: Sequence[str], seconds: float) -> list[Figures]:
    """Measure methods in rounds in which each has one turn, in another order every time.

    Args:
        take: Does so many steps of a method.
        methods: Their names.
        seconds: No round begins after so long; at least three rounds are made.
    """
    end = time.monotonic() + seconds
    # The first steps meet what a new rate of the link leaves behind. The second ones say how long turns are.
    for _ in range(2):
        first = {name: take(name, 1) for name in methods}
    turns = {
        name: max(1, min(TURN_STEPS, math.floor(1e3 * TURN_SECONDS / block.ms)))
        for name, block in first.items()
    }
    blocks: dict[str, list[Block]] = {name: [] for name in methods}
    slowest = 0.0
    for number, order in enumerate(orders(methods)):
        began = time.monotonic()
        if number >= LEAST_ROUNDS and began + slowest / 2 >= end:
            break
        for name in order:
            blocks[name].append(take(name, turns[name]))
        slowest = max(slowest, time.monotonic() - began)
    return [Figures.of(name, first[name], blocks[name]) for name in methods]
