"""A DeepSpeed engine: its support, its facts, and the interface of everything that the plugin adds to it.

Everything that is patched, called or read is listed with the parameters that it is expected to have, here or
with the path that needs it. A DeepSpeed that changed one of them is refused with a message: otherwise it
would train on without the plugin, or wrongly.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from dct_plugin.config import DCTConfig
from dct_plugin.embedding import TableShard
from dct_plugin.metrics import Metrics

from ..host import versions
from ..host.patching import Patches
from ..host.steps import StepHooks
from ..host.versions import TESTED, Target, VersionRange, unsupported
from .section import Job, configuration_of, gradient_path_of_optimizer, inner_optimizer


@dataclass
class EngineContext:
    """The engine that the parts are added to, and what they share.

    Attributes:
        engine: DeepSpeed's engine.
        config: The ``dct`` section as it is applied to this engine.
        metrics: Records bytes, densities and times.
        steps: The steps of the engine's optimizer.
    """

    engine: Any
    config: DCTConfig
    metrics: Metrics
    steps: StepHooks


class EnginePart:
    """Something that the plugin adds to an engine."""

    def install(self, patches: Patches) -> None:
        """Patch the engine or its optimizer: these instances, not their classes."""

    def before_step(self) -> None:
        """Prepare an optimizer step."""

    def after_step(self) -> None:
        """Complete an optimizer step, before it is counted."""

    def close(self) -> None:
        """Release what the part holds; the engine is being destroyed."""


SUPPORTED = VersionRange("0.19.0", "0.20.0")
_SUPPORTED = f"{SUPPORTED} (tested: {', '.join(TESTED['deepspeed'])})"
_REMEDY = "install a supported DeepSpeed, update dct-plugin, or set dct.enabled to false to train without it"


def targets_of(module: str, cls: str, **methods: str) -> tuple[Target, ...]:
    """Return the targets for methods of a class.

    Args:
        module, cls: The module and the name of the class.
        methods: By name, the leading parameters after ``self``, separated by spaces.
    """
    return tuple(Target(module, f"{cls}.{name}", f"self {after}") for name, after in methods.items())


#: What is replaced, wrapped or called in every engine.
ENGINE_TARGETS = targets_of(
    "deepspeed.runtime.engine",
    "DeepSpeedEngine",
    _take_model_step="lr_kwargs",
    save_checkpoint="save_dir tag client_state save_latest",
    load_checkpoint=(
        "load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only"
    ),
    destroy="",
    zero_optimization_stage="",
    zero_hpz_partition_size="",
    fp16_enabled="",
    bfloat16_enabled="",
)

#: Wrappers of engines without an optimizer.
_NO_OPTIMIZER = ("DummyOptim", "DeepSpeedZeRoOffload")


def require_targets(targets: Iterable[Target]) -> None:
    """Stop unless all targets are what they are expected to be.

    Raises:
        VersionError: Names every target that is not.
    """
    versions.require(targets, f"DeepSpeed {deepspeed.__version__}", _SUPPORTED, _REMEDY)


def check_version(version: str) -> None:
    """Check that this is a supported DeepSpeed, and that its engine is the known one.

    Raises:
        VersionError: Says what was found, what is supported and what to do.
    """
    if version not in SUPPORTED:
        raise unsupported(f"DeepSpeed {version}", _SUPPORTED, _REMEDY)
    require_targets(ENGINE_TARGETS)


@contextlib.contextmanager
def supported(engine: Any) -> Iterator[None]:
    """Check DeepSpeed's version, and surround what reads attributes of an engine and its optimizer.

    Raises:
        VersionError: See :func:`check_version`; or names the attribute that is missing.
    """
    check_version(deepspeed.__version__)
    try:
        yield
    except AttributeError as error:
        for word, owner in ("engine", engine), ("optimizer", engine.__dict__.get("optimizer")):
            if owner is not None and error.obj is owner:
                found, faults = f"DeepSpeed {deepspeed.__version__}", f"{word}.{error.name}"
                why = "lacks what dct-plugin reads"
                raise unsupported(found, _SUPPORTED, _REMEDY, why=why, faults=faults) from error
        raise


def job_of(engine: Any, path: Any = None) -> Job:
    """Return what :mod:`.rules` judges of an engine; ``path`` is the class of its gradient path."""
    optimizer, slot = inner_optimizer(engine), gradient_path_of_optimizer(engine) is not None
    groups = getattr(optimizer, "param_groups", ())
    # As DeepSpeed has read them: its sections have older forms, too.
    read = {
        "zero_optimization": engine._config.zero_config.model_dump(mode="python"),
        "compile": engine._config.compile_config.model_dump(mode="python"),
    }
    return replace(
        Job.of_json({**(configuration_of(engine) or {}), **read}),
        stage=int(engine.zero_optimization_stage()),
        precision=precision_of(engine),
        optimizer="" if optimizer is None else type(optimizer).__name__,
        momentum=max((float(group.get("momentum", 0.0)) for group in groups), default=0.0),
        steps=None,
        trains=has_optimizer(engine),
        exchanges_momentum=slot,
        own_backend=None if slot else getattr(optimizer, "comm_backend_name", None),
        pipeline=is_pipeline(engine),
        tied_weights=bool(tied_weights(engine)),
        experts=bool(engine.has_moe_layers),
        tables=any(
            isinstance(module, TableShard) and not is_expert(module.weight)
            for module in engine.module.modules()
        ),
        gathers_weights=path is not None and path.weight_layout is not None,
        wrapper=type(engine.optimizer).__name__ if path is None and has_optimizer(engine) else "",
        engine=_unsupported_class(engine),
        model_parallel=_model_parallel(engine),
        sequence_ranks=size if (size := int(getattr(engine, "sequence_parallel_size", 1))) > 1 else 0,
    )


def has_optimizer(engine: Any) -> bool:
    """Return whether the engine trains."""
    optimizer = engine.__dict__.get("optimizer")
    return optimizer is not None and type(optimizer).__name__ not in _NO_OPTIMIZER


def is_expert(parameter: Any) -> bool:
    """Return whether DeepSpeed treats the parameter as an expert's, reduced over a group of its own."""
    return not getattr(parameter, "allreduce", True)


