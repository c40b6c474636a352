"""Which DeepSpeed and which combinations are supported, checked before anything is touched.

Everything that is patched, called or read is listed here with the parameters it is expected to have: a
DeepSpeed that moved one of them is refused with a message, instead of training on without the plugin or
wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from dct_plugin.config import DCTConfig, LocalFeedback
from dct_plugin.config.options import show
from dct_plugin.errors import ConfigError, VersionError

from ..host import signatures
from ..host.signatures import Target
from ..host.versions import VersionRange, parse, unsupported
from .section import SECTION as BACKEND_NAME
from .section import gradient_path_of_optimizer
from .zero3 import SCATTER, SCATTER_CONTIGUOUS

SUPPORTED = VersionRange("0.19.0", "0.20.0")
#: Versions that ran: the last one the whole suite, the others every kind of hook.
TESTED = ("0.19.0", "0.19.4", "0.19.8")

_REMEDY = "install a supported DeepSpeed, update dct-plugin, or set dct.enabled to false to train without it"

_ENGINE = "deepspeed.runtime.engine", "DeepSpeedEngine"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"
_BF16 = "deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"
_ZERO3 = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"


_GATHERED = (
    "groups_flat", "partitioned_param_groups", "dp_process_group", "start_alignment_factor",
    "allgather_bucket_size",
)  # fmt: skip


def _target(owner: tuple[str, str], method: str, parameters: str = "") -> Target:
    module, cls = owner
    return Target(module, f"{cls}.{method}", ("self", *parameters.split()))


#: Methods that are replaced, wrapped or called, and the parameters that are passed or received.
TARGETS = (
    _target(_ENGINE, "buffered_allreduce_fallback", "grads elements_per_buffer"),
    _target(_ENGINE, "allreduce_and_copy", "small_bucket dp_group dp_world_size"),
    _target(_ENGINE, "_get_gradients_for_reduction"),
    _target(_ENGINE, "_reduce_expert_gradients", "expert_grads elements_per_buffer"),
    _target(_ENGINE, "_take_model_step", "lr_kwargs"),
    _target(_ENGINE, "save_checkpoint", "save_dir tag client_state save_latest"),
    _target(
        _ENGINE,
        "load_checkpoint",
        "load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only",
    ),
    _target(_ENGINE, "destroy"),
    _target(_ZERO, "average_tensor", "tensor communication_data_type"),
    _target(
        _ZERO,
        "allreduce_and_scatter",
        "bucket communication_data_type numel_per_bucket log divide process_group",
    ),
    _target(_ZERO, "gradient_reduction_w_predivide", "tensor communication_data_type"),
    _target(_ZERO, "allreduce_bucket", "bucket communication_data_type rank log divide process_group"),
    _target(_ZERO, "get_param_id", "param"),
    _target(_ZERO, "step", "closure"),
    _target(_ZERO, "update_lp_params"),
    _target(_BF16, "get_grads_for_reduction"),
    _target(_BF16, "step", "closure"),
    _target(_BF16, "update_lp_params"),
    *(Target(module, "all_gather_dp_groups", _GATHERED) for module, _ in (_ZERO, _BF16)),
)

_PIPELINE = "deepspeed.runtime.pipe.engine", "PipelineEngine"

#: The same for pipeline engines, looked at where there is one.
PIPELINE_TARGETS = (
    _target(_PIPELINE, "train_batch", "data_iter"),
    *(_target(_PIPELINE, f"_exec_{name}", "buffer_id")
      for name in ("send_activations", "recv_activations", "send_grads", "recv_grads")),
    Target("deepspeed.runtime.pipe.p2p", "send", ("tensor", "dest_stage", "async_op")),
    Target("deepspeed.runtime.pipe.p2p", "recv", ("tensor", "src_stage", "async_op")),
    Target("deepspeed.runtime.pipe.module", "PipelineModule.get_tied_weights_and_groups", ("self",)),
)  # fmt: skip
#: The same under ZeRO-3 alone.
ZERO3_TARGETS = (
    _target(_ZERO3, SCATTER, "params_to_reduce communication_data_type"),
    _target(_ZERO3, SCATTER_CONTIGUOUS, "buffer_to_reduce communication_data_type"),
)

#: The same for experts on other ranks.
EXPERT_TARGETS = (
    Target("deepspeed.moe.sharded_moe", "MOELayer.forward", ("self", "input")),
    Target("deepspeed.moe.sharded_moe", "_AllToAll.forward", ("ctx", "group", "input")),
)

#: Optimizer wrappers with gradient paths of their own; anything else at stage 0 is reduced by the engine.
_KINDS = {
    "DeepSpeedZeroOptimizer": "zero",
    "BF16_Optimizer": "bf16",
    "DeepSpeedZeroOptimizer_Stage3": "zero3",
}

_ENGINE_ATTRIBUTES = (
    "optimizer", "module", "monitor", "device", "global_rank", "global_steps", "gradient_average",
    "communication_data_type", "postscale_gradients", "gradient_predivide_factor", "has_moe_layers",
    "seq_data_parallel_group",
)  # fmt: skip
_PIPELINE_ATTRIBUTES = (
    "_INSTRUCTION_MAP", "pipe_buffers", "pipe_recv_buf", "grid", "stage_id", "num_stages",
    "has_attention_mask", "has_bool_tensors", "is_model_parallel",
)  # fmt: skip
_ZERO_ATTRIBUTES = (
    "ipg_buckets", "bit16_groups", "param_names", "param_to_partition_ids", "grad_start_offset",
    "dp_process_group", "reduce_scatter", "contiguous_gradients", "use_multi_rank_bucket_allreduce",
    "postscale_gradients", "gradient_predivide_factor", "flatten", "loss_scale", "bit16_groups_flat",
    "parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups",
)  # fmt: skip
_BF16_ATTRIBUTES = (
    "bf16_groups", "fp32_groups_gradients", "fp32_groups_gradients_flat", "param_names", "bf16_groups_flat",
    "bf16_partitioned_groups", "fp32_groups_flat_partition",
)  # fmt: skip


_ZERO3_ATTRIBUTES = (
    "ipg_buckets", "fp16_groups", "param_names", "dp_process_group", "postscale_gradients",
    "gradient_predivide_factor", "gradient_accumulation_dtype", "loss_scale",
)  # fmt: skip

#: Wrappers of engines without an optimizer.
_NO_OPTIMIZER = ("DummyOptim", "DeepSpeedZeRoOffload")


def inner_of(engine: Any) -> Any:
    """The optimizer that steps, without a wrapper of DeepSpeed's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def check_version(version: str) -> None:
    """Whether this DeepSpeed is one we know, method by method.

    Raises:
        VersionError: Says what was found, what is supported and what to do.
    """
    if version not in SUPPORTED:
        raise unsupported(f"DeepSpeed {version}", _supported(), _REMEDY)
    signatures.require(TARGETS, f"DeepSpeed {version}", _supported(), _REMEDY)


