"""The combinations that a DeepSpeed job cannot have, or should not: for its start and ``dct config check``.

The rules judge a :class:`.section.Job`, made of an engine or of its JSON. Only the checks for
functions and attributes of the installed DeepSpeed are not here: the paths make them. This module imports
neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from dct_plugin.config import AutoFeedback, DataParallelConfig, DCTConfig, LocalFeedback, ParametersConfig
from dct_plugin.config.data_parallel import refuse
from dct_plugin.config.options import show
from dct_plugin.errors import ConfigError
from dct_plugin.policy import Training

from ..host.versions import parse
from .section import SECTION, Job

_SUPPORTED = (
    "Supported is DeepSpeed's ordinary engine with ZeRO stage 0 to 3 in fp32, bf16 or fp16, data parallel "
    "over all ranks, or its pipeline engine with ZeRO stage 0 or 1, without offload; set dct.enabled to "
    "false to train without it"
)
#: Earlier versions orthogonalise gradients inside the collectives that are replaced.
_MUON = (0, 19, 8)
_ALL_CHANGE = "nearly all fp32 weights change in a step"


def require(job: Job, config: DCTConfig, *, rank: int) -> None:
    """Stop a job that cannot train with its section.

    Raises:
        ConfigError: All reasons, with the rank.
    """
    reasons = refusals(job, config)
    if len(reasons) > 1:
        raise ConfigError(f"rank {rank}: {len(reasons)} reasons against this job:\n  " + "\n  ".join(reasons))
    if reasons:
        raise ConfigError(f"rank {rank}: {reasons[0]}")


def refusals(job: Job, config: DCTConfig) -> list[str]:
    """Return why a job cannot train with its section; empty if it can."""
    features = [f"dct does not support {reason}" for reason in _unsupported(job)]
    if features:
        features[-1] += f". {_SUPPORTED}"
    return [*features, *_of_section(job, config)]


def step_ahead_unavailable(job: Job, config: DCTConfig) -> str:
    """Return why a job cannot have step-ahead feedback; empty if it can."""
    if job.stage == 3 and (job.ranks_per_copy <= 1 or config.data_parallel.parameters is None):
        return (
            "under ZeRO stage 3 no rank has the whole weights that step-ahead displaces (it can displace "
            "copies in nodes: set zero_optimization.zero_hpz_partition_size and dct.data_parallel.parameters)"
        )
    if config.model_parallel.expert_gradients and job.experts:
        return "expert_gradients: step-ahead displaces the weights of all ranks alike, and experts differ"
    return ""


def exact_unavailable(job: Job, *, node_copies: bool) -> str | None:
    """Return why changed weights alone cannot cross in a job by default; empty if they can, None where no
    weights are gathered after a step.
    """
    if job.stage == 3 and not node_copies:
        why = "under ZeRO stage 3 modules gather them when they need them"
        remedy = "zero_optimization.zero_hpz_partition_size keeps an exact copy in each node"
        return why if job.ranks_per_copy > 1 else f"{why} ({remedy}; parameters 'int8' keeps one without it)"
    if not (node_copies or job.gathers_weights):
        return None
    if job.precision == "fp32":
        return _ALL_CHANGE
    return "stages of the pipeline have some in common" if job.tied_weights else ""


def training_facts(job: Job, config: DCTConfig, *, node_copies: bool = False) -> Training:
    """Return the facts of a job that its settings depend on.

    Args:
        job, config: The job and its section.
        node_copies: Whether hpZ is known to keep a copy of the weights in each node.
    """
    return Training(
        [job.optimizer] if job.optimizer else [],
        momentum=job.momentum,
        stage=job.stage,
        lr=job.lr,
        clips=job.clips,
        steps=job.steps,
        step_ahead_unavailable=step_ahead_unavailable(job, config),
        exact_unavailable=exact_unavailable(job, node_copies=node_copies),
        precision=job.precision,
    )


def without_slot(version: str) -> str:
    """Return the sentences for a JSON that asks for the slot of 1-bit Adam in a DeepSpeed that has none."""
    return (
        f"DeepSpeed {version} has no 1-bit Adam, 1-bit LAMB and 0/1 Adam, and with them no place for "
        f"optimizer.params.comm_backend_name = {SECTION!r}: the last version that has them is "
        f"0.19.6. The {SECTION!r} section does the same job for every optimizer: take "
        '"optimizer": {"type": "AdamW", ...} and "dct": {"data_parallel": {"sparsity": 0.99, '
        '"warmup_steps": N}}, where N was freeze_step'
    )


#: Features of DeepSpeed that are refused, worst first, by what a job says of them.
_UNSUPPORTED = {
    "engine": "the engine {} (hybrid engine, DualPipeV)",
    "quantized_gradients": "zero_optimization.zero_quantized_gradients = true: DeepSpeed quantises the "
    "gradients that dct thresholds",
    "offload": "offloading ({})",
    "zenflow": "ZenFlow (zero_optimization.zenflow)",
    "unmanaged_accumulation": "managed_gradient_accumulation = false: a step ends where step() is called, "
    "and gradients are reduced before that is known",
    "sequence_ranks": "sequence parallelism (sequence_parallel_size = {})",
    "model_parallel": "{}",
    "autocast_fp16": "torch_autocast with dtype float16 (it scales the loss out of our sight); use the fp16 "
    "section",
    "deepcompile": "DeepCompile (compile.deepcompile = true): it reduces gradients inside the compiled graph",
    "autoep": "AutoEP parameter folding",
    "wrapper": "the optimizer wrapper {}",
}


def _unsupported(job: Job) -> Iterator[str]:
    """Yield the features of a job that are refused."""
    for name, words in _UNSUPPORTED.items():
        if found := getattr(job, name):
            yield words.format(found)
    if job.own_backend is not None:
        yield (
            f"the optimizer {job.optimizer} with optimizer.params.comm_backend_name = "
            f"{job.own_backend!r}: it exchanges its momentum by itself ({SECTION!r} has it exchanged through "
            "the plugin)"
        )
    is_old = bool(job.version) and parse(job.version) < _MUON
    if "muon" in job.optimizer.lower() and (job.stage == 0 or is_old):
        yield f"the optimizer {job.optimizer} without ZeRO, or before DeepSpeed 0.19.8"


def _of_section(job: Job, config: DCTConfig) -> Iterator[str]:
    """Yield what the section asks for and the job cannot have."""
    settings = config.data_parallel
    if job.exchanges_momentum:
        yield from _of_momentum(config)
    if not settings.enabled:
        return
    if settings.feedback.looks_ahead and job.trains and (why := step_ahead_unavailable(job, config)):
        yield f"dct.data_parallel.feedback = {show(settings.feedback)}: {why}; leave it out"
    plain = job.stage == 0 and job.precision == "fp32" and not (job.pipeline or job.experts)
    if settings.trains_alone and not plain:
        key = "exchange_of" if settings.exchange_of == "updates" else "local_steps"
        yield (
            f"dct.data_parallel.{key}: every rank trains weights of its own, which needs ZeRO stage 0 with "
            'fp32 weights ("torch_autocast" computes in bf16), without pipeline stages and experts'
        )
    if job.trains:
        if job.stage == 3:
            for key, reason in _under_zero3(job, settings):
                given = show(attrgetter(key)(settings))
                yield f"dct.data_parallel.{key} = {given} under ZeRO stage 3: {reason}"
        elif settings.parameters == "int8":
            yield "dct.data_parallel.parameters = 'int8': copies of the weights are for ZeRO stage 3"
        elif settings.parameters is not None:
            yield from _against_updates(job)


def _of_momentum(config: DCTConfig) -> Iterator[str]:
    """Yield what does not go with an optimizer that exchanges its momentum through the plugin."""
    settings = config.data_parallel
    given_and_allowed = {
        "enabled": (config.enabled, True),
        "data_parallel.enabled": (settings.enabled, True),
        "data_parallel.feedback": (
            LocalFeedback() if isinstance(settings.feedback, AutoFeedback) else settings.feedback,
            LocalFeedback(),
        ),
        "data_parallel.adaptive": (settings.adaptive, None),
        "data_parallel.residual_dtype": (settings.residual_dtype.replace("auto", "fp32"), "fp32"),
    }
    for key, (given, allowed) in given_and_allowed.items():
        if given != allowed:
            yield (
                f"dct.{key} = {show(given)} does not go with optimizer.params.comm_backend_name = "
                f"'{SECTION}', where the optimizer keeps what is not sent of its momentum: must be "
                f"{show(allowed)}"
            )


def _against_updates(job: Job) -> Iterator[str]:
    """Yield why the updates of a job's weights cannot be thresholded."""
    if not job.gathers_weights:
        yield str(refuse("ZeRO stage 0"))
    elif job.tied_weights:
        yield (
            "dct.data_parallel.parameters: stages of the pipeline have weights in common (TiedLayerSpec), "
            "which their optimizers cut in different places: the copies would drift apart. Leave it out"
        )


def _under_zero3(job: Job, settings: DataParallelConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that ask for what ZeRO-3 cannot give, with the reasons."""
    copies = job.ranks_per_copy > 1
    if settings.parameters == "exact" and job.precision == "fp32":
        yield "parameters", f"{_ALL_CHANGE}: it is for bf16 and fp16"
    if isinstance(settings.parameters, ParametersConfig) and not copies:
        yield (
            "parameters",
            "updates with thresholds go to copies of the weights that DeepSpeed keeps in each node: set "
            "zero_optimization.zero_hpz_partition_size to the ranks of a node; or write 'int8', or 'exact' "
            "with several ranks per node, for copies that the plugin keeps",
        )
    if settings.parameters == "int8" and copies:
        yield "parameters", "DeepSpeed keeps the copies in nodes, in 16 bits; write 'exact'"
    if settings.asks_to_verify:
        yield (
            "verify",
            "every rank has a part of its own of the parameters, there is nothing to compare; leave it out",
        )
    if settings.nonfinite_action == "skip" and job.precision != "fp16":
        yield "nonfinite_action", "DeepSpeed looks for such gradients in fp16 alone here; set it to 'pass'"
