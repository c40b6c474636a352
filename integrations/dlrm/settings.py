"""The ``dlrm`` section of a configuration: what ``dct dlrm`` trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from dct_plugin.config import Section
from dct_plugin.errors import ConfigError

#: Section of a configuration that says what is trained; the rest is DeepSpeed's.
MODEL_SECTION = "dlrm"

Width = Annotated[int, Field(ge=1)]
Tables = Literal["sharded", "replicated"]
Method = Literal["sgd", "adam", "adagrad", "rowwise_adagrad"]
METHODS: tuple[str, ...] = get_args(Method)

#: Keys that went with other models and exchanges.
GONE = ("model", "exchange", "compression", "hidden", "depth")
INSTEAD = (
    "the model is DLRM, whose vectors cross in an all-to-all (docs/embeddings.md has tables for another)"
)


def _widths(default: list[int], description: str) -> Any:
    return Field(
        default=default, description=description, json_schema_extra={"allowed": "a list of integers >= 1"}
    )


class TableOptimizer(Section):
    """``dlrm.table_optimizer``: the tables' own method."""

    method: Method = Field(default="rowwise_adagrad", description="How tables are updated.")
    lr: float = Field(default=0.02, ge=0, description="Learning rate.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False, description="Of Adam.")
    eps: float | None = Field(default=None, gt=0, description="As in torch.optim.")


class ModelSettings(Section):
    """``dlrm``: widths, and where embeddings are and how they are updated."""

    embedding_dim: int = Field(default=16, ge=1, description="Width of the tables.")
    bottom: list[Width] = _widths([128, 64], "Hidden widths of the bottom MLP.")
    top: list[Width] = _widths([256, 128], "Hidden widths of the top MLP.")
    tables: Tables = Field(default="sharded", description="Tables over the ranks, or all on every rank.")
    table_optimizer: TableOptimizer | None = Field(
        default=None, description="The tables' own method; null: DeepSpeed's optimizer has them as well."
    )
    sparse_gradients: bool = Field(default=False, description="Sparse gradients of the tables (ZeRO-0 only).")


def model_settings(config: Mapping[str, Any], source: str) -> ModelSettings:
    """The ``dlrm`` section of a DeepSpeed JSON, checked against the rest of it.

    Args:
        config: The whole configuration.
        source: Its file, for errors.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    section = config.get(MODEL_SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{source}: {MODEL_SECTION} must be a JSON object")
    if gone := [key for key in GONE if key in section]:
        raise ConfigError(
            f"{source}: {MODEL_SECTION}.{gone[0]}: no such key any more, leave it out: {INSTEAD}"
        )
    made = ModelSettings.read(section, MODEL_SECTION, where=source)
    if made.tables == "replicated":
        for name in ("table_optimizer", "sparse_gradients"):
            if getattr(made, name) != ModelSettings.model_fields[name].default:
                raise ConfigError(
                    f"{source}: {MODEL_SECTION}.{name} = {getattr(made, name)!r} is for sharded tables, and "
                    f'{MODEL_SECTION}.tables = "replicated"'
                )
        return made
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1):
        raise ConfigError(
            f"{source}: zero_optimization.stage = {stage!r}: sharded tables need ZeRO stage 0 or 1; each "
            "rank owns the gradients and states of its tables already"
        )
    if made.sparse_gradients and stage:
        raise ConfigError(
            f"{source}: {MODEL_SECTION}.sparse_gradients = true needs ZeRO stage 0, not {stage}"
        )
    if made.table_optimizer is not None:
        kind = str(config.get("optimizer", {}).get("type", "Adam"))
        if kind.lower() not in METHODS:
            raise ConfigError(
                f"{source}: optimizer.type = {kind!r}: beside {MODEL_SECTION}.table_optimizer it must be one "
                f"of {', '.join(METHODS)}"
            )
    return made
