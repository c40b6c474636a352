"""The placement of embedding tables on ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from ..metrics import format_bytes


@dataclass(frozen=True)
class Table:
    """The size of a table: rows, width, and average rows per sample (pooling)."""

    rows: int
    width: int
    pooling: float = 1.0
    name: str = ""

    @property
    def cost(self) -> float:
        """Rows x width x pooling."""
        return self.rows * self.width * self.pooling


def place_tables(tables: Sequence[Table], world_size: int) -> list[list[int]]:
    """Balance tables over ranks by rows x width x pooling; ranks may stay without.

    Longest processing time first (Graham, SIAM J. Applied Mathematics 17, 1969): the greatest cost goes to
    the rank that has least, which is at most a third above the optimum. Ties are broken by table and rank, so
    that every rank finds the same answer.

    Returns:
        The tables of each rank, ascending.

    Raises:
        ValueError: ``world_size`` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    loads = [(0.0, 0, rank) for rank in range(world_size)]
    placed: list[list[int]] = [[] for _ in range(world_size)]
    for number in sorted(range(len(tables)), key=lambda t: (-tables[t].cost, t)):
        load, count, rank = heapq.heappop(loads)
        placed[rank].append(number)
        heapq.heappush(loads, (load + tables[number].cost, count + 1, rank))
    return [sorted(numbers) for numbers in placed]


def check_placement(
    placement: Sequence[Sequence[int]] | None, tables: Sequence[Table], world_size: int
) -> list[list[int]]:
    """Return the placement given by the user, or the balanced one.

    Raises:
        ValueError: Not every table is on exactly one of ``world_size`` ranks.
    """
    placed = [list(numbers) for numbers in placement or place_tables(tables, world_size)]
    named = sorted(number for numbers in placed for number in numbers)
    if named != list(range(len(tables))) or len(placed) != world_size:
        raise ValueError(
            f"placement {placed} does not put each of {len(tables)} tables on one of {world_size} ranks"
        )
    return placed


def check_memory(placement: Sequence[Sequence[int]], tables: Sequence[Table], name: str) -> None:
    """Check that the tables of every rank, in fp32, fit into the memory of a machine like this one.

    Raises:
        ValueError: They do not. All ranks find the same, if their machines are alike.
    """
    if torch.get_default_device().type != "cpu":
        return
    needed = [sum(4 * tables[t].rows * tables[t].width for t in numbers) for numbers in placement]
    total = psutil.virtual_memory().total
    if (largest := max(needed)) > total:
        raise ValueError(
            f"{name}: the tables of rank {needed.index(largest)} take {format_bytes(largest)} of "
            f"{format_bytes(sum(needed))}, and this machine has {format_bytes(total)}: take more machines"
        )


def seed_of_tables() -> int:
    """Draw the seed of all tables from the global generator, once for a model."""
    return int(torch.randint(2**62, ()))


def draw_table(table: Tensor, number: int, seed: int) -> Tensor:
    """Fill a table, [rows, dim], uniformly in ``+-1/sqrt(rows)``, by its number and the seed of all."""
    limit = 1.0 / math.sqrt(len(table))
    return table.uniform_(-limit, limit, generator=torch.Generator().manual_seed(seed + number))
