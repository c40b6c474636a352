"""The combinations that a DeepSpeed job cannot have, or should not: for its start and ``dct config check``.

The rules judge a :class:`.section.Job`, made of an engine or of its JSON. Only the checks for
functions and attributes of the installed DeepSpeed are not here: the paths make them. This module imports
neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator

from dct_plugin.config import DCTConfig
from dct_plugin.config.options import show
from dct_plugin.errors import ConfigError
from dct_plugin.policy import Training

from ..host.refusals import ALL_CHANGE, KEEPS_MOMENTUM, features, refused
from ..host.versions import parse
from .section import SECTION, Job

_SUPPORTED = (
    "Supported is DeepSpeed's ordinary engine with ZeRO stage 0 to 3 in fp32, bf16 or fp16, data parallel "
    "over all ranks, or its pipeline engine with ZeRO stage 0 or 1, without offload; set dct.enabled to "
    "false to train without it"
)
#: Earlier versions orthogonalise gradients inside the collectives that are replaced.
_MUON = (0, 19, 8)


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
        return ALL_CHANGE
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


def _unsupported(job: Job) -> Iterator[str]:
    """Yield the features of a job that are refused."""
    yield from (why for _, why in features("DeepSpeed", job))
    is_old = bool(job.version) and parse(job.version) < _MUON
    if "muon" in job.optimizer.lower() and (job.stage == 0 or is_old):
        yield f"the optimizer {job.optimizer} without ZeRO, or before DeepSpeed 0.19.8"


def _of_section(job: Job, config: DCTConfig) -> Iterator[str]:
    """Yield what the section asks for and the job cannot have."""
    settings, tables = config.data_parallel, []
    if job.exchanges_momentum:
        tables.append(f"optimizer.params.comm_backend_name = '{SECTION}'")
        if not config.enabled:
            yield f"dct.enabled = false: {tables[0]}: {KEEPS_MOMENTUM}; write true"
    if settings.enabled:
        if settings.feedback.looks_ahead and job.trains and (why := step_ahead_unavailable(job, config)):
            yield f"dct.data_parallel.feedback = {show(settings.feedback)}: {why}; leave it out"
        if job.trains:
            tables.append("ZeRO stage 3" if job.stage == 3 else "ZeRO stage 0 to 2")
    yield from (sentence for table in tables for _, sentence in refused(table, settings, job))
