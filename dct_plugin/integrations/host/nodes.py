"""The nodes of a host's process group, as ``dct.data_parallel.nodes`` asks for."""

from __future__ import annotations

import torch.distributed as dist

from dct_plugin.config import DataParallelConfig
from dct_plugin.console import log_once
from dct_plugin.errors import ConfigError
from dct_plugin.transport.agreement import HINT, TIME_LIMIT
from dct_plugin.transport.nodes import KEY, Nodes, find_nodes, ranks_of_machines


def nodes_of(
    config: DataParallelConfig,
    group: dist.ProcessGroup | None,
    *,
    unsupported: str = "",
    limit: float = TIME_LIMIT,
    hint: str = HINT,
) -> Nodes | None:
    """Return the nodes whose ranks are summed before the exchange; None if every rank is to exchange.

    Args:
        config: The ``data_parallel`` settings.
        group: Process group over which gradients are reduced.
        unsupported: What of the host does not work with nodes, in words; "" if all does.
        limit, hint: See :func:`.transport.nodes.ranks_of_machines`.

    Raises:
        ConfigError: The ranks are no nodes of the size that the configuration asks for, or it asks for nodes
            where they do not work.
        DesyncError: A rank did not report its machine.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if config.nodes == 1 or len(ranks) == 1 or not config.enabled:
        return None
    machines = ranks_of_machines(ranks, limit=limit, hint=hint)
    if config.nodes == "auto":
        if len(machines) == 1 or len(machines) == len(ranks):
            return None
        if unsupported:
            problem = f"nodes are not used with {unsupported}"
        else:
            try:
                return _logged(find_nodes(ranks, machines, None, group))
            except ConfigError as error:
                problem = str(error)
        if dist.get_rank() == ranks[0]:
            log_once(f"dct: every rank exchanges gradients by itself: {problem}")
        return None
    if unsupported:
        raise ConfigError(
            f"rank {dist.get_rank()}: {KEY} = {config.nodes} does not work with {unsupported}; leave it out, "
            "or set it to 1"
        )
    return _logged(find_nodes(ranks, machines, config.nodes, group))


def _logged(nodes: Nodes) -> Nodes:
    if nodes.rank == nodes.ranks[0][0]:
        log_once(f"dct: gradients are summed inside nodes, and thresholded between them: {nodes}")
    return nodes
