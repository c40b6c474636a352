"""DCT-DP: gradients between data-parallel ranks, thresholded, with error feedback.

Source: Gupta et al., KDD 2021, section 3. The paper's parameter server is sharded over the ranks: every rank
owns a part of each large gradient, sums what the ranks send it, thresholds the sum with a residual of its own
and sends the result to all (``two_phase``). With few ranks it is cheaper that everybody sends everybody
(``direct``). Under ZeRO-1/2 the owner is the rank that holds the optimizer partition, and only the first half
is needed (``reduce_scatter``).

All ranks decode the same bytes in the same order, their own included, so results are bitwise identical
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DataParallelConfig, DCTConfig
from ..metrics import Metrics
from .plan import Shard
from .reducer import GradientReducer

__all__ = ["DCTState", "GradientReducer", "Shard", "dct_hook"]


# -- torch DDP ---


class DCTState:
    """State of :func:`dct_hook`: the reducer, and which stream each parameter belongs to.

    Streams follow parameters, so residuals survive the bucket rebuild after DDP's first step.

    Args:
        config: The configuration, its ``data_parallel`` settings, or a mapping with the keys of the ``dct``
            section.
        process_group: The group that DDP averages over; None for the default one.
        named_parameters: ``model.named_parameters()``, to name streams in messages and saved states; without
            it they are numbered in the order in which DDP first reduces them (the same on every rank).
        metrics: Where to record; None makes one from the configuration.

    Raises:
        ConfigError: The configuration is wrong.

    Example:
        >>> state = DCTState({"data_parallel": {"sparsity": 0.99}})
        >>> ddp_model.register_comm_hook(state, dct_hook)
    """

    def __init__(
        self,
        config: DCTConfig | DataParallelConfig | Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        metrics: Metrics | None = None,
    ) -> None:
        rank = dist.get_rank(process_group)
        if isinstance(config, DataParallelConfig):
            config = DCTConfig(data_parallel=config)
        self.config = DCTConfig.parse({} if config is None else config, rank=dist.get_rank())
        world_size = dist.get_world_size(process_group)
        self.metrics = metrics or Metrics(self.config.metrics, rank=rank, world_size=world_size)
        self.process_group = process_group
        self._names: dict[int, str] = {id(parameter): name for name, parameter in named_parameters}
        self._reducer: GradientReducer | None = None
        self._loaded: dict[str, Any] | None = None

    def reducer(self, device: torch.device) -> GradientReducer:
        """The reducer, made when the first bucket tells the device."""
        if self._reducer is None:
            self._reducer = GradientReducer(
                self.config.data_parallel,
                self.process_group,
                metrics=self.metrics,
                device=device,
                kernels=self.config.kernels,
            )
            if self._loaded is not None:
                self._reducer.load_state_dict(self._loaded)
        return self._reducer

    def name_of(self, parameter: Tensor) -> str:
        """Name of the parameter's stream."""
        return self._names.setdefault(id(parameter), f"parameter_{len(self._names):04d}")

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters of this rank; save one per rank."""
        return {"reducer": self._loaded if self._reducer is None else self._reducer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` of the same rank."""
        self._loaded = state["reducer"]
        if self._reducer is not None and self._loaded is not None:
            self._reducer.load_state_dict(self._loaded)


def dct_hook(state: DCTState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook for ``torch.nn.parallel.DistributedDataParallel``.

    Communicates, per parameter of the bucket, the entries of gradient plus residual that reach the
    parameter's threshold, and returns the bucket's buffer (1-D, type and size unchanged) holding their
    average over the ranks.

    Args:
        state: Made once per model.
        bucket: What DDP hands over.

    Raises:
        TypeError: The bucket holds sparse gradients (``nn.Embedding(sparse=True)``).
    """
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise TypeError("dct_hook reduces dense gradients; use nn.Embedding(sparse=False) with it")
    reducer = state.reducer(buffer.device)
    parameters = bucket.parameters()
    views = buffer.split([parameter.numel() for parameter in parameters])
    entries = [(state.name_of(p), view) for p, view in zip(parameters, views, strict=True)]
    reducer.all_reduce(entries, scale=1.0 / reducer.world_size)
    if bucket.is_last():
        reducer.end_step()
        state.metrics.step(reducer.step)
    devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


# DDP checks the annotations of a hook as objects, not as the strings they are in this file.
dct_hook.__annotations__.update(bucket=dist.GradBucket)
dct_hook.__annotations__["return"] = torch.futures.Future[Tensor]
