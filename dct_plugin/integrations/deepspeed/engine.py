"""A DeepSpeed engine: its support, its facts, and the interface of everything that the plugin adds to it.

Everything that is patched, called or read is listed with the parameters that it is expected to have, here or
with the path that needs it. A DeepSpeed that changed one of them is refused with a message: otherwise it
would train on without the plugin, or wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from dct_plugin.config import DCTConfig
from dct_plugin.errors import VersionError
from dct_plugin.metrics import Metrics

from ..host import versions
from ..host.patching import Patches
from ..host.steps import StepHooks
from ..host.versions import TESTED, Target, VersionRange, unsupported
from .section import Job, gradient_path_of_optimizer, inner_optimizer


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
    return tuple(
        Target(module, f"{cls}.{name}", ("self", *parameters.split())) for name, parameters in methods.items()
    )


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
)
ENGINE_ATTRIBUTES = (
    "optimizer", "module", "monitor", "device", "global_rank", "global_steps", "gradient_average",
    "communication_data_type", "postscale_gradients", "gradient_predivide_factor", "has_moe_layers",
    "seq_data_parallel_group",
)  # fmt: skip

#: Wrappers of engines without an optimizer.
_NO_OPTIMIZER = ("DummyOptim", "DeepSpeedZeRoOffload")


def require_targets(targets: Iterable[Target]) -> None:
    """Stop unless all targets are what they are expected to be.

    Raises:
        VersionError: Names every target that is not.
    """
    versions.require(targets, f"DeepSpeed {deepspeed.__version__}", _SUPPORTED, _REMEDY)


def require_attributes(**owners: tuple[Any, Sequence[str]]) -> None:
    """Stop unless all objects have the attributes that are read.

    Args:
        owners: By the word for the object, the object and the names of its attributes.

    Raises:
        VersionError: Names every attribute that is missing.
    """
    missing = [
        f"{word}.{name}" for word, (owner, names) in owners.items() for name in names if not _has(owner, name)
    ]
    if missing:
        raise VersionError(
            f"DeepSpeed {deepspeed.__version__}: {', '.join(missing)} missing; this version is not supported "
            f"by dct-plugin; supported: {_SUPPORTED}"
        )


def check_version(version: str) -> None:
    """Check that this is a supported DeepSpeed, and that its engine is the known one.

    Raises:
        VersionError: Says what was found, what is supported and what to do.
    """
    if version not in SUPPORTED:
        raise unsupported(f"DeepSpeed {version}", _SUPPORTED, _REMEDY)
    require_targets(ENGINE_TARGETS)


def job_of(engine: Any, path: Any = None) -> Job:
    """Return what :mod:`.rules` judges of an engine; ``path`` is the class of its gradient path."""
    optimizer, slot = inner_optimizer(engine), gradient_path_of_optimizer(engine) is not None
    groups = getattr(optimizer, "param_groups", ())
    autocast = _calls(engine, "torch_autocast_enabled") and engine.torch_autocast_dtype() == torch.float16
    loose = not getattr(engine.optimizer, "contiguous_gradients", True)
    return Job(
        stage=int(engine.zero_optimization_stage()),
        precision=precision_of(engine),
        optimizer="" if optimizer is None else type(optimizer).__name__,
        momentum=max((float(group.get("momentum", 0.0)) for group in groups), default=0.0),
        trains=has_optimizer(engine),
        exchanges_momentum=slot,
        own_backend=None if slot else getattr(optimizer, "comm_backend_name", None),
        pipeline=is_pipeline(engine),
        tied_weights=bool(tied_weights(engine)),
        experts=bool(engine.has_moe_layers),
        gathers_weights=path is not None and path.weight_layout is not None,
        wrapper=type(engine.optimizer).__name__ if path is None and has_optimizer(engine) else "",
        engine=_unsupported_class(engine),
        offload=tuple(_offload(engine)),
        model_parallel=_model_parallel(engine),
        sequence_ranks=int(getattr(engine, "sequence_parallel_size", 1)),
        quantized_gradients=_calls(engine, "zero_quantized_gradients"),
        zenflow=bool(getattr(engine, "zenflow", False)),
        deepcompile=_calls(engine, "is_deepcompile_enabled"),
        autoep=getattr(engine, "_autoep_folding_spec", None) is not None,
        autocast_fp16=autocast,
        ranks_per_copy=engine.zero_hpz_partition_size(),
        separate_gradients=loose and not reduces_loose_gradients(engine.device),
        version=deepspeed.__version__,
    )


def has_optimizer(engine: Any) -> bool:
    """Return whether the engine trains."""
    return engine.optimizer is not None and type(engine.optimizer).__name__ not in _NO_OPTIMIZER


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


def reduces_loose_gradients(device: torch.device) -> bool:
    """Return whether this DeepSpeed's ZeRO-1 and 2 reduce gradients that are not contiguous.

    Older versions do not on CPU.
    """
    return device.type != "cpu" or bool(stage_1_and_2.split_half_float_double([torch.zeros(1)]))


def _unsupported_class(engine: Any) -> str:
    """Return the name of an engine class of DeepSpeed that is not supported; empty for the others."""
    for cls in type(engine).__mro__:
        if cls is DeepSpeedEngine:
            break
        if cls.__module__.startswith("deepspeed.") and cls is not PipelineEngine:
            return cls.__name__
    return ""


def _offload(engine: Any) -> Iterator[tuple[str, str]]:
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(getattr(engine, f"zero_{key}")(), "device", None)
        name = str(getattr(device, "value", device))
        if device is not None and name != "none":
            yield key, name


def _model_parallel(engine: Any) -> str:
    """Return how ranks share the model, in words; empty where every rank or stage is data parallel."""
    size, world_size = dist.get_world_size(engine.seq_data_parallel_group), dist.get_world_size()
    stages = int(engine.num_stages) if is_pipeline(engine) else 1
    if size * stages == world_size:
        return ""
    in_stages = f" in {stages} pipeline stages" if stages > 1 else ""
    return f"a data-parallel group of {size} of {world_size} ranks{in_stages} (tensor or model parallelism)"


def _calls(engine: Any, name: str) -> bool:
    return _has(engine, name) and bool(getattr(engine, name)())


def _has(owner: Any, name: str) -> bool:
    # Engine attributes that are missing fall through to the user's model, whose __getattr__ may raise
    # anything.
    try:
        getattr(owner, name)
    except Exception:
        return False
    return True