def _supported() -> str:
    return f"{SUPPORTED} (tested: {', '.join(TESTED)})"


def check_engine(engine: Any, version: str) -> str:
    """Whether this engine's combination of features is supported.

    Returns:
        The kind of hooks it needs: ``"stage0"``, ``"bf16"``, ``"zero"``, ``"zero3"``, ``"momentum"`` for an
            optimizer that exchanges its momentum through us, or ``"none"`` for an engine that does not train
            (it has no optimizer).

    Raises:
        ConfigError: Names the combination, the key that asks for it, and what is supported.
        VersionError: An attribute that we read is missing.
    """
    optimizer = engine.optimizer
    for reason in _unsupported(engine, optimizer):
        raise ConfigError(
            f"rank {engine.global_rank}: dct does not support {reason}. Supported is DeepSpeed's ordinary "
            "engine with ZeRO stage 0 to 3 in fp32, bf16 or fp16, data parallel over all ranks, or its "
            "pipeline engine with ZeRO stage 0 or 1, without offload; set dct.enabled to false to train "
            "without it"
        )
    if optimizer is None or type(optimizer).__name__ in _NO_OPTIMIZER:
        return "none"
    kind = _KINDS.get(type(optimizer).__name__, "stage0")
    if gradient_path_of_optimizer(engine) is not None:
        kind = "momentum"
    needed: list[tuple[str, Any, tuple[str, ...]]] = [("engine", engine, _ENGINE_ATTRIBUTES)]
    if is_pipeline(engine):
        signatures.require(PIPELINE_TARGETS, f"DeepSpeed {version}", _supported(), _REMEDY)
        needed.append(("engine", engine, _PIPELINE_ATTRIBUTES))
    if kind == "zero":
        needed.append(("optimizer", optimizer, _ZERO_ATTRIBUTES))
    elif kind == "bf16":
        needed.append(("optimizer", optimizer, _BF16_ATTRIBUTES))
    elif kind == "zero3":
        signatures.require(ZERO3_TARGETS, f"DeepSpeed {version}", _supported(), _REMEDY)
        needed.append(("optimizer", optimizer, _ZERO3_ATTRIBUTES))
    missing = [f"{what}.{name}" for what, thing, names in needed for name in names if not _has(thing, name)]
    if missing:
        raise VersionError(
            f"DeepSpeed {version}: {', '.join(missing)} missing; this version is not supported by dct-plugin "
            f"(tested: {', '.join(TESTED)})"
        )
    return kind


def is_pipeline(engine: Any) -> bool:
    """Whether it is DeepSpeed's pipeline engine."""
    return isinstance(engine, import_module(_PIPELINE[0]).PipelineEngine)


def check_local(engine: Any, kind: str) -> None:
    """Whether the engine's optimizer can step each rank's own weights (``"feedback": "local_updates"``).

    Raises:
        ConfigError: Says why not.
    """
    reason = ""
    if kind != "stage0":
        stage = int(engine.zero_optimization_stage())
        reason = f"under ZeRO stage {stage} a rank's optimizer has a part of the weights, and needs all"
    elif is_pipeline(engine):
        reason = "in a pipeline passes overlap, and stages have weights in common"
    elif engine.fp16_enabled():
        reason = "under fp16 a rank that skips a step changes its loss scale, and the others do not"
    if reason:
        raise ConfigError(
            f"rank {engine.global_rank}: dct.data_parallel.feedback = 'local_updates': {reason}. "
            "Supported is ZeRO stage 0 in fp32 or bf16; set feedback to 'local'"
        )


