"""A compressed all-to-all for facebookresearch/dlrm: takes the place of ``extend_distributed.alltoall``.

    import extend_distributed as ext_dist
    from facebook_dlrm import CompressedAllToAll  # this file, beside the script

    dlrm.exchange = CompressedAllToAll(dlrm.n_local_emb, m_spa, {"error_bound": 0.01})
    dlrm.exchange.install(ext_dist)
    dlrm.exchange.embedding_exchange.follow(optimizer)  # thresholds count its steps

It is a sub-module of the model, so its thresholds are saved with the model. The exchange is finished when
the call returns, so the bottom MLP does not overlap with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_plugin.config import EmbeddingChannelConfig, KernelConfig
from dct_plugin.embedding import EmbeddingExchange, Route
from dct_plugin.metrics import Metrics


class CompressedAllToAll(nn.Module):
    """Vectors of the local tables for the global batch -> vectors of all tables for the local batch.

    Args:
        num_tables: Tables of this rank.
        dim: Embedding width.
        config: ``dct.embedding``, or a mapping with its keys. Rows are not de-duplicated one by one (the ids
            are not known here).
        group: Process group, None for the default one.
        metrics: Records what crosses.
        kernels: ``dct.kernels``; the defaults when None.
    """

    def __init__(
        self,
        num_tables: int,
        dim: int,
        config: EmbeddingChannelConfig | Mapping[str, Any] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        metrics: Metrics | None = None,
        kernels: KernelConfig | None = None,
    ) -> None:
        super().__init__()
        keys = config.model_dump() if isinstance(config, EmbeddingChannelConfig) else dict(config or {})
        settings = EmbeddingChannelConfig.of({**keys, "deduplicate": False})
        self.embedding_exchange = EmbeddingExchange(
            settings, tables=num_tables, dim=dim, name="alltoall", metrics=metrics, kernels=kernels
        )
        self.group = group

    def install(self, extend_distributed: ModuleType) -> None:
        """Replace the module's ``alltoall``."""
        extend_distributed.alltoall = self.alltoall  # type: ignore[attr-defined]

    def alltoall(self, inputs: Sequence[Tensor], per_rank_split_lengths: Sequence[int] | None) -> _Done:
        """Exchange now; ``wait()`` returns the result.

        Args:
            inputs: One tensor [N, dim] for each local table; N is the global batch.
            per_rank_split_lengths: Tables of each rank; None if all have as many.
        """
        return _Done(self(inputs, per_rank_split_lengths))

    def forward(
        self, inputs: Sequence[Tensor], per_rank_split_lengths: Sequence[int] | None
    ) -> tuple[Tensor, ...]:
        """Return [n, tables of rank r times dim] for every rank r; n are the local samples."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        tables = list(per_rank_split_lengths or [len(inputs)] * ranks)
        share, more = divmod(len(inputs[0]), ranks)
        samples = [share + (r < more) for r in range(ranks)]
        stacked = torch.stack(list(inputs))  # [tables, N, dim]
        blocks = [part.reshape(-1, stacked.shape[2]) for part in stacked.split(samples, dim=1)]
        route = Route(
            sent_tables=[list(range(len(inputs)))] * ranks,
            sent_rows=[[n] * len(inputs) for n in samples],
            received_rows=[[samples[rank]] * count for count in tables],
            samples=samples,
            own_tables=tables,
        )
        self.embedding_exchange.train(torch.is_grad_enabled())
        received = self.embedding_exchange(torch.cat(blocks), route, self.group)
        parts = received.split([count * samples[rank] for count in tables])
        return tuple(
            part.view(count, samples[rank], -1).transpose(0, 1).reshape(samples[rank], -1)
            for part, count in zip(parts, tables, strict=True)
        )


class _Done:
    """The handle that the all-to-all of that code returns."""

    def __init__(self, result: tuple[Tensor, ...]) -> None:
        self._result = result

    def wait(self) -> tuple[Tensor, ...]:
        return self._result
