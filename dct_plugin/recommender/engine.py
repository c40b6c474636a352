"""A DeepSpeed engine for what the ``dlrm`` section of a configuration says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from torch import nn

from dct_plugin.config import DCTConfig, EmbeddingChannelConfig
from dct_plugin.embedding import Choice, ShardedTables
from dct_plugin.integrations.dlrm.experts import Experts
from dct_plugin.integrations.dlrm.optimizers import HybridOptimizer, hybrid_groups
from dct_plugin.metrics import Metrics

from .data import ClickDataset
from .models import DLRM, TableExchange, build
from .models.parts import seeded
from .settings import MODEL_SECTION, ModelSettings, model_settings

#: ``dct.embedding`` of a run without a ``dct`` section: a plain all-to-all of every vector.
PLAIN = {"enabled": False, "deduplicate": False}


def make_engine(
    name: str, config: Mapping[str, Any], clicks: ClickDataset, *, seed: int, metrics: Metrics
) -> tuple[Any, list[Choice], list[str]]:
    """An engine, how each part of its model exchanges embeddings, and what there is to say about that.

    Args:
        name: Of the configuration.
        config: DeepSpeed JSON with a ``dct`` and a ``dlrm`` section.
        clicks: Data, for the sizes of the tables.
        seed: Of the initial weights.
        metrics: Of the sharded tables.

    Raises:
        ConfigError: A section is wrong.
    """
    settings = model_settings(config, name)
    content = {key: value for key, value in config.items() if key != MODEL_SECTION}
    choices: list[Choice] = []
    notes: list[str] = []
    if settings.tables == "replicated":
        widths = {"embedding_dim": settings.embedding_dim, **settings.widths}
        model: nn.Module = DLRM(clicks.dense.shape[1], clicks.cardinalities, **widths, seed=seed)
    else:
        dct = config.get("dct")
        sections = DCTConfig.parse({"embedding": PLAIN} if dct is None else dct)
        model, choices, notes = _sharded_model(settings, sections, clicks, seed, metrics)
    optimizer = None
    if settings.table_optimizer is not None:
        optimizer = _two_optimizers(model, settings, content.pop("optimizer"))
    engine, *_ = deepspeed.initialize(
        model=model,
        config=content,
        optimizer=optimizer,
        model_parameters=None if optimizer else [p for p in model.parameters() if p.requires_grad],
    )
    if isinstance(model, Experts):
        model.follow(engine.optimizer)
    return engine, choices, notes


def _sharded_model(
    settings: ModelSettings, sections: DCTConfig, clicks: ClickDataset, seed: int, metrics: Metrics
) -> tuple[nn.Module, list[Choice], list[str]]:
    """A model with tables behind an all-to-all or in shards."""

    def make_tables(cardinalities: Sequence[int], dim: int, table_seed: int, tables: str) -> nn.Module:
        with seeded(table_seed):
            return ShardedTables(
                cardinalities,
                dim,
                config=sections.embedding,
                sparse=settings.sparse_gradients,
                average_gradients=False,  # DeepSpeed does that
                name=tables,
                metrics=metrics,
                kernels=sections.kernels,
            )

    model, choices = build(
        settings.model,
        clicks.dense.shape[1],
        clicks.cardinalities,
        embedding_dim=settings.embedding_dim,
        seed=seed,
        exchange=TableExchange(
            settings.exchange,
            make_tables,
            compression=settings.compression or 1.0,
            average_gradients=False,
            metrics=metrics,
        ),
        **settings.widths,
    )
    notes = []
    if settings.exchange == "auto" and settings.compression is None and _compresses(sections.embedding):
        notes.append(
            "(N*K)/(T*m) counts uncompressed vectors, but compression makes the all-to-all smaller: "
            f"measure how much with exchange = all_to_all and give it as {MODEL_SECTION}.compression"
        )
    return Experts(model), choices, notes


def _two_optimizers(
    model: nn.Module, settings: ModelSettings, section: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """One optimizer of the tables' own method for them, and of DeepSpeed's ``section`` for all else."""
    assert settings.table_optimizer is not None
    rest = {k: v for k, v in section.get("params", {}).items() if k in ("lr", "betas", "eps")}
    rest["method"] = section["type"].lower()
    return HybridOptimizer(hybrid_groups(model, tables=settings.table_optimizer.model_dump(), rest=rest))


def _compresses(channel: EmbeddingChannelConfig) -> bool:
    """Return whether fewer bytes cross than the vectors have."""
    lossy = channel.sparsity > 0 or channel.error_bound is not None or channel.gradient_bound is not None
    return channel.enabled and (channel.deduplicate or lossy)
