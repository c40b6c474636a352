"""All that a framework, or a feature of it, refuses: options of ``dct.data_parallel`` and features of jobs.

A row of :data:`REFUSALS` has an option, the settings and the job that it is refused for, the reason, and what
to write instead. A row of :data:`FEATURES` has an attribute of a job, and the reason. The table of keys in
``docs/support.md`` is made from the first. This module imports no torch: ``dct config check`` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dct_plugin.config import AutoFeedback, DataParallelConfig, LocalFeedback, ParametersConfig
from dct_plugin.config.options import show
from dct_plugin.errors import ConfigError, DCTError

#: Why a framework has no updates of weights to exchange.
WHOLE_OPTIMIZER = "every rank has the whole optimizer, no weights are gathered after a step"
#: Why it would save nothing to send changed weights alone.
ALL_CHANGE = "nearly all fp32 weights change in a step"
ANOTHER_FORM = "its weights are not gathered as they are"

_MESH = "the replicas of the mesh are the nodes, inside which FSDP gathers the weights"
_BARE = "this needs parameters and optimizer, and torchft hands over bare tensors"
_WHOLE = "all ranks shard one copy of the model, and gradients cross whole, without a residual"
_MEGATRON = "Megatron's iterations exchange gradients in every step"
_THRESHOLDED_COPIES = (
    "updates with thresholds go to copies of the weights that DeepSpeed keeps in each node",
    "set zero_optimization.zero_hpz_partition_size to the ranks of a node; or write 'int8', or 'exact' with "
    "several ranks per node, for copies that the plugin keeps",
)
_TIED = (
    "stages of the pipeline have weights in common (TiedLayerSpec), which their optimizers cut in different "
    "places: the copies would drift apart"
)
KEEPS_MOMENTUM = "the optimizer keeps what is not sent of its momentum"


class Refusal(NamedTuple):
    """An option that a framework refuses.

    Attributes:
        key: Below ``dct.data_parallel``.
        why: The reason, in words.
        instead: What to write in its place.
        when: Condition on the settings and the job; None: the option is not null, false or empty.
    """

    key: str
    why: str
    instead: str = "leave it out"
    when: Callable[[DataParallelConfig, Any], object] | None = None


def _int8(settings: DataParallelConfig, job: Any) -> bool:
    return settings.parameters == "int8"


def _is_divided(job: Any) -> bool:
    return bool(job.stage or job.pipeline or job.experts or job.precision == "fp16")


def _exact_in_fp32(settings: DataParallelConfig, job: Any) -> bool:
    return bool(settings.parameters == "exact" and job.precision == "fp32")


def _rows(keys: str, why: str) -> tuple[Refusal, ...]:
    return tuple(Refusal(key, why) for key in keys.split())


_OWN_WEIGHTS = (
    "every rank trains weights of its own, which needs ZeRO stage 0 with fp32 weights or the bf16 section, "
    "without pipeline stages, experts and fp16"
)
_ALONE = (
    Refusal("local_steps", _OWN_WEIGHTS, when=lambda s, job: asks_for("local_steps", s) and _is_divided(job)),
    Refusal("exchange_of", _OWN_WEIGHTS, when=lambda s, job: s.exchange_of == "updates" and _is_divided(job)),
)

#: By framework. A job of DeepSpeed is a :class:`..deepspeed.section.Job`.
REFUSALS: dict[str, tuple[Refusal, ...]] = {
    "torch DDP": (Refusal("parameters", WHOLE_OPTIMIZER),),
    "FSDP2": _rows("parameters nodes", _MESH),
    "FSDP2 on one mesh": (
        *_rows("sparsity adaptive quality local_steps exchange_of", _WHOLE),
        Refusal("feedback", _WHOLE,
                when=lambda s, _: s.feedback.keeps_residual and s.feedback.label() != "auto"),
        Refusal("parameters", "copies of the weights have no thresholds",
                "write 'exact' or 'int8', or null for FSDP's own gathers",
                lambda s, _: isinstance(s.parameters, ParametersConfig)),
    ),
    "torchft": _rows(
        "feedback nodes nonfinite_action parameters local_steps verify adaptive quality exchange_of", _BARE
    ),
    "Megatron": (
        *_rows("local_steps exchange_of", _MEGATRON),
        Refusal("parameters", "copies in int8 are for FSDP2 on one mesh and ZeRO stage 3", when=_int8),
    ),
    "ZeRO stage 0 to 2": (
        *_ALONE,
        Refusal("parameters", f"{ALL_CHANGE}: 'exact' is for bf16 and fp16", when=_exact_in_fp32),
        Refusal("parameters", "copies of the weights are for ZeRO stage 3", when=_int8),
        Refusal("parameters", WHOLE_OPTIMIZER, when=lambda s, job: s.parameters and not job.gathers_weights),
        Refusal("parameters", _TIED, when=lambda s, job: s.parameters and job.tied_weights),
    ),
    "ZeRO stage 3": (
        *_ALONE,
        Refusal("parameters", f"{ALL_CHANGE}: 'exact' is for bf16 and fp16", when=_exact_in_fp32),
        Refusal("parameters", *_THRESHOLDED_COPIES,
                lambda s, job: isinstance(s.parameters, ParametersConfig) and job.ranks_per_copy <= 1),
        Refusal("parameters", "DeepSpeed keeps the copies in nodes, in 16 bits", "write 'exact'",
                lambda s, job: s.parameters == "int8" and job.ranks_per_copy > 1),
        Refusal("verify", "every rank has a part of its own of the parameters, there is nothing to compare"),
        Refusal("nonfinite_action", "DeepSpeed looks for such gradients in fp16 alone here", "write 'pass'",
                lambda s, job: s.nonfinite_action == "skip" and job.precision != "fp16"),
    ),
    "optimizer.params.comm_backend_name = 'dct'": (
        Refusal("enabled", KEEPS_MOMENTUM, "write true", lambda s, _: not s.enabled),
        Refusal("feedback", KEEPS_MOMENTUM, "write 'local'",
                lambda s, _: not isinstance(s.feedback, AutoFeedback) and s.feedback != LocalFeedback()),
        Refusal("adaptive", KEEPS_MOMENTUM),
        Refusal("residual_dtype", KEEPS_MOMENTUM, "write 'fp32'",
                lambda s, _: s.residual_dtype not in ("auto", "fp32")),
    ),
}  # fmt: skip

#: From megatron-core 0.19 on; 1 is none. Megatron derives both numbers from those that it names here.
_GTP = {
    f"{prefix}gtp_weight_remat_size": "generalised tensor parallelism: ranks hold shards of weights, and sum "
    f"their gradients by themselves ({number})"
    for prefix, number in (
        ("", "tensor_parallel_num_weight_shards"),
        ("expert_", "expert_tensor_parallel_num_weight_shards"),
    )
}
#: Features of a job that are refused, worst first, by the attribute of the job that says so. A reason says
#: its value at ``{}``.
FEATURES: dict[str, dict[str, str]] = {
    "DeepSpeed": {
        "engine": "the engine {} (hybrid engine, DualPipeV)",
        "quantized_gradients": "zero_optimization.zero_quantized_gradients = true: DeepSpeed quantises the "
        "gradients that dct thresholds",
        "offload": "offloading ({})",
        "tables": "ShardedTables that DeepSpeed averages between ranks: wrap the model in "
        "dct_plugin.integrations.dlrm.experts.Experts (docs/embeddings.md)",
        "zenflow": "ZenFlow (zero_optimization.zenflow)",
        "unmanaged_accumulation": "managed_gradient_accumulation = false: a step ends where step() is "
        "called, and gradients are reduced before that is known",
        "sequence_ranks": "sequence parallelism (sequence_parallel_size = {})",
        "model_parallel": "{}",
        "autocast_fp16": "torch_autocast with dtype float16 (it scales the loss out of our sight); use the "
        "fp16 section",
        "deepcompile": "DeepCompile (compile.deepcompile = true): it reduces gradients inside the compiled "
        "graph",
        "autoep": "AutoEP parameter folding",
        "wrapper": "the optimizer wrapper {}",
        "own_backend": "the optimizer {job.optimizer} with optimizer.params.comm_backend_name = '{}': it "
        "exchanges its momentum by itself ('dct' has it exchanged through the plugin)",
    },
    "dct.data_parallel": _GTP,
    "dct.data_parallel.parameters": dict.fromkeys(
        ("use_precision_aware_optimizer", "overlap_param_gather_with_optimizer_step",
         "optimizer_cpu_offload", "reuse_grad_buf_for_mxfp8_param_ag", "use_megatron_fsdp"),
        ANOTHER_FORM,
    ),
    "dct.model_parallel.tensor": {
        "fp8": "products in fp8 (--fp8-format)",
        "fp4": "products in fp4 (--fp4-format)",
        "quant_recipe": "precisions by module (--te-precision-config-file)",
        "tp_comm_overlap": "overlapped tensor-parallel communication (--tp-comm-overlap)",
        "cuda_graph_impl": "CUDA graphs (the number of entries that cross depends on the data)",
        **_GTP,
    },
    "dct.model_parallel.pipeline": {
        "variable_seq_lengths": "receivers must know sizes in advance",
        "mtp_standalone": "its shapes differ between stages",
        "use_ring_exchange_p2p": "its transfers cannot be replaced",
    },
}  # fmt: skip


def asks_for(key: str, settings: DataParallelConfig) -> bool:
    """Return whether settings ask for an option, and do not just have a value of it that changes nothing."""
    value: Any = getattr(settings, key)
    if key == "sparsity":
        return key in settings.model_fields_set and value > 0
    if key == "feedback":
        return settings.feedback.looks_ahead
    if key == "nodes":
        return value not in ("auto", 1)
    if key == "verify":
        return settings.asks_to_verify
    if key == "local_steps":  # an exchange of updates is one of local steps, too
        return value is not None and settings.exchange_of != "updates"
    return value not in (None, "pass", "gradients")


def refused(framework: str, settings: DataParallelConfig, job: Any = None) -> Iterator[tuple[str, str]]:
    """Yield the options of a section that a framework cannot serve, with a sentence for each."""
    for key, why, instead, when in REFUSALS.get(framework, ()):
        if asks_for(key, settings) if when is None else when(settings, job):
            given = show(getattr(settings, key))
            yield key, f"dct.data_parallel.{key} = {given}: {framework}: {why}; {instead}"


def refuse(framework: str, settings: DataParallelConfig, rank: int | None = None) -> None:
    """Refuse a section that asks for something that a framework cannot serve.

    Raises:
        ConfigError: Names the option, its value, the rank, the reason, and what to write instead.
    """
    for _, sentence in refused(framework, settings) if settings.enabled else ():
        raise ConfigError(sentence if rank is None else f"rank {rank}: {sentence}")


def features(place: str, job: Any) -> Iterator[tuple[str, str]]:
    """Yield the attributes of the features that a job has and must not have, with the reasons."""
    for name, why in FEATURES[place].items():
        if (value := getattr(job, name, None)) and value != "none" and (value is True or value != 1):
            yield name, why.format(value, job=job)


def refuse_features(place: str, config: Any, where: str = "") -> None:
    """Refuse a configuration of Megatron that does not go with a section.

    Raises:
        DCTError: Names the place, the attribute and its value.
    """
    for name, why in features(place, config):
        given = f"Megatron's {name} = {getattr(config, name)}"
        raise DCTError(f"{where or place}: does not work with {given}: {why}; switch it off, or {place}")