def check_parameters(engine: Any) -> None:
    """Whether updates of the engine's weights can be thresholded (``parameters``).

    Raises:
        ConfigError: Says why not.
    """
    if is_pipeline(engine) and engine.module.get_tied_weights_and_groups():
        raise ConfigError(
            f"rank {engine.global_rank}: dct.data_parallel.parameters: stages of the pipeline "
            "have weights in common (TiedLayerSpec), which their optimizers cut in different places: the "
            "copies would drift apart. Leave it out"
        )


def check_momentum(config: DCTConfig, rank: int) -> None:
    """Whether an optimizer's momentum can be exchanged so.

    Raises:
        ConfigError: Names the key, its value and what is allowed.
    """
    settings = config.data_parallel
    given_and_allowed = {
        "enabled": (config.enabled, True),
        "data_parallel.enabled": (settings.enabled, True),
        "data_parallel.feedback": (settings.feedback, LocalFeedback()),
        "data_parallel.adaptive": (settings.adaptive, None),
        "data_parallel.residual_dtype": (settings.residual_dtype.replace("auto", "fp32"), "fp32"),
        "data_parallel.expert.error_averaging": (settings.expert.error_averaging, None),
    }
    for key, (given, value) in given_and_allowed.items():
        if given != value:
            raise ConfigError(
                f"rank {rank}: dct.{key} = {show(given)} does not go with "
                f"optimizer.params.comm_backend_name = '{BACKEND_NAME}', where the optimizer keeps what "
                f"is not sent of its momentum: must be {show(value)}"
            )


def check_experts(engine: Any, config: DCTConfig, version: str) -> None:
    """Whether tokens on their way to the engine's experts can be compressed, and gradients of these
    thresholded (``expert_gradients``).

    Raises:
        ConfigError: Says why not.
        VersionError: This DeepSpeed's layer is another one.
    """
    tokens, settings = config.model_parallel.experts, config.data_parallel
    if engine.has_moe_layers and tokens.compresses:
        signatures.require(EXPERT_TARGETS, f"DeepSpeed {version}", _supported(), _REMEDY)
    if not (config.model_parallel.expert_gradients and settings.enabled and engine.has_moe_layers):
        return
    reason = ""
    if settings.feedback.looks_ahead:
        reason = "feedback = 'step_ahead' displaces the weights of all ranks alike, and experts differ"
    elif settings.feedback.steps_locally:
        reason = (
            "feedback = 'local_updates' exchanges weights, and keeps DeepSpeed's own exchange for experts"
        )
    if reason:
        raise ConfigError(
            f"rank {engine.global_rank}: dct.model_parallel.expert_gradients = true: {reason}; set it to "
            "false"
        )


def known_fault(engine: Any, version: str) -> str:
    """What DeepSpeed itself does wrong in this combination, with or without the plugin; mostly empty."""
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
    """Whether this DeepSpeed's ZeRO-1 and 2 reduce gradients that lie apart: on CPU older ones do not."""
    stage = import_module("deepspeed.runtime.zero.stage_1_and_2")
    return device.type != "cpu" or bool(stage.split_half_float_double([torch.zeros(1)]))


def _unsupported(engine: Any, optimizer: Any) -> Iterator[str]:
    """The combinations that are refused, worst first."""
    base = import_module(_ENGINE[0]).DeepSpeedEngine
    for cls in type(engine).__mro__:
        if cls is base:
            break
        if cls.__module__.startswith("deepspeed.") and (cls.__module__, cls.__name__) != _PIPELINE:
            yield f"the engine {cls.__name__} (hybrid engine, DualPipeV)"
    stage, wrapper = int(engine.zero_optimization_stage()), type(optimizer).__name__
    if stage > 0 and optimizer is not None and wrapper not in (*_KINDS, *_NO_OPTIMIZER):
        yield f"the optimizer wrapper {wrapper}"
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
    inner = inner_of(engine)
    backend = getattr(inner, "comm_backend_name", BACKEND_NAME)
    if backend != BACKEND_NAME:
        yield (
            f"the optimizer {type(inner).__name__} with optimizer.params.comm_backend_name = {backend!r}: it "
            f"exchanges its momentum by itself ({BACKEND_NAME!r} has it exchanged through the plugin)"
        )
    if "muon" in type(inner).__name__.lower():
        yield f"the optimizer {type(inner).__name__}: it needs whole gradient matrices"
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


def _calls(engine: Any, name: str) -> bool:
    return _has(engine, name) and bool(getattr(engine, name)())


def _has(thing: Any, name: str) -> bool:
    # Engine attributes that are missing fall through to the user's model, whose __getattr__ may raise
    # anything.
    try:
        getattr(thing, name)
    except Exception:
        return False
    return True
