"""Comparison of replicas: a checksum of every parameter, compared over the ranks every few steps.

Ranks add up the same payloads in the same order, so their parameters are bitwise equal. Memory errors,
kernels that are not deterministic and scripts that change parameters on one rank would go unnoticed, and the
saved model would not be the trained one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.config import DataParallelConfig
from dct_plugin.console import logger
from dct_plugin.data_parallel.checksums import checksum
from dct_plugin.errors import DesyncError
from dct_plugin.host_traffic import own_traffic
from dct_plugin.transport import lost_ranks


class ReplicaChecksums:
    """Comparison of parameters as ``dct.data_parallel.verify`` says.

    Args:
        config: The ``data_parallel`` settings.
        weights: The parameters by name, the same on all ranks of the group.
        group: The ranks that hold replicas; None for all.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._verify, self._weights, self._group = config.verify, weights, group

    @own_traffic(recorded=False)
    def check(self, step: int, *, saves: bool = False) -> None:
        """Compare the parameters after optimizer step ``step`` where that is due, and before they are saved;
        then it is a collective.

        With the action ``"stop"`` ranks that differ stop all, with ``"resync"`` every rank takes over the
        parameters of the group's first rank, and a warning says which were others. States of the optimizer
        are not compared.

        Raises:
            DesyncError: On every rank: names the step, the parameters and the ranks.
        """
        verify = self._verify
        if verify is None or (step % verify.every and not saves):
            return
        named = list(self._weights())
        if not named or dist.get_world_size(self._group) == 1:
            return
        own = torch.stack([checksum(weight) for _, weight in named])
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        everyones = [torch.empty_like(own) for _ in ranks]
        with lost_ranks.reported("comparison of parameters", self._group, step):
            dist.all_gather(everyones, own, group=self._group)
        by_parameter = torch.stack(everyones, dim=1)
        differing = (by_parameter != by_parameter[:, :1]).any(dim=1).nonzero().view(-1).tolist()
        if not differing:
            return
        text = "; ".join(
            f"{named[i][0]} on {_minority(ranks, by_parameter[i].tolist())}" for i in differing[:5]
        )
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        if verify.action == "stop":
            raise DesyncError(
                f"rank {dist.get_rank()}: parameters differ between the ranks after step {step}: {text}{more}"
            )
        for i in differing:
            dist.broadcast(named[i][1], ranks[0], group=self._group)
        if dist.get_rank() == ranks[0]:
            logger.warning(
                f"dct: parameters differed between the ranks after step {step}: {text}{more}; all took over "
                f"those of rank {ranks[0]}"
            )


def _minority(ranks: list[int], sums: list[int]) -> str:
    usual, count = Counter(sums).most_common(1)[0]
    if 2 * count <= len(sums):
        return f"ranks {', '.join(map(str, ranks))} (no majority)"
    others = [str(rank) for rank, found in zip(ranks, sums, strict=True) if found != usual]
    return f"rank(s) {', '.join(others)}"
