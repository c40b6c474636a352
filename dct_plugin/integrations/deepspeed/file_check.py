"""``dct config check``: a file judged as the start of its job would, without starting anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dct_plugin.config import DCTConfig
from dct_plugin.config.options import option_values
from dct_plugin.config.validation_errors import DEEPSPEED_KEYS
from dct_plugin.errors import ConfigError
from dct_plugin.policy import resolve
from dct_plugin.policy.optimizers import OptimizerFamily, unknown_step
from dct_plugin.policy.rules import compressors_of

from ..host.versions import parse
from .rules import refusals, training_facts, without_slot
from .section import SECTION, Job, backend_name, misplaced_section


@dataclass
class FileReport:
    """The faults and warnings of a file.

    Attributes:
        config: The section as the job applies it; None if it cannot be read.
        faults: What stops the job.
        warnings: What trains, but probably not as it was meant.
        notes: What the section becomes in this job.
    """

    config: DCTConfig | None = None
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(content: Mapping[str, Any], ranks: int = 0, ranks_per_node: int = 1) -> FileReport:
    """Return what is to be said about a DeepSpeed JSON, or about a bare ``dct`` section. DeepSpeed checks its
    own keys when the job starts.

    Args:
        content: The file.
        ranks: Ranks of the job; 0 if they are not known.
        ranks_per_node: Those of a machine.
    """
    report = FileReport()
    is_deepspeed = bool(DEEPSPEED_KEYS & content.keys())
    found, section = _find_section(content, report, is_deepspeed)
    if found:
        try:
            report.config = DCTConfig.parse(section)
        except ConfigError as error:
            report.faults += error.faults or [str(error)]
    if is_deepspeed and found and (report.config is None or report.config.enabled):
        _judge(content, report, ranks, ranks_per_node)
    if report.config is not None:
        report.warnings += _dense(report.config)
    return report


def _judge(content: Mapping[str, Any], report: FileReport, ranks: int, ranks_per_node: int) -> None:
    """Add what the start of a DeepSpeed job would say about its section."""
    job = Job.of_json(content)
    if job.exchanges_momentum and parse(job.version) > (0, 19, 6):
        report.faults.append(without_slot(job.version))
    # A section with faults says nothing, but the job can be judged without it.
    config = report.config or DCTConfig()
    if report.config is not None and not job.exchanges_momentum:
        config = _resolved(job, config, report, ranks, ranks_per_node)
    report.faults += refusals(job, config)
    steps = content.get("gradient_accumulation_steps")
    if job.stage == 2 and isinstance(steps, int) and steps > 1 and config.data_parallel.enabled:
        report.notes.append(
            f"ZeRO stage 2 sends gradients after each of the {steps} micro-batches of a step; stage 1 sends "
            f"them once, 1/{steps} of the bytes"
        )
    if report.config is not None:
        report.config = config


def _dense(config: DCTConfig) -> list[str]:
    """Return warnings about sparsities that were probably meant as densities."""
    return [
        f"{path} = {value} sends {1 - value:.0%} of the entries; did you mean {round(1 - value, 6)}?".replace(
            "%", " %"
        )
        for path, value in option_values(config).items()
        if path.endswith("sparsity") and isinstance(value, float) and 0 < value < 0.5
    ]


def _resolved(job: Job, config: DCTConfig, report: FileReport, ranks: int, ranks_per_node: int) -> DCTConfig:
    """Return the section with the feedback that suits the optimizer; add what is to be said about it."""
    training = replace(training_facts(job, config), ranks=ranks)
    if training.family is OptimizerFamily.UNTOLD:
        report.notes.append("the script makes the optimizer, which the feedback depends on")
        return config
    settings = config.data_parallel
    made = resolve(settings, training, compressors_of(settings, ranks, ranks_per_node))
    report.notes += [made.updates] if made.updates else []
    if made.line:
        (report.warnings if made.warns else report.notes).append(made.line)
    if made.settings.feedback.looks_ahead and training.family is OptimizerFamily.OTHER:
        report.faults.append(str(unknown_step(job.optimizer)))
    return config.model_copy(update={"data_parallel": made.settings})


def _find_section(content: Mapping[str, Any], report: FileReport, is_deepspeed: bool) -> tuple[bool, Any]:
    """Return whether a file has a section, and it; add a fault where it does not stand in its place."""
    keys = {key: content[key] for key in DCTConfig.model_fields if key in content} if is_deepspeed else {}
    if keys:
        names = ", ".join(map(repr, keys))
        report.faults.append(
            f'{names}: nothing reads it at the top of the file; write "{SECTION}": {{{names}: ...}}'
        )
    if SECTION in content:
        return True, content[SECTION]
    if misplaced := misplaced_section(content):
        report.faults.append(misplaced[0])
        return True, misplaced[1]
    if not is_deepspeed:
        return True, content
    if keys:
        return True, keys
    return backend_name(content) == SECTION, {}