def is_pipeline(engine: Any) -> bool:
    """Return whether it is DeepSpeed's pipeline engine."""
    return isinstance(engine, PipelineEngine)


def tied_weights(engine: Any) -> list[tuple[Tensor, dist.ProcessGroup]]:
    """Return the weights that stages of a pipeline have in common, and the ranks of each; none without a
    pipeline.
    """
    return engine.module.get_tied_weights_and_groups() if is_pipeline(engine) else []


def precision_of(engine: Any) -> str:
    """Return ``"fp16"``, ``"bf16"`` or ``"fp32"``."""
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"


def _unsupported_class(engine: Any) -> str:
    """Return the name of an engine class of DeepSpeed that is not supported; empty for the others."""
    derived = itertools.takewhile(lambda cls: cls is not DeepSpeedEngine, type(engine).__mro__)
    others = (cls for cls in derived if cls.__module__.startswith("deepspeed.") and cls is not PipelineEngine)
    return next((cls.__name__ for cls in others), "")


def _model_parallel(engine: Any) -> str:
    """Return how ranks share the model, in words; empty where every rank or stage is data parallel."""
    size, world_size = dist.get_world_size(engine.seq_data_parallel_group), dist.get_world_size()
    stages = int(engine.num_stages) if is_pipeline(engine) else 1
    if size * stages == world_size:
        return ""
    in_stages = f" in {stages} pipeline stages" if stages > 1 else ""
    return f"a data-parallel group of {size} of {world_size} ranks{in_stages} (tensor or model parallelism)"
