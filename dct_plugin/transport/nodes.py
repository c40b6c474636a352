"""The nodes of a process group: which ranks share a machine, with a fast link between them.

Machines are compared through the key-value store, not through a collective: a rank that never comes cannot
hang the others beyond a time limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from .. import processes
from ..errors import ConfigError, DesyncError
from .agreement import HINT, attempts, no_answer, ranks_in_words
from .lost_ranks import default_store, key_of, stated

#: The option that says which ranks are a node, as errors name it.
KEY = "dct.data_parallel.nodes"


class Nodes(NamedTuple):
    """The ranks of a process group by node; all nodes have the same number of ranks.

    Attributes:
        ranks: Global ranks of each node.
        rank: The global rank of this process.
        group: The process group, None for the default one.
    """

    ranks: tuple[tuple[int, ...], ...]
    rank: int
    group: dist.ProcessGroup | None = None

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return next(node for node in self.ranks if self.rank in node)

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks, one of each node, that have this rank's position in their node."""
        position = self.inside.index(self.rank)
        return tuple(node[position] for node in self.ranks)

    def __str__(self) -> str:
        return f"{len(self.ranks)} nodes of {len(self.ranks[0])} ranks"


def layout_of(nodes: Nodes | None) -> list[list[int]]:
    """Return the positions in the process group of each node's ranks; empty without nodes."""
    if nodes is None:
        return []
    ranks = dist.get_process_group_ranks(nodes.group or dist.group.WORLD)
    return [[ranks.index(rank) for rank in node] for node in nodes.ranks]


def publish_machine() -> None:
    """Tell the other ranks which machine this process runs on."""
    default_store().set(key_of("machine", dist.get_rank()), processes.machine())


def ranks_of_machines(ranks: Sequence[int], *, limit: float, hint: str = HINT) -> dict[str, list[int]]:
    """Return the ranks that run on each machine, in the order of ``ranks``.

    Args:
        ranks: Global ranks; each of them calls this function or :func:`publish_machine`.
        limit: Seconds to wait for the others.
        hint: The likely reason, besides a crash, why a rank reports nothing.

    Raises:
        DesyncError: A rank did not report; names it.
    """
    publish_machine()
    missing, names = list(ranks), dict[int, str]()
    for _ in attempts(limit):
        names |= {rank: name for rank in missing if (name := stated(key_of("machine", rank))) is not None}
        if not (missing := [rank for rank in ranks if rank not in names]):
            break
    if missing:
        raise DesyncError(f"rank {dist.get_rank()}: {no_answer(missing, limit, hint)}")
    machines: dict[str, list[int]] = {}
    for rank in ranks:
        machines.setdefault(names[rank], []).append(rank)
    return machines


def find_nodes(
    ranks: Sequence[int],
    machines: dict[str, list[int]],
    per_node: int | None,
    group: dist.ProcessGroup | None = None,
) -> Nodes:
    """Return the nodes of a process group.

    Args:
        ranks: Global ranks of the group.
        machines: Ranks by machine.
        per_node: So many consecutive ranks are a node; None takes machines as nodes.
        group: The group, None for the default one.

    Raises:
        ConfigError: Nodes would have different sizes, or one would lie on two machines; names ranks and
            sizes.
    """
    rank = dist.get_rank()
    where = "; ".join(f"{ranks_in_words(on)} on {name.split()[0]}" for name, on in machines.items())
    if per_node is None:
        if len({len(on) for on in machines.values()}) > 1:
            raise ConfigError(
                f"rank {rank}: {KEY} = 'auto': nodes have different numbers of ranks ({where}); start as "
                f"many ranks on every node, or set {KEY} to a number that divides them, or to 1 for an "
                "exchange without nodes"
            )
        return Nodes(tuple(map(tuple, machines.values())), rank, group)
    if len(ranks) % per_node:
        divisors = ", ".join(str(n) for n in range(1, len(ranks) + 1) if len(ranks) % n == 0)
        raise ConfigError(
            f"rank {rank}: {KEY} = {per_node}: {len(ranks)} ranks exchange gradients with each other, which "
            f"are no nodes of {per_node} ranks each; set it to one of {divisors}, or to 'auto'"
        )
    nodes = [tuple(ranks[first : first + per_node]) for first in range(0, len(ranks), per_node)]
    for node in nodes:
        if not any(set(node) <= set(on) for on in machines.values()):
            raise ConfigError(
                f"rank {rank}: {KEY} = {per_node}: {ranks_in_words(node)} would be one node, but are on "
                f"several machines ({where}); set it to a number that divides the ranks of every machine, or "
                "to 'auto'"
            )
    return Nodes(tuple(nodes), rank, group)
