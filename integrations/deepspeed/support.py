"""Which DeepSpeed and which combinations of its features are supported; checked before anything is patched.

Everything that is patched, called or read is listed with the parameters that it is expected to have, here or
with the path that needs it. A DeepSpeed that changed one of them is refused with a message: otherwise it
would train on without the plugin, or wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from dct_plugin.errors import ConfigError, VersionError

from ..host import signatures
from ..host.signatures import Target
from ..host.versions import VersionRange, parse, unsupported
from .section import SECTION, gradient_path_of_optimizer, inner_optimizer

SUPPORTED = VersionRange("0.19.0", "0.20.0")
#: Versions that ran: the last one the whole suite, the others every kind of hook.
TESTED = ("0.19.0", "0.19.4", "0.19.8")

_SUPPORTED = f"{SUPPORTED} (tested: {', '.join(TESTED)})"
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
    signatures.require(targets, f"DeepSpeed {deepspeed.__version__}", _SUPPORTED, _REMEDY)


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
            f"by dct-plugin (tested: {', '.join(TESTED)})"
        )


def check_version(version: str) -> None:
    """Check that this is a supported DeepSpeed, and that its engine is the known one.

    Raises:
        VersionError: Says what was found, what is supported and what to do.
    """
    if version not in SUPPORTED:
        raise unsupported(f"DeepSpeed {version}", _SUPPORTED, _REMEDY)
    require_targets(ENGINE_TARGETS)


def check_engine(engine: Any) -> None:
    """Check that the engine's combination of features is supported.

    Raises:
        ConfigError: Names the combination, the key that asks for it, and what is supported.
    """
    for reason in _unsupported(engine):
        raise refused(engine, reason)


def refused(engine: Any, reason: str) -> ConfigError:
    """Return the error for an engine that is not supported.

    Args:
        engine: DeepSpeed's engine.
        reason: The feature that is not supported, and the key that asks for it.
    """
    return ConfigError(
        f"rank {engine.global_rank}: dct does not support {reason}. Supported is DeepSpeed's ordinary "
        "engine with ZeRO stage 0 to 3 in fp32, bf16 or fp16, data parallel over all ranks, or its "
        "pipeline engine with ZeRO stage 0 or 1, without offload; set dct.enabled to false to train "
        "without it"
    )


def has_optimizer(engine: Any) -> bool:
    """Return whether the engine trains."""
    return engine.optimizer is not None and type(engine.optimizer).__name__ not in _NO_OPTIMIZER


def is_pipeline(engine: Any) -> bool:
    """Return whether it is DeepSpeed's pipeline engine."""
    return isinstance(engine, PipelineEngine)


def tied_weights(engine: Any) -> list[Tensor]:
    """Return the weights that stages of a pipeline have in common; none without a pipeline."""
    if not is_pipeline(engine):
        return []
    return [weight for weight, _ in engine.module.get_tied_weights_and_groups()]


def precision_of(engine: Any) -> str:
    """Return ``"fp16"``, ``"bf16"`` or ``"fp32"``."""
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"


def known_fault(engine: Any) -> str:
    """Return what DeepSpeed itself does wrong here, with or without the plugin; mostly empty."""
    version = deepspeed.__version__
    if engine.fp16_enabled() and int(engine.zero_optimization_stage()) == 0 and parse(version) <= (0, 19, 8):
        return (
            f"DeepSpeed {version} divides gradients by the loss scale in fp16 at ZeRO stage 0, but "
            "engine.backward() does not multiply the loss by it (deepspeedai/DeepSpeed#8393): parameters "
            "hardly move, with or without dct. Use ZeRO stage 1, or bf16"
        )
    if not reduces_loose_gradients(engine.device) and not getattr(
        engine.optimizer, "contiguous_gradients", True
    ):
        return (
            f"DeepSpeed {version} reduces no gradients on CPU with zero_optimization.contiguous_gradients = "
            "false: the ranks train apart, with or without dct. Set it to true"
        )
    return ""


def reduces_loose_gradients(device: torch.device) -> bool:
    """Return whether this DeepSpeed's ZeRO-1 and 2 reduce gradients that are not contiguous.

    Older versions do not on CPU.
    """
    return device.type != "cpu" or bool(stage_1_and_2.split_half_float_double([torch.zeros(1)]))


def _unsupported(engine: Any) -> Iterator[str]:
    """Yield the combinations that are refused, worst first."""
    for cls in type(engine).__mro__:
        if cls is DeepSpeedEngine:
            break
        if cls.__module__.startswith("deepspeed.") and cls is not PipelineEngine:
            yield f"the engine {cls.__name__} (hybrid engine, DualPipeV)"
    if _calls(engine, "zero_quantized_gradients"):
        yield (
            "zero_optimization.zero_quantized_gradients = true: DeepSpeed quantises the gradients that dct "
            "thresholds"
        )
    for key in ("offload_optimizer", "offload_param"):
        offload = getattr(engine, f"zero_{key}")()
        device = getattr(offload, "device", None)
        if device is not None and str(getattr(device, "value", device)) != "none":
            yield f"offloading (zero_optimization.{key}.device = {getattr(device, 'value', device)})"
    if getattr(engine, "zenflow", False):
        yield "ZenFlow (zero_optimization.zenflow)"
    yield from _unsupported_optimizer(engine)
    sequence = int(getattr(engine, "sequence_parallel_size", 1))
    if sequence > 1:
        yield f"sequence parallelism (sequence_parallel_size = {sequence})"
    size = torch.distributed.get_world_size(engine.seq_data_parallel_group)
    world_size = torch.distributed.get_world_size()
    stages = int(engine.num_stages) if is_pipeline(engine) else 1
    if size * stages != world_size:
        in_stages = f" in {stages} pipeline stages" if stages > 1 else ""
        yield (
            f"a data-parallel group of {size} of {world_size} ranks{in_stages} (tensor or model parallelism)"
        )
    if _calls(engine, "torch_autocast_enabled") and engine.torch_autocast_dtype() == torch.float16:
        yield "torch_autocast with dtype float16 (it scales the loss out of our sight); use the fp16 section"
    if _calls(engine, "is_deepcompile_enabled"):
        yield "DeepCompile (compile.deepcompile = true): it reduces gradients inside the compiled graph"
    if getattr(engine, "_autoep_folding_spec", None) is not None:
        yield "AutoEP parameter folding"


def _unsupported_optimizer(engine: Any) -> Iterator[str]:
    optimizer = inner_optimizer(engine)
    backend = getattr(optimizer, "comm_backend_name", None)
    if backend is not None and gradient_path_of_optimizer(engine) is None:
        yield (
            f"the optimizer {type(optimizer).__name__} with optimizer.params.comm_backend_name = "
            f"{backend!r}: it exchanges its momentum by itself ({SECTION!r} has it exchanged through the "
            "plugin)"
        )
    if "muon" in type(optimizer).__name__.lower():
        yield f"the optimizer {type(optimizer).__name__}: it needs whole gradient matrices"


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
