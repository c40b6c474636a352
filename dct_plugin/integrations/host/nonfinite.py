"""Steps with a gradient that is not finite, found before the optimizer uses it: the host skips them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.codecs.copies import to_host
from dct_plugin.config import DataParallelConfig
from dct_plugin.host_traffic import own_traffic
from dct_plugin.kernels.reference import overflow_flags
from dct_plugin.transport import lost_ranks

logger = logging.getLogger("dct_plugin")


def collective_device() -> torch.device:
    """Return a device whose tensors the ranks can reduce, the same kind with and without gradients: the CPU
    if it can be, else this rank's accelerator.
    """
    kinds = [backend.partition(":")[0] for backend in str(dist.get_backend_config()).split(",")]
    kind = "cpu" if "cpu" in kinds else kinds[0]
    return (
        torch.device("cpu")
        if kind == "cpu"
        else torch.device(kind, torch.get_device_module(kind).current_device())
    )


class PoisonedSteps:
    """Check of the gradients of each step, as ``dct.data_parallel.nonfinite_action`` says.

    Residuals are rolled back by :meth:`~dct_plugin.data_parallel.GradientReducer.end_step`, which is to be
    told that the step was skipped.

    Args:
        config: The ``data_parallel`` settings.
        gradients: What the optimizer is about to use on this rank, by the parameters' names.
        agree: Whether other ranks may have other gradients: then all ranks of the job ask at the same time.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        gradients: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        agree: bool,
    ) -> None:
        self.skips = config.nonfinite_action == "skip"
        self._gradients, self._agree = gradients, agree
        self._count = 0

    def keep_from(self, optimizers: Iterable[torch.optim.Optimizer], step: int) -> bool:
        """Keep optimizers of torch from making step ``step`` if it is to be skipped; return whether it is.

        torch's optimizers leave parameters without gradients, and their states, alone.
        """
        skips = self.found(step)
        for group in (group for each in optimizers for group in each.param_groups) if skips else ():
            for parameter in group["params"]:
                parameter.grad = None
        return skips

    @own_traffic(recorded=False)
    def found(self, step: int) -> bool:
        """Return whether to skip step ``step``, the same on all ranks; a warning says why, at the first,
        second, fourth, ... such step.
        """
        if not self.skips:
            return False
        named = list(self._gradients())
        if not named and not self._agree:
            return False
        rank, nobody = dist.get_rank(), dist.get_world_size()
        flags = torch.zeros(0, dtype=torch.bool)
        if named:
            flags = overflow_flags([g._values() if g.is_sparse else g for _, g in named])
        speaker = torch.where(flags.any(), rank, nobody).view(1)
        if self._agree:
            speaker = speaker.to(collective_device())
            flags = flags.to(speaker.device)
            with lost_ranks.reported("agreement on a step that is not finite", step=step):
                dist.all_reduce(speaker, dist.ReduceOp.MIN)
        first, *found = to_host(torch.cat([speaker, flags.to(speaker)])).tolist()
        if first == nobody:
            return False
        names = [name for (name, _), flag in zip(named, found, strict=True) if flag]
        self._count += 1
        if rank == (first if self._agree else 0) and not self._count & (self._count - 1):
            logger.warning(
                "dct: rank %d: step %d is skipped on all ranks: the gradient of %s%s is not finite; skipped "
                "so far: %d",
                rank,
                step,
                ", ".join(names[:3]),
                f" and {len(names) - 3} more" if len(names) > 3 else "",
                self._count,
            )
        return True
