"""The choice between an all-to-all of embeddings and DES, for each part of a model.

It compares the floats that a rank sends: an operator's partial results against the embeddings that it reads
(Rong et al., SIGIR 2020, arXiv:1909.04823).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["all_to_all", "des"]


@dataclass(frozen=True)
class Part:
    """A part of a model that reads embedding tables.

    ``width`` is K, the floats of one sample's partial result; None if DES cannot compute the part. It reads
    ``num_tables`` tables, ``dim`` floats wide, named by ``tables``. ``shipped`` floats per sample go from the
    sample's rank to the shards first. Parts that read the same tables get the same strategy.
    """

    name: str
    width: int | None
    tables: str
    num_tables: int
    dim: int
    shipped: int = 0
    layout: Literal["fields", "columns"] = "fields"


@dataclass(frozen=True)
class Choice:
    """The exchange strategy of a part, with its reason."""

    part: str
    tables: str
    strategy: Strategy
    ratio: float | None
    """N*K / (T*m) of the part by itself; below 1 DES moves less. None where no substitution exists."""
    reason: str

    def __str__(self) -> str:
        return f"{self.part}: {'DES' if self.strategy == 'des' else 'all-to-all'} ({self.reason})"


def choose(
    parts: Sequence[Part], *, world_size: int, compression: float = 1.0, force: Strategy | None = None
) -> list[Choice]:
    """Pick all-to-all or DES for every part by the floats a rank sends per global sample and direction.

    With T tables of width m on N ranks, an all-to-all sends (N-1)/N * T*m/N and DES (N-1)/N * K: the ratio is
    N*K / (T*m). With column shards the vectors that are shipped to them count too.

    Args:
        parts: The parts of one model.
        world_size: N.
        compression: Factor by which compression shrinks the all-to-all.
        force: Use this strategy wherever it exists.
    """
    if compression <= 0:
        raise ValueError(f"compression={compression}: must be positive")
    choices = []
    for part in parts:
        group = [other for other in parts if other.tables == part.tables]
        dense = part.num_tables * part.dim / world_size / compression
        each = [_substituted(other, world_size) for other in group]
        ratio = None if part.width is None else _substituted(part, world_size) / dense
        strategy: Strategy
        if world_size == 1:
            strategy, reason = "all_to_all", "one rank: nothing is exchanged"
        elif math.inf in each:
            without = [other.name for other in group if other.width is None]
            who = "it has" if without == [part.name] else f"{' and '.join(without)} on the same tables has"
            strategy, reason = "all_to_all", f"{who} no equivalent substitution"
        elif len({other.layout for other in group}) > 1:
            strategy, reason = "all_to_all", "the parts of these tables need different shards"
        else:
            total = sum(each)
            strategy = "des" if total < dense else "all_to_all"
            if force is not None:
                strategy = force
            formula = _formula(part, group, world_size, compression, total / dense)
            chosen = "as asked" if force is not None else f"{'<' if total < dense else '>='} 1"
            reason = f"{formula} = {total / dense:.3g}, {chosen}"
        choices.append(Choice(part.name, part.tables, strategy, ratio, reason))
    return choices


def _substituted(part: Part, world_size: int) -> float:
    return math.inf if part.width is None else part.width + part.shipped / world_size


def _formula(part: Part, group: Sequence[Part], world_size: int, compression: float, ratio: float) -> str:
    widths = "+".join(str(other.width) for other in group)
    if len(group) > 1:
        widths = f"({widths})"
    shipped = f" + {part.shipped}" if part.shipped else ""
    smaller = f"/{compression:g}" if compression != 1 else ""
    ours = f"{world_size}*{widths}{shipped}"
    theirs = f"{part.num_tables}*{part.dim}{smaller}"
    return f"(N*K{shipped})/(T*m{smaller}) = ({ours})/({theirs})"
