"""A DeepSpeed engine for what the ``dlrm`` section of a configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import nn

from dct_plugin.config import DCTConfig
from dct_plugin.embedding import ShardedTables
from dct_plugin.metrics import Metrics

from .data import ClickDataset
from .experts import Experts
from .models import DLRM, seeded
from .optimizers import HybridOptimizer, hybrid_groups
from .settings import MODEL_SECTION, ModelSettings, model_settings

#: ``dct.embedding`` of a run without a ``dct`` section: a plain all-to-all of every vector.
PLAIN = {"enabled": False, "deduplicate": False}


def make_engine(
    name: str, config: Mapping[str, Any], clicks: ClickDataset, *, seed: int, metrics: Metrics
) -> Any:
    """Return an engine.

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
    tables = None
    if settings.tables == "sharded":
        dct = config.get("dct")
        sections = DCTConfig.parse({"embedding": PLAIN} if dct is None else dct)
        with seeded(seed):
            tables = ShardedTables(
                clicks.cardinalities,
                settings.embedding_dim,
                config=sections.embedding,
                sparse=settings.sparse_gradients,
                average_gradients=False,  # DeepSpeed does that
                name="embedding",
                metrics=metrics,
                kernels=sections.kernels,
            )
    model: nn.Module = DLRM(
        clicks.dense.shape[1],
        clicks.cardinalities,
        embedding_dim=settings.embedding_dim,
        bottom=settings.bottom,
        top=settings.top,
        tables=tables,
        seed=seed,
    )
    if tables is not None:
        model = Experts(model)
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
    return engine


def _two_optimizers(
    model: nn.Module, settings: ModelSettings, section: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """One optimizer of the tables' own method for them, and of DeepSpeed's ``section`` for all else."""
    assert settings.table_optimizer is not None
    rest = {k: v for k, v in section.get("params", {}).items() if k in ("lr", "betas", "eps")}
    rest["method"] = section["type"].lower()
    return HybridOptimizer(hybrid_groups(model, tables=settings.table_optimizer.model_dump(), rest=rest))
