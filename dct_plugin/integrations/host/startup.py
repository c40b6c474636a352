"""Start-up agreement of the ranks of a process group, over the default group's key-value store.

Every rank states what it is about to run; all go on, or all stop with a message that names the ranks and what
differs. A rank that states nothing is named after a time limit, and hangs nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin._version import __version__
from dct_plugin.compression.stream import backend_beside
from dct_plugin.config import DataParallelConfig, DCTConfig, option_values
from dct_plugin.console import log_once
from dct_plugin.errors import ConfigError, VersionError
from dct_plugin.transport import lost_ranks
from dct_plugin.transport.agreement import HINT, Agreement
from dct_plugin.transport.nodes import KEY, Nodes, find_nodes, publish_machine, ranks_of_machines
from dct_plugin.transport.tcp_connect import time_limit

#: Seconds in which a rank without a cache of compiled kernels is there, also on a slow machine: the
#: self-check takes 45 seconds of a processor.
COLD_START = 300.0


def join(
    topic: str, *, group: dist.ProcessGroup | None = None, limit: float | None = None, hint: str = HINT
) -> Agreement:
    """Join the next agreement on ``topic``; return this rank's part in it.

    A topic may be agreed on several times (one engine after the other), in the same order on all ranks.

    Args:
        topic: For example ``"deepspeed"``; the same on all ranks.
        group: The group whose ranks agree; None for all.
        limit: Seconds to wait for the others; None: as long as the group waits for its ranks, and, where they
            compile kernels first, not less than :data:`COLD_START`.
        hint: Reasons, besides a crash, why a rank does not report.

    Raises:
        VersionError: The default process group has no store.
    """
    try:
        store = lost_ranks.default_store()
    except Exception as error:
        raise VersionError(
            f"the default process group has no key-value store, which dct needs at start-up ({error}); "
            "start the job with torchrun or the deepspeed launcher, or with init_method='env://'"
        ) from error
    _warn_of_restarts()
    if group is not None:
        topic = f"{topic}/{group.group_name}"
    if limit is None:
        limit = max(time_limit(group), COLD_START if _compiles() else 0.0)
    rank = dist.get_rank(group)
    publish_machine()  # others may wait for it, also if this rank fails from here on
    # Counted in the store itself: it lives as long as the agreements that were made in it.
    number = store.add(f"dct_plugin/{topic}/joined/{rank}", 1)
    return Agreement(
        store,
        f"dct_plugin/{topic}/{number}",
        rank=rank,
        world_size=dist.get_world_size(group),
        limit=limit,
        hint=hint,
    )


def _compiles() -> bool:
    """Return whether ranks compile kernels, and compare them with the reference, before they can confirm."""
    return torch.cuda.is_available() and "nccl" in dist.get_backend()


def facts_of(config: DCTConfig, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that all ranks of a host must share: options, versions, kernels, and ``more``.

    Kernels that fail their self-check on one rank alone would leave the ranks with different messages.
    """
    kernels = {}
    if _compiles():
        kernels["kernels of CUDA tensors"] = backend_beside(config.kernels, torch.device("cuda")).name
    return {
        **option_values(config),
        **kernels,
        "version of dct-plugin": __version__,
        "version of torch": torch.__version__,
        **more,
    }


def coverage(
    model: torch.nn.Module, parameters: Iterable[Tensor], is_reduced: Callable[[Tensor], bool]
) -> str:
    """Return how many of the trainable ``parameters`` have their gradients compressed, in words. Sparse
    gradients are left to the host.
    """
    sparse = {id(module.weight) for module in model.modules() if getattr(module, "sparse", False) is True}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    compressed = [each for each in trained if is_reduced(each) and id(each) not in sparse]
    return f"{len(compressed)} of {len(trained)} parameters"


def _warn_of_restarts() -> None:
    """Warn, once and on rank 0, if ranks that torchrun starts again could not connect."""
    restarts, store = map(os.environ.get, ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"))
    if dist.get_rank() == 0 and restarts not in (None, "0") and store == "True":
        log_once(
            "dct: torchrun --max-restarts: ranks that are started again find the old addresses in torchrun's "
            "key-value store, and torch cannot connect them. Start torchrun with --standalone or "
            "--rdzv-backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        )


def nodes_of(
    config: DataParallelConfig,
    group: dist.ProcessGroup | None,
    *,
    unsupported: str = "",
    limit: float | None = None,
    hint: str = HINT,
) -> Nodes | None:
    """Return the nodes whose ranks are summed before the exchange; None if every rank is to exchange.

    Args:
        config: The ``data_parallel`` settings.
        group: Process group over which gradients are reduced.
        unsupported: What of the host does not work with nodes, in words; "" if all does.
        limit: Seconds to wait for the others; None: as long as the group waits for its ranks.
        hint: See :func:`.transport.nodes.ranks_of_machines`.

    Raises:
        ConfigError: The ranks are no nodes of the size that the configuration asks for, or it asks for nodes
            where they do not work.
        DesyncError: A rank did not report its machine.
    """
    # The size first: torchft's group of a wrapped model is unknown to torch.
    if config.nodes == 1 or config.trains_alone or not config.enabled or dist.get_world_size(group) == 1:
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    limit = time_limit(group) if limit is None else limit
    machines = ranks_of_machines(ranks, limit=limit, hint=hint)
    automatic = config.nodes == "auto"
    if automatic and len(machines) in (1, len(ranks)):
        return None
    try:
        if unsupported and automatic:
            raise ConfigError(f"nodes are not used with {unsupported}")
        if unsupported:
            raise ConfigError(
                f"rank {dist.get_rank()}: {KEY} = {config.nodes} does not work with {unsupported}; leave it "
                "out, or set it to 1"
            )
        nodes = find_nodes(ranks, machines, None if automatic else int(config.nodes), group)
    except ConfigError as error:
        if not automatic:
            raise
        if dist.get_rank() == ranks[0]:
            log_once(f"dct: every rank exchanges gradients by itself: {error}")
        return None
    if nodes.rank == nodes.ranks[0][0]:
        log_once(f"dct: gradients are summed inside nodes, and thresholded between them: {nodes}")
    return nodes
