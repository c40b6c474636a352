"""The ``dlrm`` section of a configuration: what ``dct dlrm`` trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from dct_plugin.config import Section
from dct_plugin.config.validation_errors import validated
from dct_plugin.errors import ConfigError
from dct_plugin.integrations.dlrm import METHODS, Method

#: Section of a configuration that says what is trained; the rest is DeepSpeed's.
MODEL_SECTION = "dlrm"

Width = Annotated[int, Field(ge=1)]
Model = Literal["dlrm", "deepfm", "widedeep", "dcn"]
Exchange = Literal["all_to_all", "des", "auto"]
Tables = Literal["sharded", "replicated"]
MODELS: tuple[str, ...] = get_args(Model)
EXCHANGES: tuple[str, ...] = get_args(Exchange)

#: The settings of each model beside those of all.
WIDTHS = {
    "dlrm": ("bottom", "top"),
    "deepfm": ("hidden",),
    "widedeep": ("hidden",),
    "dcn": ("hidden", "depth"),
}


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
    """``dlrm``: model, widths, and how embeddings are exchanged and updated."""

    model: Model = Field(default="dlrm", description="Kind of model.")
    embedding_dim: int = Field(default=16, ge=1, description="Width of the tables.")
    bottom: list[Width] = _widths([128, 64], "Hidden widths of DLRM's bottom MLP.")
    top: list[Width] = _widths([256, 128], "Hidden widths of DLRM's top MLP.")
    hidden: list[Width] = _widths([256, 128], "Hidden widths of the other models' MLP.")
    depth: int = Field(default=6, ge=1, description="Cross layers of DCN.")
    tables: Tables = Field(default="sharded", description="Tables over the ranks, or all on every rank.")
    exchange: Exchange = Field(default="all_to_all", description="How embeddings reach the samples.")
    compression: float | None = Field(
        default=None, gt=0, description="How many times smaller the channel makes the all-to-all, for auto."
    )
    table_optimizer: TableOptimizer | None = Field(
        default=None, description="The tables' own method; null: DeepSpeed's optimizer has them as well."
    )
    sparse_gradients: bool = Field(default=False, description="Sparse gradients of the tables (ZeRO-0 only).")

    @property
    def widths(self) -> dict[str, Any]:
        """Settings of the model itself, those that were given."""
        return {name: getattr(self, name) for name in WIDTHS[self.model] if name in self.model_fields_set}


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
    made = validated(ModelSettings, section, MODEL_SECTION, where=source)
    other = {name for names in WIDTHS.values() for name in names} - set(WIDTHS[made.model])
    if wrong := sorted(other & made.model_fields_set):
        raise ConfigError(
            f"{source}: {MODEL_SECTION}.{wrong[0]} is no setting of model {made.model!r}; "
            f"it has {', '.join(WIDTHS[made.model])}"
        )
    if made.tables == "replicated":
        for name in ("exchange", "compression", "table_optimizer", "sparse_gradients"):
            if getattr(made, name) != ModelSettings.model_fields[name].default:
                raise ConfigError(
                    f"{source}: {MODEL_SECTION}.{name} = {getattr(made, name)!r} is for sharded tables, and "
                    f'{MODEL_SECTION}.tables = "replicated"'
                )
        if made.model != "dlrm":
            raise ConfigError(
                f"{source}: {MODEL_SECTION}.tables = \"replicated\" is for model 'dlrm', not {made.model!r}"
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
